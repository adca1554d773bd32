"""Selects the 8-bit AdamW implementation of a run, with the reason. Does not import torch."""

from __future__ import annotations

from trimtab.facts.errors import RecipeError
from trimtab.kernels.adamw8bit.spec import IMPLS
from trimtab.kernels.choice import ImplChoice


def choose_adamw8bit(*, device: str, triton: bool = True, requested: str = "auto") -> ImplChoice:
    """Selects the implementation, or confirms the requested one; raises if it cannot run.

    Example:
        >>> choose_adamw8bit(device="cpu").impl, choose_adamw8bit(device="cuda").impl
        ('reference', 'triton')
    """
    available = device == "cuda" and triton
    if requested == "auto":
        if available:
            return ImplChoice("triton", "one kernel for all weights")
        return ImplChoice("reference", "torch's own operations, on any device")
    if requested not in IMPLS:
        raise RecipeError(
            f"unknown 8-bit AdamW implementation {requested!r}", f"choose one of {', '.join(IMPLS)}"
        )
    if requested != "reference" and not available:
        reason = "Triton is not installed" if device == "cuda" else f"this run is on {device}"
        raise RecipeError(
            f"optim_implementation: {requested} needs a CUDA device and Triton, but {reason}",
            "set optim_implementation: auto",
        )
    return ImplChoice(requested, "set in the recipe")
