"""Resolves `--gpu`: a name of the catalogue in any spelling, or a memory size."""

from __future__ import annotations

import difflib
import functools
import re

from trimtab.facts.data_sheets import DataSheet, data_sheets, known_sheet, normalize_name
from trimtab.facts.devices import BF16_CAPABILITY, DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import shortened
from trimtab.facts.units import format_bytes, parse_bytes

__all__ = ["DataSheet", "data_sheets", "find_gpu", "gpu_of_sheet", "known_sheet"]

MIN_MEMORY, MAX_MEMORY = 10**9, 10**12
"""Range of memory sizes in bytes that are accepted for a GPU; less does not fit a CUDA context."""
CUDA_13_CAPABILITY = (7, 5)
"""Minimum compute capability of CUDA 13: its release notes end support for Maxwell, Pascal and Volta."""
OTHER_VENDORS = {"amd": "AMD", "apple": "Apple"}
EXAMPLES = "for example rtx4090, a100-80gb, apple-m4-max-64gb, or a memory size such as 24GB"


def find_gpu(text: str) -> DeviceFacts:
    """Returns the device for a name or a memory size; RecipeError if it is unknown or ambiguous.

    The memory of a card that is not present is what CUDA reports for it, idle and without a display. The memory of the
    process itself, including the CUDA context, is counted by the plan.

    Example:
        >>> gpu = find_gpu("RTX 4090")
        >>> gpu.name, gpu.capability, round(gpu.memory_bytes / 2**30, 2), gpu.ceiling("bf16")[0] / 1e12
        ('NVIDIA GeForce RTX 4090', (8, 9), 23.52, 165.2)
        >>> find_gpu("24GiB").memory_bytes, find_gpu("24GiB").ceiling("bf16")
        (25769803776, None)
        >>> find_gpu("rtx4090-24gb") == gpu
        True
        >>> find_gpu("v100")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        trimtab.facts.errors.RecipeError: --gpu v100 means several devices; write v100-sxm-16gb, ...
    """
    wanted = text.strip()
    sheets = _sheets_named(wanted)
    if len(sheets) == 1:
        return gpu_of_sheet(sheets[0])
    if sheets:
        ids = ", ".join(sheet.id for sheet in sheets)
        raise RecipeError(f"--gpu {wanted} means several devices", f"write {ids}")
    if re.match(r"[-+.]?\d", wanted):
        return _gpu_of_size(wanted)
    raise _unknown(wanted, normalize_name(wanted))


def _sheets_named(text: str) -> list[DataSheet]:
    """The devices that a name may mean; the name may end with the device's memory size, as in "RTX 4090 24GB"."""
    found = _sheets_called(text)
    sized = re.fullmatch(r"(.*[^\s_-])[\s_-]+(\d{1,4})\s*(?:gi?b?)?", text, re.IGNORECASE | re.ASCII)
    if found or sized is None:
        return found
    return [s for s in _sheets_called(sized[1]) if round(s.memory_bytes / 2**30) == int(sized[2])]


def _sheets_called(name: str) -> list[DataSheet]:
    key = normalize_name(name)
    if sheet := _by_name().get(key):
        return [sheet]
    return [sheet for sheet in data_sheets() if key in map(normalize_name, sheet.shared_aliases)]


def gpu_of_sheet(sheet: DataSheet) -> DeviceFacts:
    """Returns the device of a data sheet, for planning without the device.

    Example:
        >>> mi300x = next(sheet for sheet in data_sheets() if sheet.id == "mi300x")
        >>> gpu_of_sheet(mi300x).bound[:45]
        'trimtab does not train on AMD GPUs: the memor'
    """
    bound = None
    if sheet.vendor in OTHER_VENDORS:
        vendor = OTHER_VENDORS[sheet.vendor]
        bound = (
            f"trimtab does not train on {vendor} GPUs: the memory is that of the same run on an NVIDIA GPU, and times "
            "come from the data sheet alone; other backends, allocators and kernels need more or less"
        )
    capability = sheet.capability or BF16_CAPABILITY
    return DeviceFacts(
        name=sheet.name,
        kind="cuda",
        memory_bytes=sheet.usable_bytes,
        capability=capability,
        bf16=capability >= BF16_CAPABILITY,
        sheet=sheet,
        unified=sheet.unified,
        bound=bound,
        assumptions=(_memory_assumption(sheet), *_software_assumptions(capability)),
    )


