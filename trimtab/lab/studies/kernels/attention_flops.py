"""FLOPs of the parts of plain attention. Imports no torch.

Plain attention computes the full score matrix and then masks the half above the diagonal, so that causality does not
halve these counts. With B sequences, H heads, T queries and keys, and heads of size D:

    scores   Q·Kᵀ      2·B·H·T²·D   one multiplication and one addition for each of D
    softmax            5·B·H·T²     maximum, subtraction, exponential, sum, division
    values   P·V       2·B·H·T²·D

In backward each product needs two, one for each factor's gradient; the softmax, dS = P∘(dP − rowsum(P∘dP)), needs
4·B·H·T².
"""

from __future__ import annotations

from dataclasses import dataclass

SOFTMAX_FORWARD = 5
SOFTMAX_BACKWARD = 4


@dataclass(frozen=True)
class Flops:
    """FLOPs of one part, forward and backward."""

    forward: int
    backward: int


def product_flops(*, batch: int, heads: int, context: int, head_dim: int, layers: int = 1) -> Flops:
    """FLOPs of Q·Kᵀ; P·V has the same number.

    Example:
        >>> product_flops(batch=4, heads=12, context=128, head_dim=64).forward
        100663296
    """
    forward = 2 * batch * heads * context**2 * head_dim * layers
    return Flops(forward, 2 * forward)


def softmax_flops(*, batch: int, heads: int, context: int, layers: int = 1) -> Flops:
    """FLOPs of the softmax of all rows.

    Example:
        >>> softmax_flops(batch=4, heads=12, context=128)
        Flops(forward=3932160, backward=3145728)
    """
    elements = batch * heads * context**2 * layers
    return Flops(SOFTMAX_FORWARD * elements, SOFTMAX_BACKWARD * elements)
