"""A CUDA device emulated on the CPU, for code that depends on the device of tensors.

torch's CPU build has no tensors on `cuda`. FakeTensor could replace them, but its backward pass needs a build with
CUDA, and it has no values, on which the host's control flow depends. Here tensors have values in host memory, have the
dispatch keys of CUDA (operators take CUDA's path) and report to Python that they are on `cuda:0`. For C++ they are on
the CPU, so that autograd needs no streams. Their type is torch.Tensor, as on a GPU, because code may check it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tools.sameness.gpu.autocast import emulated_autocast
from tools.sameness.gpu.log import ALLOCATIONS, Log

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
"""Not computed, to save time: since no Triton kernel runs, values mean nothing."""

MIXED = ("copy_", "_to_copy", "index", "index_put", "index_put_")
"""Operators that may take tensors of both devices."""


def is_emulated(x: Any) -> bool:
    """Whether a value is a tensor of the emulated device."""
    return isinstance(x, torch.Tensor) and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.CUDA)


def _emulated(host: torch.Tensor) -> torch.Tensor:
    """The device's view of host memory."""
    made: torch.Tensor = torch.Tensor._make_subclass(torch.Tensor, host, False, device_for_backend_keys=CUDA)
    return made


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A device tensor's memory as a host tensor."""
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), *place)


