"""What a run asks of torch for the whole process: threads, repeatable sums, the allocator."""

from __future__ import annotations

import os
import sys

import torch

from trimtab.run.choices import Choices


def set_up_torch(choices: Choices) -> None:
    """Once, before the model is made."""
    torch.set_num_threads(choices.threads)
    if choices.device == "cuda" and choices.deterministic:
        # cuBLAS repeats its sums only with workspaces of a fixed size, and reads them when it first runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A debugging aid that costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Never switched off here: it may be the wish of whoever called us.
        torch.use_deterministic_algorithms(True)
    if choices.device == "cuda" and sys.platform == "linux" and not _own_allocator_settings():
        # Without it, memory in pieces between tensors is lost to the step: tenths of a GiB of a few.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    cap = choices.memory["allocator_bytes"]
    if choices.device == "cuda" and cap is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(max(cap / total, 0.0), 1.0))


def _own_allocator_settings() -> bool:
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
