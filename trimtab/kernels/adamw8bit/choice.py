"""Which 8-bit AdamW runs, decided once, with the reason. No torch."""

from __future__ import annotations

from typing import NamedTuple

from trimtab.facts.errors import RecipeError
from trimtab.kernels.adamw8bit.spec import IMPLS


class Choice(NamedTuple):
    """The implementation and why it."""

    impl: str
    reason: str


def choose(*, device: str, triton: bool = True, requested: str = "auto") -> Choice:
    """Picks the implementation, or confirms the one asked for; one that cannot run is an error.

    Example:
        >>> choose(device="cpu").impl, choose(device="cuda").impl
        ('reference', 'triton')
    """
    available = device == "cuda" and triton
    if requested == "auto":
        if available:
            return Choice("triton", "one kernel for all weights")
        return Choice("reference", "torch's own operations, on any device")
    if requested not in IMPLS:
        raise RecipeError(f"there is no 8-bit AdamW {requested!r}", f"choose one of {', '.join(IMPLS)}")
    if requested != "reference" and not available:
        lacking = "Triton is not installed" if device == "cuda" else f"this run is on the {device}"
        raise RecipeError(
            f"optim_implementation: {requested} needs a CUDA device and Triton, and {lacking}",
            "set optim_implementation: auto",
        )
    return Choice(requested, "named in the recipe")
