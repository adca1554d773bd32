"""Rotary positions for queries and keys in one pass, with the norm of each head before it where a model has one.

    a, b = first and second half of a head           (numbers f and f + D/2 are a pair)
    out  = (a · cos − b · sin,  b · cos + a · sin)   with the cosines and sines of the token's position

With weights, each head is first normed: x · w / sqrt(mean x² + eps) (Qwen3's query and key norms). Turning back is
turning by the negative angle, so the backward of the plain form keeps nothing but cosines and sines.
"""

# B batch, T tokens, H query heads, K key heads, D head size, F = D / 2 frequencies

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.kernels.rope.spec import IMPLS

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLS", "rope"]


def rope(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    *,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned to their positions, new tensors of the same shape and dtype.

    Args:
        q_BTHD, k_BTKD: In one dtype.
        cos_BTF, sin_BTF: fp32 (or wider) of each token's position; no gradient flows to them.
        q_weight_D, k_weight_D: Weights of the norms over each head; both or neither.
        eps: Of the norms.
        impl: "reference" (torch) or "triton".

    Example:
        >>> import torch
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> quarter = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> rope(q, q, *quarter)[0].flatten()
        tensor([-3., -4.,  1.,  2.])
    """
    D = q_BTHD.shape[-1]
    assert D % 2 == 0, f"a head of {D} numbers has no halves"
    assert q_BTHD.shape[:2] == k_BTKD.shape[:2], f"{tuple(q_BTHD.shape)} against {tuple(k_BTKD.shape)}"
    assert k_BTKD.shape[-1] == D, f"heads of {D} against {k_BTKD.shape[-1]}"
    assert cos_BTF.shape == sin_BTF.shape == (*q_BTHD.shape[:2], D // 2), f"cos is {tuple(cos_BTF.shape)}"
    assert q_BTHD.dtype == k_BTKD.dtype, f"q is {q_BTHD.dtype}, k {k_BTKD.dtype}"
    assert (q_weight_D is None) == (k_weight_D is None), "norm both queries and keys, or neither"
    if impl == "reference":
        from trimtab.kernels.rope.impl_reference import rope as reference

        return reference(q_BTHD, k_BTKD, cos_BTF, sin_BTF, q_weight_D, k_weight_D, eps)
    elif impl == "triton":
        from trimtab.kernels.rope.impl_triton import rope as fused

        return fused(q_BTHD, k_BTKD, cos_BTF, sin_BTF, q_weight_D, k_weight_D, eps)
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(f"there is no rope called {impl!r}", f"use one of {', '.join(IMPLS)}")
