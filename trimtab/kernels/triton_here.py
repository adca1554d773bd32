"""Whether this library's Triton kernels run on a device; asking imports no Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from trimtab.facts.devices import triton_runs


@cache  # asked for every weight
def runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for the device: a CUDA one that is not too old.

    Example:
        >>> runs_triton(torch.device("cpu"))
        False
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        return True  # laid out for another machine, of which nothing is known
    return triton_runs(find_spec("triton") is not None, torch.cuda.get_device_capability(device))
