"""Records where tensors are allocated, for out-of-memory reports: `trimtab train --explain-memory`.

It intercepts every operation, which makes steps slower (1.26 to 1.51 s for the starter with 4 × 256 tokens on one CPU
thread, more with small kernels); therefore it is off by default. It records the outputs of operations; a kernel's own
temporary buffers are not visible.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.run.live_tensors import PACKAGE, Origin, describe

_PACKAGE_PREFIX = f"{PACKAGE}/"
_RECORDER_METHODS = ("__torch_dispatch__", "entering")
"""Methods of the recorder and its subclasses, which are not the origin of an operation."""
_METHODS = ("forward", "forward_group", "save_only", "compute", "attend", "feed")
"""Methods that run a module's operations: `forward`, and others of blocks and of linear layers with adapters."""
_MAX_FORWARD_OPERATIONS = 100_000
"""Number of forward operations with a recorded origin for their backward; a step has a few thousand."""


class AllocationRecorder(TorchDispatchMode):
    """Records the module and line of every storage that is allocated in its context, as long as the storage lives.

    In the backward pass an operation gets the origin of its forward operation. Modules are tracked without hooks:
    adapters and recomputation take a different code path if a layer has hooks.

    Example:
        >>> with AllocationRecorder() as recorder:
        ...     kept = torch.zeros(1000)
        >>> recorder.origin_of(kept.untyped_storage()) is not None
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_origin = Origin()
        """Origin of the last operation."""
        self._modules: list[str] = []
        self._made: dict[int, Origin] = {}
        self._forward: dict[int, Origin] = {}
        self._followed = ExitStack()

    def watch(self, model: torch.nn.Module) -> None:
        """Track which module of `model` runs."""
        for name, module in model.named_modules():
            for method in (getattr(module, word, None) for word in _METHODS if name):
                if inspect.ismethod(method):
                    inside = self._inside(name, method)
                    self._followed.enter_context(replaced(module, method.__name__, inside))

    def origin_of(self, storage: torch.UntypedStorage) -> Origin | None:
        """The origin of a storage; None if it was allocated before recording."""
        return self._made.get(storage._cdata)

    def __exit__(self, *exc: Any) -> None:
        """Stop recording; the origins of live storages are kept."""
        self._followed.close()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        self.last_origin = origin = self._origin()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._made:
                    self._made[storage._cdata] = origin
                    weakref.finalize(storage, self._made.pop, storage._cdata, None)
        return out

    def _origin(self) -> Origin:
        node = torch._C._current_autograd_node()
        if node is not None and self._modules:  # a module runs inside the backward pass
            return Origin(f"recomputation of {self._modules[-1]}", innermost_package_line())
        if node is not None:
            made = self._forward.get(node._sequence_nr(), Origin(line=innermost_package_line()))
            where = f"backward of {made.module}" if made.module else "backward"
            return Origin(where, made.line)
        made = Origin(self._modules[-1] if self._modules else None, innermost_package_line())
        # The node of the current operation got the last sequence number; so did that of an autograd.Function, inside
        # of which gradients are disabled.
        sequence = torch.autograd._get_sequence_nr() - 1
        if torch.is_grad_enabled() or sequence not in self._forward:
            self._forward[sequence] = made
            if len(self._forward) > _MAX_FORWARD_OPERATIONS:
                del self._forward[next(iter(self._forward))]
        return made

    def _inside(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.entering(name):
                return method(*args, **kwargs)

        return call

    @contextmanager
    def entering(self, name: str) -> Iterator[None]:
        """Operations in this context belong to the named module."""
        self._modules.append(name)
        try:
            yield
        finally:
            self._modules.pop()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of a module or an instance within the context.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> with replaced(layer, "forward", lambda x: 2 * x):
        ...     layer(3)
        6
        >>> "forward" in vars(layer)
        False
    """
    own, missing = vars(owner), object()
    before = own.get(name, missing)
    own[name] = value
    try:
        yield
    finally:
        if before is missing:
            del own[name]
        else:
            own[name] = before


def innermost_package_line() -> str | None:
    """The innermost line of this package on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = code.co_filename.startswith(_PACKAGE_PREFIX) and code.co_filename != __file__
        if inside and code.co_name not in _RECORDER_METHODS:
            return describe(frame, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


@contextmanager
def recording(
    recorder: AllocationRecorder | None,
    model: torch.nn.Module,
    on_event: Callable[[str], None],
    *,
    compiled: bool,
) -> Iterator[None]:
    """Records where tensors are allocated, if there is a recorder; `on_event` reports whether and why not.

    Operations inside a compiled region are not visible.

    Example:
        >>> with recording(None, torch.nn.Linear(2, 2), print, compiled=False):
        ...     pass
    """
    if recorder is None:
        yield
    elif compiled:
        on_event("--explain-memory cannot record compiled regions; start the run with torch_compile=false")
        yield
    else:
        on_event("recording where tensors are allocated (--explain-memory): steps are slower")
        recorder.watch(model)
        with recorder:
            yield
