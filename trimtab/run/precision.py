"""How a run's number formats are brought about: autocast around the loss, and the format of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from trimtab.run.choices import Choices


def set_gradient_format(model: torch.nn.Module, choices: Choices) -> None:
    """Gradients of bf16 weights are added up in fp32 unless the recipe says otherwise."""
    if choices.weights_dtype == "bf16" and choices.gradient_dtype == "fp32":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32


def autocast_of(choices: Choices) -> Callable[[], Any]:
    """A context in which the model computes in `choices.dtype`; one that does nothing if the weights have it.

    A cache of casts would hold those of all layers until the pass ends, of layers that are computed again as well; and
    but for a feed-forward in tiles, which casts for each, no weight is read twice.
    """
    if choices.dtype == choices.weights_dtype:
        return contextlib.nullcontext
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[choices.dtype]
    return lambda: torch.autocast(choices.device, dtype=dtype, cache_enabled=False)
