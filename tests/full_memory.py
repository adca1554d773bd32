"""Simulates out-of-memory errors of operations that are called from a given function."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.00 GiB of which 1.50 GiB is "
    "free. Process 4711 has 3.25 GiB memory in use. Including non-PyTorch memory, this process has 17.25 GiB memory "
    "in use. Of the allocated memory 15.00 GiB is allocated by PyTorch, and 1.25 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting …"
)
"""The error message of torch's CUDA allocator."""

SMALL = (
    "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 2.00 MiB of which 512 bytes is "
    "free. Of the allocated memory 1.60 MiB is allocated by PyTorch, and 128.00 KiB is reserved by PyTorch but "
    "unallocated."
)
"""On a GPU that the tests' tiny model almost fits."""


class FullMemory(TorchDispatchMode):
    """Raises what torch raises, for an operation called (at any depth) from a function of a file.

    Args:
        file: the end of the file's name.
        function: the function's name; any of the file if empty.
        spared: so many operations from there still find memory.
        backward: of these, only those that autograd runs; or only those that it does not.
        host: the host has no memory, instead of a GPU.
        message: what a GPU's allocator says.
    """

    def __init__(
        self,
        file: str,
        function: str = "",
        *,
        spared: int = 0,
        backward: bool | None = None,
        host: bool = False,
        message: str = MESSAGE,
    ) -> None:
        super().__init__()
        self.file, self.function, self.spared = file, function, spared
        self.backward, self.host, self.message = backward, host, message
        self.failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._applies():
            self.spared -= 1
            if self.spared < 0:
                self.failed += 1
                if self.host:
                    raise RuntimeError(
                        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
                    )
                raise torch.OutOfMemoryError(self.message)
        return func(*args, **(kwargs or {}))

    def _applies(self) -> bool:
        in_backward = torch._C._current_autograd_node() is not None
        if self.backward is not None and self.backward is not in_backward:
            return False
        frame: Any = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith(self.file) and self.function in ("", code.co_name):
                return True
            frame = frame.f_back
        return False
