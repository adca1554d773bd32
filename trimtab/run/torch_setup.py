"""Process-wide torch settings of a run: threads, deterministic algorithms, the allocator."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from trimtab.adapt import workspace
from trimtab.facts.errors import release_frames
from trimtab.plan.resolved import Resolved


def set_up_torch(resolved: Resolved) -> None:
    """Applies a run's settings before the model is built; `restore_torch_settings` restores the previous ones."""
    torch.set_num_threads(resolved.threads)
    if resolved.device != "cuda":
        return
    if resolved.deterministic:
        # cuBLAS is deterministic only with workspaces of a fixed size; it reads the variable when it first runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # torch would fill every new tensor with NaN, which helps debugging but costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Set in both cases: some kernels that were chosen for a nondeterministic run raise in deterministic mode.
    torch.use_deterministic_algorithms(resolved.deterministic)
    if sys.platform == "linux" and not _has_allocator_settings():
        # Without expandable segments, fragmentation wastes tenths of a GiB of a few GiB.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    cap = resolved.memory_plan.allocator_bytes
    if cap is not None:
        torch.cuda.empty_cache()
        # In addition to the memory that the process has reserved, and within its own limit.
        share = (max(cap, 0) + torch.cuda.memory_reserved()) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(share, memory_fraction()))


def requires_determinism() -> bool:
    """Whether this process requires deterministic algorithms of torch, not only warnings."""
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warned


def memory_fraction() -> float:
    """The fraction of the GPU's memory that this process may use; 1 if the allocator does not report it."""
    if torch.cuda.is_initialized():
        with suppress(NotImplementedError, RuntimeError):
            return torch.cuda.get_per_process_memory_fraction()
    return 1.0


def on_device_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Sets torch's current CUDA device to the one of a module's parameters; does nothing for a module on the CPU.

    Triton launches kernels on the current device, and a process may have models on several.

    Example:
        >>> with on_device_of(torch.nn.Linear(2, 2)):
        ...     torch.empty(1).device
        device(type='cpu')
    """
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def restore_torch_settings() -> Iterator[None]:
    """Restores torch's settings at the end of the context and frees cached GPU memory.

    The next run in this process starts with the same threads, determinism and memory limit as the one before it.

    Example:
        >>> with restore_torch_settings():
        ...     torch.use_deterministic_algorithms(True)
        >>> torch.are_deterministic_algorithms_enabled()
        False
    """
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    share = memory_fraction()
    try:
        yield
    except BaseException as error:
        if torch.cuda.is_initialized():
            release_frames(error)  # they reference the model as long as the exception exists
        raise
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(share)
            free_cached_memory()


def free_cached_memory() -> None:
    """Frees cached GPU memory: the next plan would count it as another program's. Does nothing without a GPU."""
    if not torch.cuda.is_initialized():
        return
    workspace.release()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()  # models are in reference cycles
    torch.cuda.empty_cache()


def _has_allocator_settings() -> bool:
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
