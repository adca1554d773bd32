"""Lists the live tensors when memory runs out, each with the best name that can be found.

Parameters, gradients and optimizer states have names. Local variables come from the frames of the exception, saved
activations from the autograd graph. Its saved tensors are not unpacked: that may recompute a layer or copy tensors back
from the host. Every other tensor that the garbage collector tracks is listed without a name.
"""

from __future__ import annotations

import bisect
import gc
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.facts.tensor_kinds import TensorKind

PACKAGE = Path(__file__).resolve().parents[1]
_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0", "ToCopyBackward0")
"""Nodes that may be between an operation and its weight in the autograd graph."""


@dataclass(frozen=True)
class Origin:
    """Where a tensor was allocated, as far as it was recorded or is known from a frame."""

    module: str | None = None
    line: str | None = None
    """`file:line (function)`."""


UNKNOWN = Origin()


class Origins(Protocol):
    """Recorded origins of allocations (`run.allocations`)."""

    last_origin: Origin
    """Origin of the last operation, which is the one that failed."""

    def origin_of(self, storage: torch.UntypedStorage) -> Origin | None: ...


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in memory; tensors that share a storage are listed once."""

    kind: TensorKind
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    """Size of its storage."""
    origin: Origin = UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "kind": self.kind.value, "shape": list(self.shape)}


@dataclass(frozen=True)
class NamedTensor:
    """A parameter, buffer, gradient or optimizer state with its name."""

    tensor: torch.Tensor
    kind: TensorKind
    name: str
    module: str | None = None


class States(Protocol):
    """An optimizer with named state tensors."""

    def tensors(self) -> Mapping[str, torch.Tensor]: ...


def live_tensors(
    error: BaseException,
    *,
    model: torch.nn.Module | None = None,
    optimizer: States | None = None,
    origins: Origins | None = None,
) -> list[LiveTensor]:
    """Every tensor that Python or autograd references, the largest first.

    Args:
        error: the exception, with its frames.
        model: names parameters and gradients; if None, it is looked for in the frames.
        optimizer: names optimizer states.
        origins: where tensors were allocated, if that was recorded.

    Example:
        >>> kept = torch.zeros(1000, 1000, dtype=torch.float64)
        >>> kept.nbytes in [tensor.bytes for tensor in live_tensors(MemoryError())]
        True
    """
    gc.collect()  # tensors that are reachable only from reference cycles are not live
    found = _LiveTensors(origins)
    frames = list(frames_of(error))
    model = model if model is not None else _model_in(frames)
    names = _add_named(found, model, optimizer)
    tensors = _python_tensors()
    for frame in reversed(frames):  # innermost first: the first name that is added wins
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), torch.Tensor):
                place = Origin(module_of(frame, model), describe(frame, frame.f_lineno))
                found.add(value, TensorKind.OTHER, f"{name} in {frame.f_code.co_name}", place)
    for tensor, name, module in _saved_activations(tensors, names):
        found.add(tensor, TensorKind.ACTIVATIONS, name, Origin(module))
    for tensor in tensors:
        found.add(tensor, TensorKind.OTHER, "a tensor")
    return sorted(found.tensors.values(), key=lambda tensor: -tensor.bytes)


def frames_of(error: BaseException) -> Iterator[types.FrameType]:
    """The frames between the handler and the exception, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def failure_origin(error: BaseException, model: torch.nn.Module | None = None) -> Origin:
    """The module and the line of this package that requested the memory.

    Example:
        >>> failure_origin(MemoryError())
        Origin(module=None, line=None)
    """
    frames = list(frames_of(error))
    model = model if model is not None else _model_in(frames)
    trace, line = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        inside = Path(code.co_filename).is_relative_to(PACKAGE) and code.co_name != "__torch_dispatch__"
        line = describe(trace.tb_frame, trace.tb_lineno) if inside else line
        trace = trace.tb_next
    modules = (module_of(frame, model) for frame in reversed(frames))
    return Origin(next((name for name in modules if name), None), line)


def describe(frame: types.FrameType, line: int) -> str:
    """Formats a frame as `file:line (function)`, with the file relative to the package's parent."""
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(PACKAGE):
        path = path.relative_to(PACKAGE.parent)
    return f"{path}:{line} ({frame.f_code.co_name})"


def module_of(frame: types.FrameType, model: torch.nn.Module | None) -> str | None:
    """The name of the `nn.Module` whose method runs in a frame."""
    own = frame.f_locals.get("self")
    if model is None or not isinstance(own, torch.nn.Module):
        return None
    return next((name for name, module in model.named_modules() if module is own and name), None)


