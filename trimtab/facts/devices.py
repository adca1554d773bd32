"""Devices as numbers: memory, formats, and the arithmetic their makers promise. `run.device` detects one."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Ceiling:
    """Dense matrix products a second, by number format, without sparsity, accumulated in fp32."""

    flops: dict[str, float]
    bytes_per_second: float
    source: str


CEILINGS: dict[str, Ceiling] = {
    "T4": Ceiling({"fp16": 65e12, "fp32": 8.1e12}, 320e9, "NVIDIA T4 datasheet"),
    "V100-SXM2": Ceiling({"fp16": 125e12, "fp32": 15.7e12}, 900e9, "NVIDIA V100 datasheet"),
    "A100-SXM4-40GB": Ceiling(
        {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}, 1555e9, "NVIDIA A100 datasheet"
    ),
    "A100-SXM4-80GB": Ceiling(
        {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}, 2039e9, "NVIDIA A100 datasheet"
    ),
    "A100 80GB PCIe": Ceiling(
        {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}, 1935e9, "NVIDIA A100 datasheet"
    ),
    "A40": Ceiling({"bf16": 149.7e12, "fp16": 149.7e12, "fp32": 37.4e12}, 696e9, "NVIDIA A40 datasheet"),
    "A10": Ceiling({"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12}, 600e9, "NVIDIA A10 datasheet"),
    "L4": Ceiling({"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12}, 300e9, "NVIDIA L4 datasheet"),
    "L40S": Ceiling({"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12}, 864e9, "NVIDIA L40S datasheet"),
    "GeForce RTX 3090": Ceiling(
        {"bf16": 71e12, "fp16": 71e12, "fp32": 35.6e12}, 936e9, "NVIDIA Ampere GA102 whitepaper"
    ),
    "GeForce RTX 4090": Ceiling(
        {"bf16": 165.2e12, "fp16": 165.2e12, "fp32": 82.6e12}, 1008e9, "NVIDIA Ada whitepaper"
    ),
    "H100 PCIe": Ceiling({"bf16": 756e12, "fp16": 756e12, "fp32": 51e12}, 2000e9, "NVIDIA H100 datasheet"),
    "H100 80GB HBM3": Ceiling(
        {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}, 3350e9, "NVIDIA H100 datasheet"
    ),
    "H200": Ceiling({"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}, 4800e9, "NVIDIA H200 datasheet"),
}
"""Public datasheet figures by the name that the driver gives, its maker's name left out.

Entered by hand and not yet checked against the sheets one by one; they only give the least time a run can take."""

HOST_LINK = {(9, 0): 55e9, (10, 0): 55e9, (12, 0): 55e9, (8, 9): 25e9, (8, 0): 25e9, (8, 6): 25e9}
"""Bytes a second each way between pinned host memory and a GPU, by its capability: 55 GB/s measured on an H200 (PCIe
5.0), half of it for PCIe 4.0."""
SLOW_LINK = 12e9
"""PCIe 3.0, and anything that is not known."""
HOST_RESERVE = 16 * 2**30
"""The most of a host's free memory that a run leaves to everything else; of little memory it leaves a fifth."""

BF16_CAPABILITY = (8, 0)
"""CUDA devices from here on compute bf16; Volta and Turing do not."""


TRITON_CAPABILITY = (7, 5)
"""CUDA devices from here on are those that Triton compiles for."""


def triton_runs(installed: bool, capability: tuple[int, int] | None) -> bool:
    """Whether Triton compiles for a CUDA device of this capability, if it is installed.

    Example:
        >>> triton_runs(True, (8, 0)), triton_runs(True, (7, 0)), triton_runs(False, (9, 0))
        (True, False, False)
    """
    return installed and (capability or (0, 0)) >= TRITON_CAPABILITY


