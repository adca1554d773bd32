"""Data sheets of GPUs: `catalogue/gpus.json` as typed records, found by the name that the driver reports.

Rates are dense (no sparsity), with fp32 accumulation. Each sheet names the vendor's document and where its figures were
compared; `trimtab.facts.gpus` finds a planned GPU by what a user types.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).parent / "catalogue" / "gpus.json"
PCIE_LANE = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}
"""Bytes per second of one lane in each direction, by generation: transfers per second, 128b/130b encoding."""
REPORTED_SHARE = 0.965
"""Of the memory a card is sold with, what CUDA reports at least, where no report is known: 15.45 to 15.49 of 16 GiB on
current GeForce cards, 97.6 % (RTX A4000) to 99.2 % on those of the catalogue that have no ECC in their memory."""
SYSTEM_RESERVE = 4 * 2**30
"""What the operating system and its services take of unified memory: 3 of 122 GiB on an idle Jetson Thor."""
METAL_SHARES = ((36 * 2**30, 2 / 3), (1 << 62, 3 / 4))
"""(up to so many bytes, share) of an Apple machine's memory that Metal recommends as a working set: 10922 of 16384 MiB,
16 of 24 GiB, 48 of 64 GiB (`recommendedMaxWorkingSetSize`, as llama.cpp prints it)."""
DROPPED_WORDS = ("nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "apple", "generation", "gpu")


@dataclass(frozen=True)
class DataSheet:
    """What a vendor promises of one device.

    Example:
        >>> sheet = known_sheet("NVIDIA GeForce RTX 4090")
        >>> sheet.id, sheet.flops["bf16"] / 1e12, sheet.bandwidth / 1e9, sheet.capability
        ('rtx4090', 165.2, 1008.0, (8, 9))
    """

    id: str
    """The name to use with `--gpu`."""
    name: str
    """The name that the driver reports."""
    vendor: Literal["nvidia", "amd", "apple"]
    memory_bytes: int
    """The size it is sold with."""
    bandwidth: float
    """Bytes per second of its memory."""
    flops: dict[str, float]
    """Dense FLOP/s of matrix products by dtype, with fp32 accumulation."""
    source: str
    """The vendor's document."""
    checked: str
    """Where the figures were compared."""
    aliases: tuple[str, ...] = ()
    """Further names that mean this device only."""
    shared_aliases: tuple[str, ...] = ()
    """Names that mean several devices, this one among them."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for other vendors."""
    host_link: float | None = None
    """Bytes per second to host memory, each way, at most; None with unified memory."""
    unified: bool = False
    """Whether CPU and GPU share one memory."""
    reported_bytes: int | None = None
    """What CUDA reports as its total memory, where someone has reported it."""
    reported_source: str = ""
    note: str = ""
    """Where sources disagree, and how derived figures were derived."""

    @property
    def usable_bytes(self) -> int:
        """What a process can have of the memory of an otherwise idle device, its own CUDA context included."""
        if self.vendor == "apple":
            share = next(share for limit, share in METAL_SHARES if self.memory_bytes <= limit)
            return int(self.memory_bytes * share)
        total = self.reported_bytes or int(self.memory_bytes * REPORTED_SHARE)
        return total - SYSTEM_RESERVE if self.unified else total

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that means this device only."""
        own = () if self.id in self.shared_aliases else (self.id,)
        return (*own, *self.aliases)


@functools.cache
def data_sheets() -> tuple[DataSheet, ...]:
    """Every device of the catalogue; one that is sold with several memory sizes has a sheet for each.

    Example:
        >>> len(data_sheets()) > 60, {sheet.vendor for sheet in data_sheets()} == {"nvidia", "amd", "apple"}
        (True, True)
    """
    entries = json.loads(FILE.read_text(encoding="utf-8"))["sheets"]
    return tuple(sheet for entry in entries for sheet in _sheets_of(entry))


def known_sheet(driver_name: str, memory_bytes: int | None = None) -> DataSheet | None:
    """The data sheet of a device by the name its driver reports; None for a device without one, such as a MIG slice.

    Args:
        driver_name: as `torch.cuda.get_device_name` or `nvidia-smi` print it.
        memory_bytes: total memory, to tell sizes of one name apart; the largest without it.

    Example:
        >>> known_sheet("NVIDIA A10").id, known_sheet("NVIDIA A10G").id, known_sheet("Tesla T4").id
        ('a10', 'a10g', 't4')
        >>> known_sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
        >>> known_sheet("NVIDIA GeForce RTX 4060 Ti", 8 * 2**30).id
        'rtx4060ti-8gb'
    """
    found = _by_driver_name().get(squeezed(driver_name), ())
    if not found:
        return None
    if memory_bytes is None:
        return found[-1]
    return min(found, key=lambda sheet: abs(sheet.memory_bytes - memory_bytes))


def common_link(capability: tuple[int, int] | None) -> float | None:
    """The host link that most devices of a compute capability have, for a card without a sheet; None if there is none.

    Example:
        >>> round(common_link((8, 9)) / 1e9, 1), common_link((3, 5)) is None
        (31.5, True)
    """
    links = [sheet.host_link for sheet in data_sheets() if sheet.capability == capability and sheet.host_link]
    return max(links, key=links.count) if links else None


def squeezed(name: str) -> str:
    """A name without spaces, punctuation, case and the words that people leave out.

    Example:
        >>> squeezed("NVIDIA GeForce RTX 4090"), squeezed("rtx-4090"), squeezed("Apple M4 Max 64GiB")
        ('rtx4090', 'rtx4090', 'm4max64gb')
    """
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in DROPPED_WORDS:
        text = text.replace(word, "")
    return re.sub(r"(\d)gi?b?$", r"\1gb", text)


@functools.cache
def _by_driver_name() -> dict[str, tuple[DataSheet, ...]]:
    table: dict[str, tuple[DataSheet, ...]] = {}
    for sheet in data_sheets():
        key = squeezed(sheet.name)
        table[key] = (*table.get(key, ()), sheet)
    return table


def _sheets_of(entry: dict[str, Any]) -> list[DataSheet]:
    sizes = entry["memory_gib"]
    if not isinstance(sizes, list):
        return [_sheet(entry, sizes)]
    several = {"shared_aliases": [entry["id"]]}
    return [_sheet({**entry, **several, "id": f"{entry['id']}-{size}gb"}, size) for size in sizes]


def _sheet(entry: dict[str, Any], gib: float) -> DataSheet:
    link = entry.get("link_gb_per_s", 0) * 1e9 or None
    if "pcie" in entry:
        generation, lanes = entry["pcie"]
        link = PCIE_LANE[generation] * lanes
    reported = entry.get("reported_mib")
    return DataSheet(
        id=entry["id"],
        name=entry["name"],
        vendor=entry["vendor"],
        memory_bytes=int(gib * 2**30),
        bandwidth=entry["bandwidth_gb_per_s"] * 1e9,
        flops={dtype: round(rate * 1e12, -8) for dtype, rate in entry["dense_tflops"].items()},
        source=entry["source"],
        checked=entry["checked"],
        aliases=tuple(entry.get("aliases", ())),
        shared_aliases=tuple(entry.get("shared_aliases", ())),
        capability=tuple(entry["capability"]) if "capability" in entry else None,
        host_link=link,
        unified=entry.get("unified", False),
        reported_bytes=None if reported is None else reported * 2**20,
        reported_source=entry.get("reported_source", ""),
        note=entry.get("note", ""),
    )
