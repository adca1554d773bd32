"""What a run asks of torch for the whole process: threads, repeatable sums, the allocator."""

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
    """Once, before the model is made; within `torch_put_back` it ends with the run."""
    torch.set_num_threads(resolved.threads)
    if resolved.device != "cuda":
        return
    if resolved.deterministic:
        # cuBLAS repeats its sums only with workspaces of a fixed size, and reads them when it first runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A debugging aid that costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Either way: of what was chosen for a run that need not repeat its bits, some kernels cannot.
    torch.use_deterministic_algorithms(resolved.deterministic)
    if sys.platform == "linux" and not _own_allocator_settings():
        # Without it, memory in pieces between tensors is lost to the step: tenths of a GiB of a few.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    cap = resolved.memory_plan.allocator_bytes
    if cap is not None:
        torch.cuda.empty_cache()
        # Beside what the process holds already, and within what it is allowed.
        share = (max(cap, 0) + torch.cuda.memory_reserved()) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(share, memory_share()))


def memory_share() -> float:
    """Of a GPU's memory, what this process has been allowed; all of it where the allocator does not say."""
    if torch.cuda.is_initialized():
        with suppress(NotImplementedError, RuntimeError):
            return torch.cuda.get_per_process_memory_fraction()
    return 1.0


def on_device_of(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """Makes the GPU that a module's parameters are on torch's current one: Triton launches kernels on that one, and
    a process may have models on several. Changes nothing for a module on the CPU.

    Example:
        >>> with on_device_of(torch.nn.Linear(2, 2)):
        ...     torch.empty(1).device
        device(type='cpu')
    """
    device = next(module.parameters()).device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def torch_put_back() -> Iterator[None]:
    """What is set within is put back behind it, and the GPU's memory given back: a run begins as the one before it did,
    with the same threads and nothing of that one's limits.

    Example:
        >>> with torch_put_back():
        ...     torch.use_deterministic_algorithms(True)
        >>> torch.are_deterministic_algorithms_enabled()
        False
    """
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    share = memory_share()
    try:
        yield
    except BaseException as error:
        if torch.cuda.is_initialized():
            release_frames(error)  # they hold the model for as long as somebody keeps the error
        raise
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if torch.cuda.is_initialized():
            torch.cuda.set_per_process_memory_fraction(share)
            _give_back()


def _give_back() -> None:
    """Memory that nobody uses: else the next plan takes it for another program's."""
    workspace.release()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()  # models are in cycles
    torch.cuda.empty_cache()


def _own_allocator_settings() -> bool:
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
