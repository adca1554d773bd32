"""Shared functions of Triton launchers: compute capability, device check, tensors viewed as rows."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from trimtab.facts.errors import ResourceError

INTERPRETER_CAPABILITY = 90
"""Compute capability whose launch configurations Triton's interpreter uses; it runs on CPU tensors."""


def capability_of(tensor: torch.Tensor) -> int:
    """Compute capability of the tensor's device as an integer: 75, 80, 86, 89, 90, …"""
    return _capability(tensor.device) if tensor.is_cuda else INTERPRETER_CAPABILITY


@cache  # called at every launch
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_device(kernel: Any, tensor: torch.Tensor) -> None:
    """Raises if a tensor for a compiled kernel is not on CUDA; an interpreted kernel (tests) accepts any device."""
    if isinstance(kernel, JITFunction) and not tensor.is_cuda:
        raise ResourceError("Triton kernels require a CUDA device", "use impl='reference' on this device")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Views […, D] as [N, D] with last stride 1 and any row stride. Copies only if no such view exists.

    Example:
        >>> as_rows(torch.zeros(2, 3, 8)[..., :4]).stride()
        (8, 1)
    """
    x_ND = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 or x_ND.shape[1] <= 1 else x_ND.contiguous()


def once_differentiable(*_: Any) -> Any:
    """Backward of operators that are themselves a backward pass: raises, since there is no second derivative."""
    raise NotImplementedError("this operator has no second derivative; use impl='reference' for one")
