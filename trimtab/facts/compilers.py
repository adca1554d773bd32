"""Checks for the compilers that torch.compile needs: a C or C++ compiler, and Triton on a GPU. No torch."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

TRITON_MIN_CAPABILITY = (7, 0)
"""Minimum compute capability that torch.compile requires for its Triton kernels."""


def compile_obstacle(kind: str, capability: tuple[int, int] | None = None) -> str | None:
    """Returns why torch.compile does not work for a device type ("cpu", "cuda") on this machine; None if it works.

    Example:
        >>> compile_obstacle("cuda", (6, 1))
        'Triton needs capability 7.0, the device has 6.1'
    """
    if kind == "cuda":
        if capability is not None and capability < TRITON_MIN_CAPABILITY:
            needed, found = (".".join(map(str, pair)) for pair in (TRITON_MIN_CAPABILITY, capability))
            return f"Triton needs capability {needed}, the device has {found}"
        if find_spec("triton") is None:
            return "Triton is not installed (it comes with torch's CUDA builds)"
        if not _is_on_path("CC", "gcc", "clang", "cc"):
            return "there is no C compiler (install gcc)"
    elif not _is_on_path("CXX", "g++", "clang++", "c++"):
        return "there is no C++ compiler (install g++)"
    return None


def _is_on_path(variable: str, *names: str) -> bool:
    """Whether one of the programs, or the one that the environment variable names, is on the PATH."""
    named = os.environ.get(variable)
    return any(shutil.which(name) for name in ((named,) if named else names))
