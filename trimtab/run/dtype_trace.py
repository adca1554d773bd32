"""Traces the operations that torch executes, including autocast's casts, with dtypes of inputs and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from trimtab.facts.dtypes import TORCH_NAMES

NAMES = {getattr(torch, long): short for short, long in TORCH_NAMES.items()}


@dataclass(frozen=True)
class TracedOperation:
    """One kind of operation at one module."""

    module: str
    """Path of the innermost running module; empty outside of modules."""
    backward: bool
    name: str
    """Torch's name: mm, _to_copy."""
    inputs: str
    """Distinct floating-point dtypes of the inputs: "bf16, fp32"."""
    output: str
    is_view: bool
    """Whether the output is a view of an input."""


class DtypeTrace(TorchDispatchMode):
    """Records every operation with floating-point inputs and outputs in its context.

    Example:
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> with DtypeTrace() as trace, torch.autocast("cpu", dtype=torch.bfloat16):
        ...     _ = layer(torch.ones(1, 2))
        >>> [(op.name, op.inputs, op.output) for op in trace.counts if not op.is_view]
        [('_to_copy', 'fp32', 'bf16'), ('mm', 'bf16', 'bf16')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[TracedOperation, int] = {}
        """Number of calls by operation, in the order of first calls."""
        self._modules = ModuleTracker()

    def __enter__(self) -> DtypeTrace:
        self._modules.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before, after = _dtypes_of((args, kwargs)), _dtypes_of(out)
        if before and after:
            innermost = max(self._modules.parents, key=lambda path: path.count("."))
            operation = TracedOperation(
                innermost.partition(".")[2],
                bool(self._modules.is_bw),
                func.overloadpacket.__name__,
                before,
                after,
                _is_view(func),
            )
            self.counts[operation] = self.counts.get(operation, 0) + 1
        return out


def _dtypes_of(values: Any) -> str:
    found = [NAMES[t.dtype] for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.dtype in NAMES]
    return ", ".join(dict.fromkeys(found))


def _is_view(func: Any) -> bool:
    """Whether, by its schema, a result aliases an input that is not written to."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
