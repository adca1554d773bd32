"""NVTX ranges with the names of modules, which NVIDIA's tools show: `nsys profile trimtab bench kernels --nvtx`.

The forward pass of each module is one range ("model.layers.3.mlp.up_proj"), nested as the modules are; functions such
as attention are ranges inside of their layer. In the backward pass each node of autograd is one range, with the name of
the module that created it and the suffix " backward": nodes run one after the other and are never nested, so that these
ranges are correct where ranges around whole modules would overlap.

Ranges cost host time, and the host emits them: a replayed CUDA graph has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from trimtab.lab.operation_labels import Label, labelled_operations
from trimtab.lab.study import NotSupported
from trimtab.model.decoder import Decoder

BACKWARD = " backward"


class Nvtx(Protocol):
    """The interface of `torch.cuda.nvtx`."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@contextmanager
def nvtx_ranges(decoder: Decoder, nvtx: Nvtx | None = None) -> Iterator[NvtxRanges]:
    """Emits NVTX ranges with module names in the decoder's forward and backward passes inside.

    Args:
        decoder: compiled or not; a compiled block has one range.
        nvtx: receives the ranges; torch.cuda.nvtx by default.

    Raises:
        NotSupported: torch has no CUDA, and so no NVTX.

    Example:
        >>> with nvtx_ranges(decoder) as ranges, ranges.named("step 1"):             # doctest: +SKIP
        ...     decoder.loss(ids_BT, labels_BT).backward()
    """
    ranges = NvtxRanges(nvtx or _torch_nvtx())
    try:
        with labelled_operations(decoder, ranges.emit):
            yield ranges
    finally:
        ranges.close()


def _torch_nvtx() -> Nvtx:
    if not torch.cuda.is_available():
        raise NotSupported(
            "NVTX ranges need a CUDA GPU; without --nvtx operators are profiled on this device"
        )
    return torch.cuda.nvtx


class NvtxRanges:
    """Emits and counts ranges."""

    def __init__(self, nvtx: Nvtx) -> None:
        self._nvtx = nvtx
        self._open = threading.local()
        self._made: set[tuple[int, int]] = set()
        """Nodes that have a name, by thread and sequence number."""
        self._closed = False
        self.count = 0
        """Ranges that were emitted."""

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Emits a range; skips it directly inside a range of the same name."""
        names = self._names()
        if names and names[-1] == name:
            yield
            return
        self._push(name)
        try:
            yield
        finally:
            self._pop()

    def emit(self, label: Label, call: Callable[[], Any]) -> Any:
        """Runs the call in a range, and names its autograd nodes."""
        name = label.module or label.operation
        first = torch.autograd._get_sequence_nr()
        with self.named(name):
            result = call()
        if torch.is_grad_enabled():
            self._name_backward(result, name + BACKWARD, first)
        return result

    def close(self) -> None:
        """Ends ranges that an exception left open in this thread; nodes that run later emit nothing."""
        self._closed = True
        while self._names():
            self._pop()

    def _name_backward(self, result: Any, name: str, first: int) -> None:
        """Names every node created since `first`, unless an inner module has named it."""
        thread = threading.get_ident()
        waiting = [tensor.grad_fn for tensor in _tensors(result) if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            key = (thread, node._sequence_nr())
            # AccumulateGrad nodes have the maximum sequence number, and no module
            if key in self._made or key[1] < first or type(node).__name__ == "AccumulateGrad":
                continue
            self._made.add(key)
            node.register_prehook(lambda grads: self._begin(name))
            node.register_hook(lambda inputs, outputs: self._end())
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _begin(self, name: str) -> None:
        if not self._closed:
            self._push(name)

    def _end(self) -> None:
        if not self._closed:
            self._pop()

    def _names(self) -> list[str]:
        """Open ranges of this thread: backward passes on a GPU run in separate threads."""
        names: list[str] | None = getattr(self._open, "names", None)
        if names is None:
            names = self._open.names = []
        return names

    def _push(self, name: str) -> None:
        self._nvtx.range_push(name)
        self._names().append(name)
        self.count += 1

    def _pop(self) -> None:
        self._names().pop()
        self._nvtx.range_pop()


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in _tensors(item)]
    return []
