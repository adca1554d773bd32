"""Keeps the free memory of a GPU's allocator in large pieces, before each microbatch."""

from __future__ import annotations

import torch

SIZE = 16


def allocate_cublas_workspaces(device: torch.device) -> None:
    """Makes cuBLAS allocate the workspaces of the current stream: one for this thread, one for that of backward passes.

    torch keeps them until they are freed explicitly. A workspace that the first product of a step allocates is between
    the step's tensors, where it splits memory that is free later: a step of Qwen3-1.7B then reserved 0.57 GiB more, the
    size of its embedding's gradient. Does nothing on a CPU.

    Example:
        >>> allocate_cublas_workspaces(torch.device("cpu"))
    """
    if device.type != "cuda":
        return
    factor = torch.ones(SIZE, SIZE, device=device, requires_grad=True)
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        torch.mm(factor, factor).sum().backward()


class GpuMemory:
    """Called before each microbatch; changes no result.

    With a limit of its own (`memory_limit`), the allocator returns free memory to the driver when it would exceed the
    limit. Over many steps free memory is split into ever smaller pieces, which cannot be returned: on an H200 a run at
    its limit ran out of memory in step 19. So after a microbatch in which memory was returned, all free memory is
    returned before the next one, which then finds it as the first one did.

    Args:
        device: the device of the run; on a CPU calls do nothing.
        limited: whether the allocator has a limit.

    Example:
        >>> memory = GpuMemory(torch.device("cpu"), limited=True)
        >>> memory()
    """

    def __init__(self, device: torch.device, *, limited: bool) -> None:
        self.device, self.limited = device, limited
        self._retries: int | None = None
        """Allocations so far for which memory was returned; None before the first call."""

    def __call__(self) -> None:
        if self.device.type != "cuda":
            return
        if self._retries is None:
            allocate_cublas_workspaces(self.device)
            self._retries = self._returned()
        elif self.limited and self._returned() > self._retries:
            torch.cuda.empty_cache()
            self._retries = self._returned()

    def _returned(self) -> int:
        return int(torch.cuda.memory.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))
