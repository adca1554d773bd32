"""The device of this machine, as facts."""

from __future__ import annotations

import platform
import time
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trimtab.facts.devices import BF16_CAPABILITY, DeviceFacts, host_cores, host_memory
from trimtab.facts.errors import MissingDependency, RecipeError, ResourceError

if TYPE_CHECKING:
    import torch


INSTALL_TORCH = "pip install 'trimtab[train]'"


def has_torch() -> bool:
    """Whether torch is installed; looking does not import it."""
    return find_spec("torch") is not None


def need_torch() -> None:
    """A clear error where torch is not installed, before anything else is done."""
    if not has_torch():
        raise MissingDependency("this needs torch, which is not installed", INSTALL_TORCH)


def threads() -> int:
    """Threads that products on the CPU will use."""
    if not has_torch():
        return host_cores()
    import torch

    return torch.get_num_threads()


def detect(requested: str = "auto") -> DeviceFacts:
    """The device that will be used: a CUDA GPU if there is one, the CPU otherwise, or the one asked for.

    Example:
        >>> detect("cpu").kind
        'cpu'
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"device {requested!r} is not known", "use auto, cpu or cuda")
    if not has_torch():
        return _cpu_without_torch(requested)
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "device: cuda was asked for and torch sees no CUDA GPU",
            "`trimtab doctor` says why; device: auto takes what is there",
        )
    if requested != "cpu" and torch.cuda.is_available():
        return _cuda()
    return _cpu(_cpu_has_bf16())


def _cpu_without_torch(requested: str) -> DeviceFacts:
    """Enough to plan with; what torch would have to measure is left at its plainest."""
    if requested == "cuda":
        raise MissingDependency("a CUDA GPU is seen by torch, which is not installed", INSTALL_TORCH)
    return _cpu(bf16=False)


def _cpu(bf16: bool) -> DeviceFacts:
    total, available = host_memory()
    return DeviceFacts(
        name=_cpu_name(),
        kind="cpu",
        memory_bytes=total,
        free_bytes=available,
        bf16=bf16,
        cores=host_cores(),
    )


def _cuda() -> DeviceFacts:
    import torch

    free, total = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    return DeviceFacts(
        name=torch.cuda.get_device_name(),
        kind="cuda",
        memory_bytes=total,
        free_bytes=free,
        capability=capability,
        bf16=capability >= BF16_CAPABILITY,
        cores=host_cores(),
    )


@cache
def _cpu_has_bf16() -> bool:
    """Whether products in bf16 pay on this CPU: it has the instructions, and they are measured to be faster.

    Instructions alone do not tell: depending on chip and torch build, bf16 products with them have been seen
    from twice as fast as fp32 to five times slower. Measured once a process: it takes half a second of a slow core.
    """
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64", "arm64", "aarch64"):
        return False
    if platform.machine().lower() in ("x86_64", "amd64") and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return False
    return _seconds(torch.bfloat16) < 0.8 * _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The best of five forward and backward products of a layer."""
    import torch

    layer = torch.nn.Linear(512, 1024, dtype=dtype)
    x = torch.ones(512, 512, dtype=dtype, requires_grad=True)
    best = float("inf")
    for _ in range(6):  # the first also pays for set-up and never is the best
        start = time.perf_counter()
        layer(x).sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
