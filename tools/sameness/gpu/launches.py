"""Triton's driver without a GPU: kernels are specialized as for a launch, recorded, and not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tools.sameness.gpu.log import Log, Specialization

TARGET = GPUTarget("cuda", 90, 32)
"""An H100 or H200."""


class Driver:
    """The driver interface that Triton uses to launch kernels."""

    def get_current_device(self) -> int:
        """The emulated device's index."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Triton's own; the log has the stream that torch would name."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The compilation target."""
        return TARGET


class RecordedKernel:
    """Replaces a compiled kernel: a launch writes an entry and runs nothing."""

    function = packed_metadata = None

    def __init__(self, log: Log, source: ASTSource, options: dict[str, Any]) -> None:
        self.log, self.name = log, kernel_name(source.fn)
        self.parameters = list(source.fn.arg_names)
        specialization = _specialization(source, options)
        self.constants = specialization.constants
        self.key = specialization.key
        log.specializations[self.key] = specialization
        log.sources[self.key] = source, options

    def launch_metadata(self, *_: Any) -> None:
        """Only profilers read it."""

    def run(self, x: int, y: int, z: int, stream: Any, function: Any, *rest: Any) -> None:
        """Records a launch; the arguments of the kernel are the last of `rest`."""
        values = dict(zip(self.parameters, rest[-len(self.parameters) :], strict=True))
        # By name: two commits may have another order, and buffers are numbered in it.
        names = sorted(name for name in values if name not in self.constants)
        arguments = {name: _described(self.log, values[name]) for name in names}
        self.log.add(f"launch {self.name}", {"grid": (x, y, z), **arguments}, self.key)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args, **_: self.run(*grid, None, None, *args)


def kernel_name(fn: Any) -> str:
    """As `Specialization.kernel`."""
    return f"{fn.fn.__module__.split('.')[-2]}.{fn.fn.__name__}"


def _described(log: Log, value: Any) -> Any:
    """An argument as the log takes it; a tensor descriptor as its tensor, shape, strides and block."""
    if isinstance(value, torch.Tensor):
        return log.pointer(value)
    if isinstance(value, TensorDescriptor):
        shape, strides, block = list(value.shape), tuple(value.strides), list(value.block_shape)
        return f"{log.pointer(value.base)} as {shape}{strides} in blocks {block}"
    return value


def _specialization(source: ASTSource, options: dict[str, Any]) -> Specialization:
    names = list(source.fn.arg_names)
    constants = {names[path[0]]: repr(value) for path, value in source.constants.items()}
    aligned = tuple(sorted(names[path[0]] for path, found in source.attrs.items() if found))
    plain = {key: str(value) for key, value in options.items() if key != "extern_libs"}
    place = f"{source.fn.fn.__module__}:{source.fn.fn.__qualname__}"
    return Specialization(kernel_name(source.fn), place, dict(source.signature), constants, aligned, plain)


@contextmanager
def recorded_launches(log: Log) -> Iterator[None]:
    """Records the launches of Triton kernels in this context."""

    def record(source: ASTSource, target: Any = None, options: Any = None) -> RecordedKernel:
        return RecordedKernel(log, source, dict(options or {}))

    with patch.object(triton.compiler, "compile", record), patch.object(driver, "_active", Driver()):
        _forget_compiled()
        try:
            yield
        finally:
            _forget_compiled()


def _forget_compiled() -> None:
    for _, function in _functions():
        function.device_caches.clear()


def _functions() -> Iterator[tuple[str, JITFunction[Any]]]:
    """Module and name of each Triton function of the imported modules. Triton's own registry is new in 3.7."""
    for name, module in list(sys.modules.items()):
        for function in list(getattr(module, "__dict__", {}).values()):
            if type(function) is JITFunction and function.module == name:
                yield f"{name}:{function.fn.__qualname__}", function


def launchable(package: str) -> set[str]:
    """(module, function) of each imported kernel of a package.

    Functions named `…_kernel` are launched; other Triton functions are called by kernels.
    """
    return {name for name, _ in _functions() if name.startswith(f"{package}.") and name.endswith("_kernel")}
