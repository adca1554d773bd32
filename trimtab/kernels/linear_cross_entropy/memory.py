"""What a run may spend on the loss, asked once."""

from __future__ import annotations

import torch


def memory_budget(device: torch.device | str, *, share: float = 0.5) -> int:
    """A share of the bytes that are free on a device now, for `memory_bytes=`.

    Ask when a run is assembled, at its fullest, and keep the number: the loss then chooses the same chunks in
    every step, and gives the same bits whatever else is on the device.

    Example:
        >>> budget = memory_budget("cuda")                                            # doctest: +SKIP
        >>> linear_cross_entropy(h, w, y, impl="triton", memory_bytes=budget)         # doctest: +SKIP
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0  # no way to ask a CPU through torch: the low-memory mode
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(share * (free + idle))
