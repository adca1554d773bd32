"""Detects this machine's device."""

from __future__ import annotations

import dataclasses
import gc
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from trimtab.facts.calibration_file import calibration_folder, read_calibration
from trimtab.facts.data_sheets import known_sheet
from trimtab.facts.devices import BF16_CAPABILITY, DeviceFacts, host_cores, host_memory, parse_device
from trimtab.facts.errors import MissingDependency, RecipeError, ResourceError
from trimtab.run.gpu_processes import describe_sharing, mps_limit, other_processes

INSTALL_TORCH = "pip install 'trimtab[train]'"


def has_torch() -> bool:
    """Whether torch is installed, without importing it."""
    return find_spec("torch") is not None


def require_torch() -> None:
    """Raises MissingDependency if torch is not installed."""
    if not has_torch():
        raise MissingDependency("this needs torch, which is not installed", INSTALL_TORCH)


def threads() -> int:
    """Number of CPU threads that torch will use."""
    if not has_torch():
        return host_cores()
    import torch

    return torch.get_num_threads()


def detect(requested: str = "auto", num_threads: int | None = None) -> DeviceFacts:
    """The device that will be used: the requested one; for `auto` a CUDA GPU if there is one, otherwise the CPU.

    Args:
        requested: a value of the recipe key `device`.
        num_threads: CPU threads that will be used, which select a CPU's calibration; torch's default if None.

    Example:
        >>> detect("cpu").kind
        'cpu'
    """
    kind, index = check_device(requested)
    if not has_torch() or kind == "cpu":
        return _calibrated(_cpu(), num_threads)
    import torch

    if not torch.cuda.is_available():
        return _calibrated(_cpu(), num_threads)
    with current_gpu(requested):
        return dataclasses.replace(_calibrated(_cuda()), index=index)


def _calibrated(device: DeviceFacts, num_threads: int | None = None) -> DeviceFacts:
    """The device with this machine's calibration (`trimtab plan --calibrate`), if there is one.

    A CPU's calibration depends on the number of threads; for torch's default, torch is imported only if there are
    calibration files.
    """
    if not calibration_folder().is_dir():
        return device
    found = read_calibration(device.name, (num_threads or threads()) if device.kind == "cpu" else None)
    return device if found is None else dataclasses.replace(device, calibration=found)


def check_device(requested: str) -> tuple[str, int | None]:
    """(kind, index) of a device name; raises if it is unknown or names a GPU that torch does not see."""
    parsed = parse_device(requested) if isinstance(requested, str) else None
    if parsed is None:
        raise RecipeError(
            f"device {requested!r} is not known", "use auto, cpu, cuda or cuda:N (cuda:0, cuda:1, …)"
        )
    kind, index = parsed
    if kind != "cuda":
        return parsed
    if not has_torch():
        raise MissingDependency("using a CUDA GPU needs torch, which is not installed", INSTALL_TORCH)
    import torch

    if not torch.cuda.is_available():
        raise ResourceError(
            f"device: {requested} was requested, and torch sees no CUDA GPU",
            "`trimtab doctor` explains why; device: auto uses the available device",
        )
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        seen = "one CUDA GPU (cuda:0)" if count == 1 else f"{count} CUDA GPUs (cuda:0 to cuda:{count - 1})"
        raise ResourceError(
            f"device: {requested} was requested, and torch sees {seen}",
            "use one of these; the environment variable CUDA_VISIBLE_DEVICES decides which GPUs torch sees",
        )
    return parsed


@contextmanager
def current_gpu(requested: str) -> Iterator[None]:
    """Sets torch's current CUDA device for a device name with an index; does nothing for other names.

    Example:
        >>> with current_gpu("cuda:1"):       # doctest: +SKIP
        ...     torch.empty(1, device="cuda").device
        device(type='cuda', index=1)
    """
    _, index = check_device(requested)
    if index is None:
        yield
        return
    import torch

    with torch.cuda.device(index):
        yield


def _cpu() -> DeviceFacts:
    total, available = host_memory()
    return DeviceFacts(
        name=_cpu_name(),
        kind="cpu",
        memory_bytes=total,
        free_bytes=available,
        bf16=_cpu_has_bf16(),
        cores=host_cores(),
    )


def _cuda() -> DeviceFacts:
    import torch

    from trimtab.run.torch_setup import memory_fraction

    if torch.cuda.is_initialized():
        # Memory that torch has cached after an earlier run or model in this process counts as free.
        gc.collect()
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    name, index = torch.cuda.get_device_name(), torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    unified = has_unified_memory(name, integrated=bool(properties.is_integrated))
    if unified:
        free, total = _unified_memory(total)
    limit = mps_limit(index)
    allowed = int(memory_fraction() * total) - torch.cuda.memory_reserved()
    free = max(min(free, allowed, total if limit is None else limit), 0)
    capability = torch.cuda.get_device_capability()
    return DeviceFacts(
        name=name,
        kind="cuda",
        memory_bytes=total,
        free_bytes=free,
        capability=capability,
        bf16=capability >= BF16_CAPABILITY,
        triton=find_spec("triton") is not None,
        cores=host_cores(),
        host_free_bytes=None if unified else host_memory()[1],
        unified=unified,
        shared=describe_sharing(name, other_processes(index, uuid=f"GPU-{properties.uuid}"), limit),
    )


def has_unified_memory(name: str, *, integrated: bool) -> bool:
    """Whether a CUDA device shares its memory with the CPU: a Jetson, a DGX Spark.

    Args:
        name: as the driver reports it.
        integrated: the driver's `cudaDeviceProp.integrated`.

    Example:
        >>> has_unified_memory("NVIDIA GB10", integrated=False), has_unified_memory("NVIDIA H200", integrated=False)
        (True, False)
    """
    sheet = known_sheet(name)
    return integrated or (sheet is not None and sheet.unified)


def _unified_memory(total: int) -> tuple[int, int]:
    """(free, total) bytes of a GPU that shares the host's memory.

    There `cudaMemGetInfo` counts memory that the kernel can reclaim (page cache, buffers) as used: CUDA's documentation
    of `cuMemGetInfo` refers to the Tegra application note for integrated GPUs, and llama.cpp reads
    MemAvailable on a DGX Spark (https://github.com/ggml-org/llama.cpp/pull/17368). Swap is not counted.
    """
    everything, available = host_memory()
    return min(available, total), min(total, everything)


def _cpu_has_bf16() -> bool:
    """Whether this CPU supports bf16 products in hardware; otherwise they are several times slower than fp32.

    Read from the CPU's flags rather than timed: a recipe must always resolve to the same dtype on a machine.
    """
    flags = _cpuinfo("flags").split()
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _cpuinfo(key: str) -> str:
    """The first value of a key in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(key):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "CPU"


def require_trackers(names: Sequence[str]) -> None:
    """Raises MissingDependency if a tool that `report_to` names is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependency(
                f"report_to names {name}, which is not installed", f"pip install 'trimtab[{name}]'"
            )
