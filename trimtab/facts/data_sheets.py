"""Data sheets of GPUs: `catalogue/gpus.json` as typed records, looked up by the name that the driver reports.

FLOP/s are dense (no sparsity), with fp32 accumulation. Each sheet names the vendor's document and where its figures
were checked; `trimtab.facts.gpus` resolves the names that users give.
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
"""Bytes per second of one PCIe lane in each direction, by generation: transfers per second with 128b/130b encoding."""
REPORTED_SHARE = 0.965
"""Assumed fraction of a card's nominal memory that CUDA reports, if no report is known (a lower bound): 15.45 to 15.49
of 16 GiB on current GeForce cards, 97.6 % (RTX A4000) to 99.2 % on cards of the catalogue without ECC memory."""
SYSTEM_RESERVE = 4 * 2**30
"""Unified memory reserved for the operating system and its services: they use 3 of 122 GiB on an idle Jetson Thor."""
METAL_SHARES = ((36 * 2**30, 2 / 3), (1 << 62, 3 / 4))
"""(maximum memory in bytes, fraction of it) that Metal recommends as working set on Apple machines: 10922 of 16384 MiB,
16 of 24 GiB, 48 of 64 GiB (`recommendedMaxWorkingSetSize`, as llama.cpp prints it)."""
DROPPED_WORDS = ("nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "apple", "generation", "gpu")


@dataclass(frozen=True)
class DataSheet:
    """A vendor's specification of one device.

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
    """Nominal memory size."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: dict[str, float]
    """Dense FLOP/s of matrix products by dtype, with fp32 accumulation."""
    source: str
    """The vendor's document."""
    checked: str
    """Where the figures were checked."""
    aliases: tuple[str, ...] = ()
    """Other names of this device only."""
    shared_aliases: tuple[str, ...] = ()
    """Ambiguous names: names of several devices, including this one."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for other vendors."""
    host_link: float | None = None
    """Peak bytes per second to host memory, in each direction; None with unified memory."""
    unified: bool = False
    """Whether CPU and GPU share one memory."""
    reported_bytes: int | None = None
    """Total memory as CUDA reports it, if known from a published report."""
    reported_source: str = ""
    note: str = ""
    """Disagreements between sources, and how derived figures were derived."""

    @property
    def usable_bytes(self) -> int:
        """Memory available to a process on an otherwise idle device, its CUDA context included."""
        if self.vendor == "apple":
            share = next(share for limit, share in METAL_SHARES if self.memory_bytes <= limit)
            return int(self.memory_bytes * share)
        total = self.reported_bytes or int(self.memory_bytes * REPORTED_SHARE)
        return total - SYSTEM_RESERVE if self.unified else total

    @property
    def names(self) -> tuple[str, ...]:
        """All unambiguous names of this device."""
        own = () if self.id in self.shared_aliases else (self.id,)
        return (*own, *self.aliases)


@functools.cache
def data_sheets() -> tuple[DataSheet, ...]:
    """Returns the sheets of all devices in the catalogue, one per memory size.

    Example:
        >>> len(data_sheets()) > 60, {sheet.vendor for sheet in data_sheets()} == {"nvidia", "amd", "apple"}
        (True, True)
    """
    entries = json.loads(FILE.read_text(encoding="utf-8"))["sheets"]
    return tuple(sheet for entry in entries for sheet in _sheets_of(entry))


def known_sheet(driver_name: str, memory_bytes: int | None = None) -> DataSheet | None:
    """Returns the data sheet of a device by its driver's name; None if it has none, such as a MIG slice.

    Args:
        driver_name: as `torch.cuda.get_device_name` or `nvidia-smi` print it.
        memory_bytes: total memory, selects among memory sizes of the same name; None selects the largest.

    Example:
        >>> known_sheet("NVIDIA A10").id, known_sheet("NVIDIA A10G").id, known_sheet("Tesla T4").id
        ('a10', 'a10g', 't4')
        >>> known_sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
        >>> known_sheet("NVIDIA GeForce RTX 4060 Ti", 8 * 2**30).id
        'rtx4060ti-8gb'
    """
    found = _by_driver_name().get(normalize_name(driver_name), ())
    if not found:
        return None
    if memory_bytes is None:
        return found[-1]
    return min(found, key=lambda sheet: abs(sheet.memory_bytes - memory_bytes))


def typical_host_link(capability: tuple[int, int] | None) -> float | None:
    """Returns the most common host link bandwidth among devices of a compute capability; None if there is none.

    Example:
        >>> round(typical_host_link((8, 9)) / 1e9, 1), typical_host_link((3, 5)) is None
        (31.5, True)
    """
    links = [sheet.host_link for sheet in data_sheets() if sheet.capability == capability and sheet.host_link]
    return max(links, key=links.count) if links else None


def normalize_name(name: str) -> str:
    """Normalizes a name: lower case, without spaces, punctuation and words that are often omitted.

    Example:
        >>> normalize_name("NVIDIA GeForce RTX 4090"), normalize_name("Apple M4 Max 64GiB")
        ('rtx4090', 'm4max64gb')
    """
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in DROPPED_WORDS:
        text = text.replace(word, "")
    return re.sub(r"(\d)gi?b?$", r"\1gb", text)


@functools.cache
def _by_driver_name() -> dict[str, tuple[DataSheet, ...]]:
    table: dict[str, tuple[DataSheet, ...]] = {}
    for sheet in data_sheets():
        key = normalize_name(sheet.name)
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
