"""The dtype of every operation under autocast: of a toy model in plain torch, and of trimtab's decoder."""

# B batch, T tokens, C classes

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trimtab.facts.dtypes import TORCH_NAMES, dtype_alias
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.names import shortened
from trimtab.lab.numerics.norms import NormRow, study_norms
from trimtab.lab.study import NotSupported
from trimtab.lab.study_step import Loss, Precision, StepSettings, StudyStep
from trimtab.run.dtype_trace import NAMES, DtypeTrace, TracedOperation

DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class ToyShape:
    """Widths of the toy model."""

    inputs: int = 20
    hidden: int = 10
    classes: int = 5


class ToyModel(nn.Module):
    """linear → ReLU → LayerNorm → linear, as in PyTorch's own examples of mixed precision."""

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.inputs, shape.hidden, bias=False)
        self.ln = nn.LayerNorm(shape.hidden)
        self.fc2 = nn.Linear(shape.hidden, shape.classes, bias=False)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        """Logits [B, C]."""
        return self.fc2(self.ln(F.relu(self.fc1(x_BI))))


@dataclass(frozen=True)
class TracedModel:
    """Dtypes of one step under autocast."""

    name: str
    parameters: str
    """Parameters, inside of the autocast region."""
    first_layer: str
    """Output of the first linear layer."""
    norm: str
    """Output of the first norm."""
    logits: str
    loss: str
    gradients: str
    operations: tuple[tuple[TracedOperation, int], ...]
    """(operation, count), in the order of execution."""


@dataclass(frozen=True)
class AutocastStudy:
    """Dtypes under autocast on one device."""

    device: str
    dtype: str
    models: tuple[TracedModel, ...]
    norms: tuple[NormRow, ...]

    def records(self) -> list[dict[str, Any]]:
        """One JSON record for each model and one for the norms."""
        where = {"device_kind": self.device, "dtype": self.dtype}
        models = [
            {
                **where,
                "model": model.name,
                "parameters": model.parameters,
                "first_layer": model.first_layer,
                "norm": model.norm,
                "logits": model.logits,
                "loss": model.loss,
                "gradients": model.gradients,
                "operations": [
                    {
                        "module": operation.module,
                        "pass": "backward" if operation.backward else "forward",
                        "operation": operation.name,
                        "inputs": operation.inputs,
                        "output": operation.output,
                        "times": times,
                    }
                    for operation, times in model.operations
                ],
            }
            for model in self.models
        ]
        return [*models, {**where, "norms": self.norms}]


def study_autocast(dtype: str = "bf16", device: str = "cpu") -> AutocastStudy:
    """Runs forward and backward of both models under autocast and records all dtypes.

    Args:
        dtype: bf16 or fp16.
        device: cpu or cuda.

    Example:
        >>> toy, decoder = study_autocast("bf16").models
        >>> toy.parameters, toy.first_layer, toy.gradients, decoder.norm
        ('fp32', 'bf16', 'fp32', 'fp32')
    """
    name = str(dtype_alias(dtype))
    if name not in DTYPES:
        near = difflib.get_close_matches(name, DTYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(
            f"autocast computes in 16 bits, not in '{shortened(dtype)}'", f"{hint}use bf16 or fp16"
        )
    try:
        decoder = _trace_decoder(name, device)
    except NotSupported as error:
        raise ResourceError(str(error), "use --dtype fp16") from None
    return AutocastStudy(device, name, (_trace_toy(name, device), decoder), study_norms(device))


def _trace_toy(dtype: str, device: str) -> TracedModel:
    generator, shape = torch.Generator().manual_seed(0), ToyShape()
    model = ToyModel(shape).to(device)
    x_BI = torch.randn(4, shape.inputs, generator=generator).to(device)
    labels_B = torch.arange(4, device=device) % shape.classes
    kind = torch.device(device).type

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(kind, dtype=getattr(torch, TORCH_NAMES[dtype]))

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        logits_BC = model(x_BI)
        return logits_BC, F.cross_entropy(logits_BC, labels_B)

    return _trace("toy model", model, (model.fc1, model.ln), autocast, loss)


def _trace_decoder(dtype: str, device: str) -> TracedModel:
    settings = StepSettings(
        "tiny", context=16, batch=1, precision=Precision(dtype), loss=Loss.CROSS_ENTROPY, device=device
    )
    step = StudyStep(settings)
    decoder = step.decoder
    first: Any = decoder.model.layers[0]

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = decoder.logits(decoder(step.ids_BT))
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), step.labels_BT.flatten())

    observed = (first.self_attn.q_proj, first.input_layernorm)
    return _trace("trimtab's decoder", decoder, observed, step.computing, loss)


def _trace(
    name: str,
    model: nn.Module,
    observed: tuple[nn.Module, nn.Module],
    autocast: Callable[[], AbstractContextManager[Any]],
    loss: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> TracedModel:
    """One forward and backward pass; `observed` are the first linear layer and the first norm."""
    outputs: dict[nn.Module, str] = {}

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        outputs[module] = NAMES[output.dtype]

    handles = [module.register_forward_hook(note) for module in observed]
    with DtypeTrace() as trace:
        with autocast():
            parameters = _formats(parameter for parameter in model.parameters())
            logits, value = loss()
        value.backward()
    for handle in handles:
        handle.remove()
    return TracedModel(
        name,
        parameters,
        outputs[observed[0]],
        outputs[observed[1]],
        NAMES[logits.dtype],
        NAMES[value.dtype],
        _formats(parameter.grad for parameter in model.parameters()),
        tuple(trace.counts.items()),
    )


def _formats(tensors: Any) -> str:
    return ", ".join(dict.fromkeys(NAMES[tensor.dtype] for tensor in tensors))
