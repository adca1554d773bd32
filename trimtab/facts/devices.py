"""Properties of devices: memory, dtypes and specified rates. `run.device` detects the device of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.facts.calibration import Calibration
from trimtab.facts.data_sheets import DataSheet, known_sheet, typical_host_link

LINK_SHARE = 0.873
"""Fraction of a host link's peak that pinned-memory copies reach: 55 of 63 GB/s measured on an H200 (PCIe 5.0)."""
SLOW_LINK = 12e9
"""Bytes per second of PCIe 3.0, assumed for unknown links."""
HOST_RESERVE = 16 * 2**30
"""Host memory that a run leaves free: a fifth of the free memory, at most this many bytes."""

BF16_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability with bf16 in hardware; Volta and Turing have none."""


TRITON_CAPABILITY = (7, 5)
"""Minimum CUDA compute capability that Triton compiles for."""


def triton_runs(installed: bool, capability: tuple[int, int] | None) -> bool:
    """Whether Triton is installed and compiles for a CUDA device of this capability.

    Example:
        >>> triton_runs(True, (8, 0)), triton_runs(True, (7, 0)), triton_runs(False, (9, 0))
        (True, False, False)
    """
    return installed and (capability or (0, 0)) >= TRITON_CAPABILITY


def parse_device(name: str) -> tuple[str, int | None] | None:
    """Parses `auto`, `cpu`, `cuda` or `cuda:N` into (kind, index); None for any other name.

    Example:
        >>> parse_device("cuda:1"), parse_device("cpu"), parse_device("cuda:"), parse_device("gpu")
        (('cuda', 1), ('cpu', None), None, None)
    """
    if name in ("auto", "cpu", "cuda"):
        return name, None
    found = re.fullmatch(r"cuda:(0|[1-9][0-9]{0,3})", name)
    return ("cuda", int(found[1])) if found else None


@dataclass(frozen=True)
class DeviceFacts:
    """One device to train on.

    Example:
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", memory_bytes=150 * 2**30, capability=(9, 0), bf16=True)
        >>> gpu.ceiling("bf16")
        (989400000000000.0, 'data sheet of NVIDIA H200')
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    free_bytes: int | None = None
    """Free bytes; None if unknown, then all memory is assumed to be free."""
    capability: tuple[int, int] | None = None
    bf16: bool = False
    """Whether the device computes bf16 matrix products in hardware."""
    triton: bool = True
    """Whether Triton is installed; `runs_triton` also checks the device."""
    cores: int | None = None
    host_free_bytes: int | None = None
    """Free host memory, for a GPU; None if unknown."""
    calibration: Calibration | None = None
    """Measured performance of this device, or a measurement that ships with trimtab; None if there is neither."""
    index: int | None = None
    """Index among the visible CUDA GPUs, if one was requested (`cuda:1`); None for torch's current device."""
    sheet: DataSheet | None = None
    """The data sheet that the device was created from (`--gpu`); otherwise `data_sheet` looks one up by name."""
    unified: bool = False
    """Whether CPU and GPU share one memory, so that offloading to the host saves nothing."""
    bound: str | None = None
    """Why a memory prediction for this device is only a bound; None if it is a prediction."""
    assumptions: tuple[str, ...] = ()
    """Assumptions about a device that is not present."""
    shared: str | None = None
    """Description of other processes that use the memory of this GPU; None if there are none."""

    @property
    def runs_triton(self) -> bool:
        """Whether trimtab's Triton kernels run on this device."""
        return self.kind == "cuda" and triton_runs(self.triton, self.capability)

    @property
    def available_bytes(self) -> int:
        """Memory available to a run: free memory, or all memory if that is unknown."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def pinnable_bytes(self) -> int | None:
        """Host memory that a run may pin: free memory less a reserve; None if unknown, 0 with unified memory.

        Example:
            >>> DeviceFacts("GPU", "cuda", 24 * 2**30, host_free_bytes=20 * 2**30).pinnable_bytes // 2**30
            16
        """
        if self.unified:
            return 0
        if self.host_free_bytes is None:
            return None
        return self.host_free_bytes - min(self.host_free_bytes // 5, HOST_RESERVE)

    def ceiling(self, dtype: str) -> tuple[float, str] | None:
        """Returns (peak FLOP/s, its source) of matrix products in a dtype; None if unknown."""
        known = self.data_sheet
        if known is None or dtype not in known.flops:
            return None
        return known.flops[dtype], f"data sheet of {known.name}"

    @property
    def data_sheet(self) -> DataSheet | None:
        """Its vendor's specification; None for a CPU and for a device that is not in the catalogue."""
        if self.sheet is not None or self.kind != "cuda":
            return self.sheet
        return known_sheet(self.name, self.memory_bytes)

    @property
    def host_link(self) -> float:
        """Bytes per second of copies to host memory; copies from it run at the same rate at the same time."""
        known = self.data_sheet
        peak = known.host_link if known is not None else typical_host_link(self.capability)
        return SLOW_LINK if peak is None else LINK_SHARE * peak

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the device's memory; None without a data sheet."""
        known = self.data_sheet
        return None if known is None else known.bandwidth


def host_memory() -> tuple[int, int]:
    """Returns (total, available) bytes of host memory, within the container's limit if there is one.

    Example:
        >>> total, available = host_memory()
        >>> 0 < available <= total
        True
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo("MemAvailable")
    if available is None:
        # macOS has no /proc; without another package only the total is known.
        available = total
    limit = _container_limit()
    if limit is not None and limit[0] < total:
        total, available = limit[0], min(available, max(limit[0] - limit[1], 0))
    return total, min(available, total)


def host_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(key: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _container_limit() -> tuple[int, int] | None:
    """Returns (limit, used) of this process's cgroup, version 2 or 1; None without a limit.

    Cached file pages count as used in a cgroup and are reclaimed on demand, so they are subtracted.
    """
    for limit_name, used_name, stat_name, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        root = Path("/sys/fs/cgroup")
        limit_text, used_text = _text(root / limit_name), _text(root / used_name)
        if limit_text and used_text and limit_text.isdigit():
            stat = dict(line.split() for line in (_text(root / stat_name) or "").splitlines())
            return int(limit_text), max(int(used_text) - int(stat.get(cache_key, 0)), 0)
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
