"""Whether trimtab's Triton kernels run on a device; importing this module does not import Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from trimtab.facts.devices import triton_runs


@cache  # called for every weight
def runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed and supports the device: CUDA with a sufficient compute capability.

    Example:
        >>> runs_triton(torch.device("cpu"))
        False
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        return True  # built for another machine whose GPU is unknown
    return triton_runs(find_spec("triton") is not None, torch.cuda.get_device_capability(device))