class EmulatedDevice(TorchDispatchMode):
    """Within it, `device="cuda:0"` is emulated, and every operator on such tensors is recorded.

    Example:
        >>> with emulated_tensors(Log()), EmulatedDevice(Log()) as device:
        ...     x = torch.ones(2, device="cuda").neg()
        ...     print(x.device, [entry.name for entry in device.log.entries])
        cuda:0 ['aten.ones.default', 'aten.neg.default']
    """

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # torch pins memory with a GPU's driver
        if not any(is_emulated(one) or _is_cuda(one) for one in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        key = _implementation(func)
        if key is not None:
            with self:  # what the operator's own Python code does is recorded
                return func._op_dk(key, *args, **kwargs)
        _refuse_mixed(func, args, kwargs)
        out = self._compute(func, args, kwargs)
        if not _is_view(func):
            named = {**{str(i): one for i, one in enumerate(args)}, **kwargs, "->": out}
            self.log.add(str(func), named)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator of torch on host memory."""
        known: dict[int, torch.Tensor] = {}
        hosts = []

        def to_host(x: Any) -> Any:
            if not is_emulated(x):
                return CPU if _is_cuda(x) else x
            hosts.append(_host(x))
            known[id(hosts[-1])] = x
            return hosts[-1]

        def to_device(t: torch.Tensor) -> torch.Tensor:
            return known[id(t)] if id(t) in known else _emulated(t)

        host_args, host_kwargs = tree_map(to_host, (args, kwargs))
        out = _computed(func, host_args, host_kwargs)
        return out if _returns_to_host(func, args, kwargs) else tree_map_only(torch.Tensor, to_device, out)


def _is_cuda(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "cuda"


def _returns_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result is a host tensor: one that is requested, or an input that the operator writes to."""
    name = func.overloadpacket.__name__
    # A cast in a backward pass names the device that C++ knows.
    if kwargs.get("device") is not None and name != "_to_copy":
        return torch.device(kwargs["device"]).type != "cuda"
    written = args[0] if args and func._schema.is_mutable else None
    return isinstance(written, torch.Tensor) and not is_emulated(written)


def _refuse_mixed(func: Any, args: Any, kwargs: Any) -> None:
    """Raises for operands on both devices, as CUDA does.

    A case also fails here if C++ code creates a host tensor because it considers an emulated operand to be on the CPU.
    """
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    hosts = [one for one in tensors if one.ndim and not is_emulated(one)]
    if hosts and len(hosts) < len(tensors) and func.overloadpacket.__name__ not in MIXED:
        raise RuntimeError(f"{func} on tensors of both devices")


def _implementation(func: Any) -> Any:
    """The dispatch key of a custom operator's Python implementation; None for torch's operators."""
    if func.namespace in ("aten", "prim", "prims"):
        return None
    for key in ("CUDA", "CompositeExplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return getattr(torch._C.DispatchKey, key)
    return None


def _is_view(func: Any) -> bool:
    """Whether an operator does nothing on the device: views, and aliases such as detach."""
    infos = [one.alias_info for one in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result, computed on the CPU; for matrix products, and where the CPU has no kernel, ones of its shape."""
    name = func.overloadpacket.__name__
    if name in PRODUCTS:
        return _shaped(func, args, kwargs)
    try:
        out = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return _shaped(func, args, kwargs)
    # Memory that nothing fills must not differ from run to run. Not zeros: their logarithm ends a training run.
    return _fill(out) if name in ALLOCATIONS and out.device == CPU else out


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(1 if tensor.is_floating_point() else 0)


def _shaped(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of an operator's meta kernel; tensors that it writes to are not changed."""
    given: dict[int, torch.Tensor] = {}
    metas = []

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            metas.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
            given[id(metas[-1])] = x
            return metas[-1]
        return torch.device("meta") if isinstance(x, torch.device) else x

    def to_host(t: torch.Tensor) -> torch.Tensor:
        return (
            given[id(t)] if id(t) in given else _fill(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype))
        )

    meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
    return tree_map_only(torch.Tensor, to_host, func(*meta_args, **meta_kwargs))


class _ToHost(torch.autograd.Function):
    """A copy to the host."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, non_blocking: bool, log: Log
    ) -> torch.Tensor:
        """Host memory of its own."""
        copied = _host(tensor).to(dtype, copy=True)
        log.add("copy to host", {"0": tensor, "non_blocking": non_blocking, "->": copied})
        return copied

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Back to the device."""
        return grad.to(CUDA), None, None, None


@contextmanager
def emulated_tensors(log: Log) -> Iterator[None]:
    """Patches torch.Tensor's device properties, and functions whose C++ code would treat emulated tensors as CPU
    tensors.
    """
    plain = {name: getattr(torch.Tensor, name) for name in ("device", "is_cuda", "data_ptr", "tolist", "to")}

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        args, kwargs = tuple(map(_with_index, args)), {key: _with_index(one) for key, one in kwargs.items()}
        if not is_emulated(self):
            return plain["to"](self, *args, **kwargs)
        copy, memory_format = kwargs.pop("copy", False), kwargs.get("memory_format")
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device == CUDA:
            return plain["to"](self, dtype=dtype or self.dtype, copy=copy, memory_format=memory_format)
        assert device == CPU, f"a copy from the emulated device to {device}"
        return _ToHost.apply(self, dtype or self.dtype, non_blocking, log)

    doubles: dict[str, Any] = {
        "device": property(lambda self: CUDA if is_emulated(self) else plain["device"].__get__(self)),
        "is_cuda": property(is_emulated),
        # The same in every run: tables of addresses are compared as well.
        "data_ptr": lambda self: log.address(self) if is_emulated(self) else plain["data_ptr"](self),
        "tolist": lambda self: plain["tolist"](self.to(CPU)),
        "to": to,
        "cpu": lambda self, *_: self.to(CPU),
        "cuda": lambda self, *_, **__: self.to(CUDA),
        "pin_memory": lambda self, *_: self,
    }
    with ExitStack() as stack:
        stack.enter_context(emulated_autocast())
        stack.enter_context(patch.object(torch.cuda, "_lazy_init", lambda: None))
        for name, double in doubles.items():
            stack.enter_context(patch.object(torch.Tensor, name, double))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _located(getattr(torch, name))))
        # torch.tensor(…, device="cuda") makes a host tensor and copies it, as it does for FakeTensors.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        yield


def _with_index(value: Any) -> Any:
    """Replaces `cuda` by `cuda:0`, because C++ would query CUDA for the index."""
    return CUDA if _is_cuda(value) or (isinstance(value, str) and value.startswith("cuda")) else value


def _located(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(values: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(values, *args, **{key: _with_index(one) for key, one in kwargs.items()})

    return call