def parse_device(name: str) -> tuple[str, int | None] | None:
    """(kind, index) of `auto`, `cpu`, `cuda` or `cuda:N`; None for any other name.

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
        (989000000000000.0, 'NVIDIA H200 datasheet')
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    free_bytes: int | None = None
    """Bytes nobody uses at the moment; None if unknown, then all of it counts."""
    capability: tuple[int, int] | None = None
    bf16: bool = False
    """Whether bf16 products run in hardware."""
    triton: bool = True
    """Whether Triton is installed, where the device is one that it compiles for."""
    cores: int | None = None
    measured_flops: dict[str, float] = field(default_factory=dict)
    """Products a second that were measured here, by number format; they go before the datasheet's."""
    utilization: float | None = None
    """Share of the ceiling that whole training steps were measured to reach; needed to estimate time."""
    host_free_bytes: int | None = None
    """Of a GPU's host: memory nobody uses at the moment; None if unknown."""
    utilization_basis: str | None = None
    """Where that share was measured: device, model, versions."""
    index: int | None = None
    """Which of the visible CUDA GPUs, where one was named (`cuda:1`); None for torch's current one."""

    @property
    def runs_triton(self) -> bool:
        """Whether this library's own kernels run here."""
        return self.kind == "cuda" and triton_runs(self.triton, self.capability)

    @property
    def available_bytes(self) -> int:
        """What a run can count on."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def pinnable_bytes(self) -> int | None:
        """What a run may pin of the host's memory: what is free, less a part for everything else; None if unknown.

        Example:
            >>> DeviceFacts("GPU", "cuda", 24 * 2**30, host_free_bytes=20 * 2**30).pinnable_bytes // 2**30
            16
        """
        if self.host_free_bytes is None:
            return None
        return self.host_free_bytes - min(self.host_free_bytes // 5, HOST_RESERVE)

    def ceiling(self, dtype: str) -> tuple[float, str] | None:
        """(FLOP/s, where the figure is from) of products in a format; None where nothing is known."""
        if dtype in self.measured_flops:
            return self.measured_flops[dtype], "measured on this device"
        known = known_ceiling(self.name) if self.kind == "cuda" else None
        if known is None or dtype not in known.flops:
            return None
        return known.flops[dtype], known.source

    @property
    def host_link(self) -> float:
        """Bytes a second to the host's memory and, at the same time, back."""
        return HOST_LINK.get(self.capability or (0, 0), SLOW_LINK)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the device's own memory, where its datasheet is known."""
        known = known_ceiling(self.name) if self.kind == "cuda" else None
        return None if known is None else known.bytes_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


def known_ceiling(name: str) -> Ceiling | None:
    """The datasheet's figures for a driver's device name; None for a device that is not in the table.

    Example:
        >>> known_ceiling("NVIDIA A10G") is None
        True
        >>> known_ceiling("NVIDIA A100-SXM4-40GB").bytes_per_second
        1555000000000.0
    """
    short = name.removeprefix("NVIDIA ").removeprefix("Tesla ").strip()
    if short in CEILINGS:
        return CEILINGS[short]
    # Drivers append memory sizes: "V100-SXM2-16GB". A further letter is another chip: an A10G is no A10.
    for known, ceiling in CEILINGS.items():
        if short.startswith((f"{known}-", f"{known} ")):
            return ceiling
    return None


def host_memory() -> tuple[int, int]:
    """(all, available) bytes of the machine's memory, a container's limit respected.

    Example:
        >>> total, available = host_memory()
        >>> 0 < available <= total
        True
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo("MemAvailable")
    if available is None:
        # macOS has no /proc; without a package nothing finer than "all of it" can be told.
        available = total
    limit = _container_limit()
    if limit is not None and limit[0] < total:
        total, available = limit[0], min(available, max(limit[0] - limit[1], 0))
    return total, min(available, total)


def host_cores() -> int:
    """Cores this process may use."""
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
    """(limit, used) of this process's own control group, version 2 or 1; None where there is none.

    Cached file pages count as used in a control group and are given back on demand, so they are subtracted.
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
