"""Labels the operations of a decoder with the names that its blocks declare, for tools that record ranges.

Modules are labelled by their path in the block, functions by their operation. A label is a range around a call:
`record_function` for torch's profiler (the default), NVTX for NVIDIA's tools (`trimtab.lab.nvtx`). Methods are wrapped
and restored; hooks are not used, because a layer with hooks runs its adapters one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from trimtab.adapt import quantized_ops
from trimtab.model import decoder as decoder_module
from trimtab.model import parts
from trimtab.model.decoder import Decoder
from trimtab.run.allocations import replaced

PREFIX = "operation: "
BLOCK = "block"
"""Label of a block's code outside its operations: the additions to the residual stream."""
DEQUANTIZE = "dequantization"
"""Label inside a product; the operation's name is the product's, followed by this word."""

LOSS = (decoder_module, "linear_cross_entropy", "loss")
FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (parts, "rope", "rope"),
    (parts, "attention", "attention"),
    (parts, "gated_activation", "mlp.activation"),
    (parts, "add_rms_norm", "post_attention_layernorm"),
    (quantized_ops, "dequantize", DEQUANTIZE),
    LOSS,
)
"""(module, name there, label)."""
METHODS = ("forward", "forward_group", "save_only")
"""Labelled methods of linear layers and norms."""
BLOCK_METHODS = ("forward", "compute", "attend", "feed")

SCORES, SOFTMAX, VALUES = "attention: scores", "attention: softmax", "attention: values"
ATTENTION_PARTS = (SCORES, SOFTMAX, VALUES)
"""The parts of plain attention: Q·Kᵀ, the softmax of its rows, and their product with V."""
ATTENTION_PRODUCTS = {"bthd,bshd->bhts": SCORES, "bhts,bshd->bthd": VALUES}
"""The einsum equations in `trimtab/kernels/attention/impl_reference.py`."""


@dataclass(frozen=True)
class Label:
    """The label of a call: the declared operation, and the module's path in the decoder ("" for a function)."""

    operation: str
    module: str = ""


Emitter = Callable[[Label, Callable[[], Any]], Any]
"""Runs a call inside a range with the label's name; returns the call's result."""


def record_operation(label: Label, call: Callable[[], Any]) -> Any:
    """Runs a call in a range of torch's profiler with the operation's name."""
    with record_function(PREFIX + label.operation):
        return call()


@contextmanager
def labelled_operations(decoder: Decoder, emit: Emitter = record_operation) -> Iterator[None]:
    """Runs every operation of the decoder inside in a range with its declared name.

    A compiled block has one range: its operations are compiled without labels.

    Example:
        >>> with labelled_operations(decoder):                                       # doctest: +SKIP
        ...     decoder.loss(ids_BT, labels_BT).backward()
    """
    with ExitStack() as stack:
        labelling = _Labelling(stack, emit)
        if decoder.regions is None:
            labelling.functions(FUNCTIONS)
            for number, block in enumerate(decoder.model.layers):
                labelling.block(block, f"model.layers.{number}")
        else:
            labelling.functions((LOSS,))
            labelling.regions(decoder)
        labelling.methods(decoder.model.embed_tokens, METHODS, Label("embed_tokens", "model.embed_tokens"))
        labelling.methods(decoder.model.norm, METHODS, Label("norm", "model.norm"))
        labelling.methods(decoder, ("logits",), Label("lm_head", "lm_head"))
        yield


@contextmanager
def labelled_attention_parts(emit: Emitter = record_operation) -> Iterator[None]:
    """Labels the products and the softmax of plain attention (impl "reference") separately inside.

    Example:
        >>> with labelled_operations(decoder), labelled_attention_parts():           # doctest: +SKIP
        ...     decoder.loss(ids_BT, labels_BT).backward()
    """
    with _AttentionParts(emit):
        yield


class _AttentionParts(TorchFunctionMode):
    """Intercepts torch functions, and labels the three operations of plain attention."""

    def __init__(self, emit: Emitter) -> None:
        super().__init__()
        self.emit = emit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call() -> Any:
            return func(*args, **(kwargs or {}))

        part = None
        if func is torch.einsum:
            part = ATTENTION_PRODUCTS.get(args[0])
        elif func is torch.Tensor.softmax:
            part = SOFTMAX
        return call() if part is None else self.emit(Label(part), call)


class _Labelling:
    """Labels modules and functions until the stack is closed."""

    def __init__(self, stack: ExitStack, emit: Emitter) -> None:
        self.stack, self.emit = stack, emit

    def functions(self, named: tuple[tuple[Any, str, str], ...]) -> None:
        for module, name, label in named:
            self._replace(module, name, getattr(module, name), Label(label))

    def block(self, block: nn.Module, place: str) -> None:
        """Labels a block's own methods, and every layer in it by its path."""
        self.methods(block, BLOCK_METHODS, Label(BLOCK, place))
        for path, module in block.named_modules():
            if not path or _inside_linear(block, path):
                continue
            operation = path if _computes(module) else BLOCK
            self.methods(module, METHODS, Label(operation, f"{place}.{path}"))

    def regions(self, decoder: Decoder) -> None:
        """Labels the calls of compiled blocks."""
        compiled = decoder.regions or []
        decoder.regions = [
            _labelled(region, Label(BLOCK, f"model.layers.{number}"), self.emit)
            for number, region in enumerate(compiled)
        ]
        self.stack.callback(setattr, decoder, "regions", compiled)

    def methods(self, module: nn.Module, names: tuple[str, ...], label: Label) -> None:
        for name in names:
            method = getattr(module, name, None)
            if method is not None:
                self._replace(module, name, method, label)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any], label: Label) -> None:
        self.stack.enter_context(replaced(owner, name, _labelled(function, label, self.emit)))


def _computes(module: nn.Module) -> bool:
    """Whether a module is one operation: a norm, or a linear layer, plain, quantized or adapted."""
    return isinstance(module, parts.RMSNorm) or hasattr(module, "in_features")


def _inside_linear(block: nn.Module, path: str) -> bool:
    """Whether a module is a part of a linear layer, like the base layer of an adapter."""
    names = path.split(".")
    return any(_computes(block.get_submodule(".".join(names[:i]))) for i in range(1, len(names)))


def _labelled(function: Callable[..., Any], label: Label, emit: Emitter) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return emit(label, lambda: function(*args, **kwargs))

    return call
