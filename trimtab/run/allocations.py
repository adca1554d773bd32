"""Records where tensors are made, so that running out of memory can name the line: `trimtab train --explain-memory`.

It looks at every operation, which makes steps slower (1.26 to 1.51 s for the starter with 4 × 256 tokens on one CPU
thread, more where kernels are small); that is why it is not always on. It sees what operations return; memory that a
kernel takes and gives back inside itself is not visible to it.
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

_INSIDE = f"{PACKAGE}/"
_OWN = ("__torch_dispatch__", "entering")
"""Methods that look at operations and run none, here and in what derives from the recorder."""
_METHODS = ("forward", "forward_group", "save_only", "layers", "attend", "feed")
"""Methods of modules that run operations: of linear layers with adapters and of blocks besides `forward`."""
_KEPT_OPERATIONS = 100_000
"""Operations of the forward pass whose place is remembered for their backward; a step has some thousands."""


class AllocationRecorder(TorchDispatchMode):
    """Remembers module and line of every storage that is made inside it, for as long as the storage lives.

    In the backward pass an operation is given the place of the forward operation that it belongs to. Modules are
    followed without hooks: adapters and recomputation run otherwise where a layer has one.

    Example:
        >>> with AllocationRecorder() as recorder:
        ...     kept = torch.zeros(1000)
        >>> recorder.of(kept.untyped_storage()) is not None
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = Origin()
        """Of the operation that ran last."""
        self._modules: list[str] = []
        self._made: dict[int, Origin] = {}
        self._forward: dict[int, Origin] = {}
        self._followed = ExitStack()

    def watch(self, model: torch.nn.Module) -> None:
        """Follow which module of `model` runs."""
        for name, module in model.named_modules():
            for method in (getattr(module, word, None) for word in _METHODS if name):
                if inspect.ismethod(method):
                    inside = self._inside(name, method)
                    self._followed.enter_context(replaced(module, method.__name__, inside))

    def of(self, storage: torch.UntypedStorage) -> Origin | None:
        """Where a storage was made; None for one that was there before."""
        return self._made.get(storage._cdata)

    def __exit__(self, *exc: Any) -> None:
        """Stop recording; what is alive stays known."""
        self._followed.close()
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        self.last = origin = self._origin()
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
            return Origin(f"recomputation of {self._modules[-1]}", line_here())
        if node is not None:
            made = self._forward.get(node._sequence_nr(), Origin(line=line_here()))
            where = f"backward of {made.module}" if made.module else "backward"
            return Origin(where, made.line)
        made = Origin(self._modules[-1] if self._modules else None, line_here())
        # The node of the operation that is being dispatched was numbered just before, and so was that of a function
        # with a backward pass of its own, inside of which gradients are off.
        sequence = torch.autograd._get_sequence_nr() - 1
        if torch.is_grad_enabled() or sequence not in self._forward:
            self._forward[sequence] = made
            if len(self._forward) > _KEPT_OPERATIONS:
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
        """A module of this name runs inside."""
        self._modules.append(name)
        try:
            yield
        finally:
            self._modules.pop()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module or an instance with another value, for as long as the block lasts.

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


def line_here() -> str | None:
    """The innermost line of this package that runs an operation."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = code.co_filename.startswith(_INSIDE) and code.co_filename != __file__
        if inside and code.co_name not in _OWN:
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
    """Records where tensors are made, if there is a recorder; `on_event` receives whether it does, or why not.

    A compiled region shows none of its operations.

    Example:
        >>> with recording(None, torch.nn.Linear(2, 2), print, compiled=False):
        ...     pass
    """
    if recorder is None:
        yield
    elif compiled:
        on_event("--explain-memory sees nothing in compiled regions; start with torch_compile=false for it")
        yield
    else:
        on_event("recording where tensors are made (--explain-memory): steps are slower")
        recorder.watch(model)
        with recorder:
            yield
