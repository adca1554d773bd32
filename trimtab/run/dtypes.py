"""The dtypes of modules and operations, measured on one layer of the model rather than looked up.

for row in list_dtypes(shape, resolved).modules:
    print(row.name, row.weight, row.output, row.gradient)
"""

# B batch, T tokens

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.adapt import LoraSettings, trained_parameters
from trimtab.adapt.spec import resolve_targets
from trimtab.adapt.targets import short_names
from trimtab.facts.shapes import ModelShape
from trimtab.model import init_weights
from trimtab.parallel import Mesh
from trimtab.plan.resolved import Resolved
from trimtab.run.build import autocast_of, build_model, set_gradient_dtype
from trimtab.run.dtype_trace import NAMES, DtypeTrace

VOCABULARY = 64


@dataclass(frozen=True)
class ModuleRow:
    """Dtypes at one module; None if it has no weight."""

    name: str
    weight: str | None
    output: str
    gradient: str | None
    """Dtype in which the weight's gradient is accumulated."""


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of modules by name, and of operations as torch executed them, with autocast."""

    modules: list[ModuleRow]
    operations: dict[str, list[str]]
    """`mm` → [`bf16 → bf16`]: dtypes of the inputs, then of the output."""
    loss: str


def list_dtypes(shape: ModelShape, resolved: Resolved) -> Dtypes:
    """Runs forward and backward of one layer with a run's configuration and lists the dtypes.

    The layer has the model's widths; depth and vocabulary, which do not affect dtypes, are reduced.

    Example:
        >>> found = list_dtypes(shape, resolved)                                     # doctest: +SKIP
        >>> found.operations["mm"], found.loss                                       # doctest: +SKIP
        (['bf16 → bf16'], 'fp32')
    """
    small = dataclasses.replace(shape.of_layers(range(1)), vocab_size=min(shape.vocab_size, VOCABULARY))
    device = torch.device(resolved.device)
    plain = Resolved(
        resolved.device,
        resolved.threads,
        resolved.deterministic,
        resolved.precision,
        resolved.attention.of_layers(range(1)),
        resolved.optimizer,
        lora=_of_one_layer(shape, resolved.lora),
        quantization=resolved.quantization,
    )
    decoder = init_weights(build_model(small, plain, Mesh.single()), 0)
    set_gradient_dtype(decoder, resolved)
    outputs: dict[str, str] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            outputs[name] = NAMES[output.dtype]

        return note

    handles = [
        m.register_forward_hook(hook(n)) for n, m in decoder.named_modules() if n and not list(m.children())
    ]
    ids_BT = torch.arange(16, device=device)[None] % small.vocab_size
    with DtypeTrace() as trace:
        with autocast_of(resolved)():
            loss = decoder.loss(ids_BT, ids_BT)
        loss.backward()
    for handle in handles:
        handle.remove()
    rows = []
    for name, output in outputs.items():
        weight = getattr(decoder.get_submodule(name), "weight", None)
        gradient = None if weight is None or weight.grad is None else NAMES[weight.grad.dtype]
        rows.append(ModuleRow(name, None if weight is None else NAMES[weight.dtype], output, gradient))
    rows += [  # adapters have no module whose forward hook sees an output
        ModuleRow(name, NAMES[p.dtype], "", None if p.grad is None else NAMES[p.grad.dtype])
        for name, p in trained_parameters(decoder).items()
        if ".lora_" in name
    ]
    operations: dict[str, set[str]] = {}
    for operation in trace.counts:
        operations.setdefault(operation.name, set()).add(f"{operation.inputs} → {operation.output}")
    return Dtypes(
        rows, {name: sorted(pairs) for name, pairs in sorted(operations.items())}, NAMES[loss.dtype]
    )


def _of_one_layer(shape: ModelShape, settings: LoraSettings | None) -> LoraSettings | None:
    """A run's adapter settings for the single layer: the same kinds of modules, whichever layers have them."""
    if settings is None:
        return None
    names = short_names(target.name for target in resolve_targets(shape, settings))
    return LoraSettings(r=1, target_modules=tuple(names), use_dora=settings.use_dora, dtype=settings.dtype)
