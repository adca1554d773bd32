"""What every Triton launcher asks: for which chip, may it launch here, and how a tensor lies as rows."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from trimtab.facts.errors import ResourceError

INTERPRETED = 90
"""The capability whose configurations the interpreter, which runs on CPU tensors, is given."""


def capability_of(tensor: torch.Tensor) -> int:
    """75, 80, 86, 89, 90, … of the device that holds the tensor."""
    return _capability(tensor.device) if tensor.is_cuda else INTERPRETED


@cache  # asked at every launch
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_device(kernel: Any, tensor: torch.Tensor) -> None:
    """A compiled kernel needs a CUDA tensor; an interpreted one (tests) takes any."""
    if isinstance(kernel, JITFunction) and not tensor.is_cuda:
        raise ResourceError("Triton kernels need a CUDA device", "use impl='reference' on this one")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[…, D] as [N, D] whose last stride is 1; rows may lie anywhere. A copy only where there is no such view.

    Example:
        >>> as_rows(torch.zeros(2, 3, 8)[..., :4]).stride()
        (8, 1)
    """
    x_ND = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 or x_ND.shape[1] <= 1 else x_ND.contiguous()


def once_differentiable(*_: Any) -> Any:
    """The autograd formula of operators that are a backward pass themselves."""
    raise NotImplementedError("this operator has no second derivative; use impl='reference' for one")
