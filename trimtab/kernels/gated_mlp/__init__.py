"""The gated activation of a feed-forward layer: act(gate) · up, one kernel in each direction.

    SwiGLU: act(x) = x · σ(x)                          GeGLU: act(x) = x · Φ(x), or its tanh form
    ∂L/∂up = g · act(gate)                             ∂L/∂gate = g · up · act'(gate)

Only gate and up are saved for the backward pass, which recomputes act(gate); plain torch also saves act(gate).
"""

# gate and up have the same, arbitrary shape

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.kernels.gated_mlp.spec import ACTIVATIONS, IMPLS

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATIONS", "IMPLS", "gated_activation"]


def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    impl: str = "reference",
    overwrite_inputs: bool = False,
) -> torch.Tensor:
    """Computes act(gate) · up, elementwise.

    Args:
        gate, up: The same shape and dtype; views into the output of one fused projection are not copied.
        activation: "silu" (SwiGLU), which trimtab's decoder uses; "gelu_tanh" or "gelu" (GeGLU) for models that users
            write themselves; no recipe uses them.
        impl: "reference" (torch) or "triton" (fp32 inside, rounded once).
        overwrite_inputs: Whether the backward pass of "triton" may write the gradients over gate and up, which lowers
            the peak by one tensor of this shape. For activation checkpointing, where gate and up are recomputed for a
            single backward pass and nothing else reads them; a second backward pass over the same tensors raises.
            Views of one tensor and traced tensors are never overwritten. "reference" ignores this option.

    Returns:
        A contiguous tensor of that shape and dtype.

    Example:
        >>> import torch
        >>> gated_activation(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 3.0]))
        tensor([0.0000, 5.2848])
    """
    from trimtab.facts.errors import ModelError

    assert gate.shape == up.shape, f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}"
    assert gate.dtype == up.dtype, f"gate is {gate.dtype}, up {up.dtype}"
    if activation not in ACTIVATIONS:
        raise ModelError(f"unknown activation {activation!r}", f"use one of {', '.join(ACTIVATIONS)}")
    if impl == "reference":
        from trimtab.kernels.gated_mlp.impl_reference import gated_activation as reference

        return reference(gate, up, activation)
    elif impl == "triton":
        from trimtab.kernels.gated_mlp.impl_triton import gated_activation as fused

        return fused(gate, up, activation, overwrite_inputs)
    else:
        raise ModelError(
            f"unknown gated activation implementation {impl!r}", f"use one of {', '.join(IMPLS)}"
        )
