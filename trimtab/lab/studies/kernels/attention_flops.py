"""FLOPs of the parts of plain attention. Imports no torch.

Plain attention computes the whole score matrix and then masks the half above the diagonal, so nothing is halved here
for causality. With B sequences, H heads, T queries and keys, and heads of size D:

    scores   Q·Kᵀ      2·B·H·T²·D   one multiplication and one addition for each of D
    softmax            5·B·H·T²     maximum, subtraction, exponential, sum, division
    values   P·V       2·B·H·T²·D

Backward a product takes two, one for each factor's gradient, and the softmax, dS = P∘(dP − rowsum(P∘dP)), 4·B·H·T².
"""

from __future__ import annotations

from dataclasses import dataclass

SOFTMAX_FORWARD = 5
SOFTMAX_BACKWARD = 4


@dataclass(frozen=True)
class Flops:
    """Of one part: forward and backward."""

    forward: int
    backward: int


def product_flops(*, batch: int, heads: int, context: int, head_dim: int, layers: int = 1) -> Flops:
    """Of Q·Kᵀ, and of P·V, which has as many.

    Example:
        >>> product_flops(batch=4, heads=12, context=128, head_dim=64).forward
        100663296
    """
    forward = 2 * batch * heads * context**2 * head_dim * layers
    return Flops(forward, 2 * forward)


def softmax_flops(*, batch: int, heads: int, context: int, layers: int = 1) -> Flops:
    """Of the softmax of all rows.

    Example:
        >>> softmax_flops(batch=4, heads=12, context=128)
        Flops(forward=3932160, backward=3145728)
    """
    elements = batch * heads * context**2 * layers
    return Flops(SOFTMAX_FORWARD * elements, SOFTMAX_BACKWARD * elements)