class _LiveTensors:
    """Live tensors by the identity of their storage; a storage keeps its first name."""

    def __init__(self, origins: Origins | None) -> None:
        self.tensors: dict[int, LiveTensor] = {}
        self._origins = origins

    def add(
        self, tensor: torch.Tensor, kind: TensorKind, name: str, origin: Origin | None = None
    ) -> int | None:
        """Adds a tensor with a new storage; returns the identity of its storage, None if it has no storage."""
        if issubclass(
            type(tensor), FakeTensor
        ):  # the compiler's: shapes without memory, some of them symbolic
            return None
        with suppress(RuntimeError, NotImplementedError):  # functional tensors have no storage
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.tensors and size and tensor.device.type != "meta":
                recorded = self._origins.origin_of(storage) if self._origins is not None else None
                made = _merged(recorded, origin or Origin())
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.tensors[key] = LiveTensor(
                    kind, name, tuple(tensor.shape), dtype, str(tensor.device), size, made
                )
            return key
        return None


def _merged(recorded: Origin | None, seen: Origin) -> Origin:
    if recorded is None:
        return seen
    return replace(recorded, module=recorded.module or seen.module, line=recorded.line or seen.line)


def _add_named(
    found: _LiveTensors, model: torch.nn.Module | None, optimizer: States | None
) -> dict[int, str]:
    """Adds named tensors; returns the parameters' names by the identity of their storages."""
    names: dict[int, str] = {}
    for named in named_tensors(model, optimizer):
        key = found.add(named.tensor, named.kind, named.name, Origin(named.module))
        if key is not None and named.kind is TensorKind.WEIGHTS:
            names[key] = named.name
    return names


def named_tensors(model: torch.nn.Module | None, optimizer: States | None = None) -> Iterator[NamedTensor]:
    """Parameters, buffers, gradients and optimizer states that exist.

    Example:
        >>> [named.name for named in named_tensors(torch.nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    if model is not None:
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            yield NamedTensor(parameter, TensorKind.WEIGHTS, name, _parent(name))
            if parameter.grad is not None:
                yield NamedTensor(parameter.grad, TensorKind.GRADIENTS, f"gradient of {name}", _parent(name))
    for name, state in optimizer.tensors().items() if optimizer is not None else ():
        yield NamedTensor(state, TensorKind.OPTIMIZER, f"optimizer state {name}")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _model_in(frames: list[types.FrameType]) -> torch.nn.Module | None:
    """The largest module among the frames' local variables: a model that is being loaded is referenced only there."""
    modules = [
        value
        for frame in frames
        for value in frame.f_locals.values()
        if issubclass(type(value), torch.nn.Module)
    ]
    return max(modules, key=lambda module: sum(1 for _ in module.parameters()), default=None)


def _python_tensors() -> list[torch.Tensor]:
    # By type: `isinstance` reads `__class__`, which proxies and lazy modules compute.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _saved_activations(
    tensors: list[torch.Tensor], names: Mapping[int, str]
) -> Iterator[tuple[torch.Tensor, str, str | None]]:
    """(tensor, name, module) of each saved activation in the autograd graphs of some tensors.

    An operation with a parameter belongs to that parameter's module; any other one is named after the last such
    operation that ran before it.
    """
    saved = [(node, list(_saved_by(node))) for node in _graph(tensors)]
    direct = {id(node): _module_of_node(node, kept, names) for node, kept in saved}
    order = sorted(
        (node._sequence_nr(), module) for node, _ in saved if (module := direct[id(node)]) is not None
    )
    for node, kept in saved:
        module = direct[id(node)]
        if module is None and kept:
            place = bisect.bisect(order, (node._sequence_nr(), ""))
            module = f"after {order[place - 1][1]}" if place else None
        yield from ((tensor, f"saved by {node.name()}", module) for tensor in kept)


def _graph(tensors: list[torch.Tensor]) -> list[Any]:
    """All nodes of the autograd graphs that end in some tensors, except `AccumulateGrad` nodes."""
    nodes: list[Any] = [
        tensor.grad_fn for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None
    ]
    seen: dict[int, Any] = {}
    while nodes:
        node = nodes.pop()
        if id(node) in seen or hasattr(node, "variable"):
            continue
        seen[id(node)] = node  # keeps the wrapper alive: the id of a freed object may be reused
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return list(seen.values())


def _module_of_node(node: Any, saved: list[torch.Tensor], names: Mapping[int, str]) -> str | None:
    """The module of a parameter that a node uses, directly or as a view; frozen ones are only in its saved tensors."""
    inputs = [parent for parent, _ in node.next_functions if parent is not None]
    views = [
        parent
        for view in inputs
        if view.name() in _VIEWS
        for parent, _ in view.next_functions
        if parent is not None
    ]
    used = [
        variable
        for parent in (*inputs, *views)
        if (variable := getattr(parent, "variable", None)) is not None
    ]
    for tensor in (*used, *saved):
        with suppress(RuntimeError, NotImplementedError):
            name = names.get(tensor.untyped_storage()._cdata)
            if name is not None:
                return _parent(name)
    return None


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Tensors that a node saves, without unpacking any."""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):  # freed already
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, tuple | list) else (raw,):
                packed = getattr(saved, "data", None)
                if isinstance(packed, torch.Tensor):
                    yield packed
    for value in getattr(node, "__dict__", {}).values():  # a Function's own attributes
        if issubclass(type(value), torch.Tensor):
            yield value
