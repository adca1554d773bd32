"""RoPE for queries and keys in one kernel, fused with query and key norms if a model has them.

    a, b = elements f and f + R/2 of a head, or 2 f and 2 f + 1 where pairs are interleaved
    out  = (a · cos − b · sin,  b · cos + a · sin)   with the cosines and sines of the token's position

The first R of a head's D elements are rotated, all of them in most models; the rest passes through. With weights,
each head is normalized first: x · (w + offset) / sqrt(mean x² + eps) (query and key norms of Qwen3 and Gemma 3), or
all heads of a token together (OLMo 2). The inverse of a rotation is the rotation by the negative angle, so the
backward without norms saves nothing but cosines and sines.
"""

# B batch, T tokens, H query heads, K key heads, D head size, R rotated elements per head, F = R / 2 frequencies

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
    offset: float = 0.0,
    norm_all_heads: bool = False,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies RoPE to queries and keys; returns new tensors of the same shape and dtype.

    Args:
        q_BTHD, k_BTKD: Queries and keys, in the same dtype.
        cos_BTF, sin_BTF: Cosines and sines of each token's position, in fp32 or wider; not differentiated.
        q_weight_D, k_weight_D: Weights of the norms; both or neither. [D] for a norm over each head, [H·D] and [K·D]
            for one over all heads.
        eps: Epsilon of the norms.
        offset: Added to the weights in fp32 or wider (1 in Gemma).
        norm_all_heads: Whether one norm is over the elements of all heads of a token (OLMo 2).
        rotary_dim: R, even; all D elements of a head if not given.
        interleaved: Whether pairs are neighbours (GLM, GPT-J), not R/2 apart.
        impl: "reference" (torch) or "triton".

    Example:
        >>> import torch
        >>> q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
        >>> quarter = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> rope(q, q, *quarter)[0].flatten()
        tensor([-3., -4.,  1.,  2.])
        >>> rope(q, q, *quarter, interleaved=True)[0].flatten()
        tensor([-2.,  1., -4.,  3.])
    """
    _check(q_BTHD, k_BTKD, cos_BTF, sin_BTF, rotary_dim)
    _check_weights(q_BTHD, k_BTKD, q_weight_D, k_weight_D, norm_all_heads)
    norm = q_weight_D, k_weight_D, eps, offset, norm_all_heads
    if impl == "reference":
        from trimtab.kernels.rope.impl_reference import rope as reference

        return reference(q_BTHD, k_BTKD, cos_BTF, sin_BTF, *norm, interleaved)
    elif impl == "triton":
        from trimtab.kernels.rope.impl_triton import rope as fused

        return fused(q_BTHD, k_BTKD, cos_BTF, sin_BTF, *norm, interleaved)
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(f"unknown RoPE implementation {impl!r}", f"use one of {', '.join(IMPLS)}")


def _check(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    rotary_dim: int | None,
) -> None:
    D = q_BTHD.shape[-1]
    R = D if rotary_dim is None else rotary_dim
    assert D % 2 == 0, f"head size {D} is odd"
    assert R % 2 == 0, f"rotary_dim {R} is odd"
    assert 0 < R <= D, f"rotary_dim {R} is not within 1…{D}"
    assert q_BTHD.shape[:2] == k_BTKD.shape[:2], f"{tuple(q_BTHD.shape)} against {tuple(k_BTKD.shape)}"
    assert k_BTKD.shape[-1] == D, f"heads of {D} against {k_BTKD.shape[-1]}"
    assert cos_BTF.shape == sin_BTF.shape == (*q_BTHD.shape[:2], R // 2), f"cos is {tuple(cos_BTF.shape)}"
    assert q_BTHD.dtype == k_BTKD.dtype, f"q is {q_BTHD.dtype}, k {k_BTKD.dtype}"


def _check_weights(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    norm_all_heads: bool,
) -> None:
    assert (q_weight is None) == (k_weight is None), "norm both queries and keys, or neither"
    for x, weight in ((q_BTHD, q_weight), (k_BTKD, k_weight)):
        width = x.shape[2] * x.shape[3] if norm_all_heads else x.shape[3]
        assert weight is None or weight.shape == (width,), (
            f"weights {tuple(weight.shape)} for {width} elements"
        )