def _software_assumptions(capability: tuple[int, int]) -> tuple[str, ...]:
    if capability >= CUDA_13_CAPABILITY:
        return ()
    return (
        "the GPU needs a torch build for CUDA 12: CUDA 13 does not support compute capability "
        f"{capability[0]}.{capability[1]}",
    )


def _memory_assumption(sheet: DataSheet) -> str:
    usable, nominal = format_bytes(sheet.usable_bytes), format_bytes(sheet.memory_bytes)
    if sheet.vendor == "apple":
        return f"of the device's {nominal}, {usable} are assumed to be usable: the working set that Metal recommends"
    reported = (
        "as CUDA reports it"
        if sheet.reported_bytes
        else "3.5 % less than nominal, the largest difference that drivers report"
    )
    if sheet.unified:
        size = f"of the device's {nominal}, {usable} are assumed to be usable"
        return f"{size}: {reported}, less 4 GiB for the operating system"
    return f"of the card's {nominal}, {usable} are assumed to be usable: {reported}, while idle and without a display"


def _gpu_of_size(text: str) -> DeviceFacts:
    size = parse_bytes(text)
    if size is None or (size > MAX_MEMORY and _cards_with_prefix(text)):  # "3090ti": a card, or 3090 TiB
        raise _invalid_size(text)
    memory = format_bytes(size)
    if size < MIN_MEMORY:
        raise RecipeError(
            f"--gpu {text} is {memory}, less than a CUDA context needs",
            "give the memory of a GPU, such as 8GB or 24GB",
        )
    if size > MAX_MEMORY:
        raise RecipeError(
            f"--gpu {text} is {memory}, more than any GPU has",
            "give the memory of one GPU, such as 24GB or 24000MB",
        )
    return DeviceFacts(
        name=f"a GPU with {text}",
        kind="cuda",
        memory_bytes=size,
        capability=BF16_CAPABILITY,
        bf16=True,
        assumptions=(
            f"all of {memory} are assumed to be usable; GB are 10⁹ bytes, and a card sold as 24 GB has about "
            "23.5 GiB: name the card if you can",
            "the GPU is assumed to be an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, with bf16; its "
            "speed is not known",
        ),
    )


def _invalid_size(text: str) -> RecipeError:
    argument = f"--gpu {shortened(text)}"
    if cards := _cards_with_prefix(text):
        ids = " or ".join(sheet.id for sheet in cards)
        return RecipeError(
            f"{argument} is not a memory size", f"write {ids} for the card, or a size such as 24GB"
        )
    if re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text, re.ASCII):
        units = [
            unit for unit in ("GB", "MB", "B") if MIN_MEMORY <= (parse_bytes(text + unit) or 0) <= MAX_MEMORY
        ]
        size = f"{text}{units[0]}" if units else "24GB"
        return RecipeError(
            f"{argument} has no unit", f"write a size such as {size}, or a name such as rtx4090"
        )
    if text.startswith("-"):
        return RecipeError(f"{argument} is negative", "give the memory of a GPU, such as 24GB")
    return RecipeError(f"{argument} is neither a memory size nor a GPU of the catalogue", EXAMPLES)


def _cards_with_prefix(text: str) -> list[DataSheet]:
    """The cards that a name without `RTX`, `GTX` or `RX` may mean."""
    return [sheet for prefix in ("rtx", "gtx", "rx") for sheet in _sheets_named(f"{prefix} {text}")]


def _unknown(text: str, key: str) -> RecipeError:
    names = {
        normalize_name(name): name
        for sheet in data_sheets()
        for name in (*sheet.names, *sheet.shared_aliases)
    }
    similar = difflib.get_close_matches(key, names, n=4, cutoff=0.6)
    hint = f"did you mean {' or '.join(names[match] for match in similar)}?" if similar else EXAMPLES
    return RecipeError(f"--gpu {shortened(text) or 'without a value'} is not a GPU of the catalogue", hint)


@functools.cache
def _by_name() -> dict[str, DataSheet]:
    """Maps every normalized, unambiguous name to its data sheet."""
    table: dict[str, DataSheet] = {}
    for sheet in data_sheets():
        table.update(dict.fromkeys(map(normalize_name, sheet.names), sheet))
        if known_sheet(sheet.name) is known_sheet(sheet.name, 0):
            table[normalize_name(sheet.name)] = sheet
    return table
