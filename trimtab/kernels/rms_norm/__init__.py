"""RMSNorm over the last dimension, alone or fused with the residual addition before or after it.

h   = x + residual                                   (rounded to x's dtype; h = x without a residual)
r_n = 1 / sqrt(mean_d h_nd² + eps)
y_nd = h_nd · r_n · (w_d + offset)                   (fp32 or wider inside, rounded once; offset 1 in Gemma, else 0)

∂L/∂w_d  = Σ_n g_nd · h_nd · r_n                                                 with g = ∂L/∂y
∂L/∂h_nd = r_n · (g_nd w_d − h_nd r_n · mean_e(g_ne w_e h_ne r_n)) + the gradient of h from its other uses

In the gradients w stands for w + offset.

Where a model normalizes a branch before the residual addition (Gemma 2 and 3, OLMo 2): h = residual + norm₁(branch),
then norm₂(h).
"""

# N rows (any leading shape), D elements per row

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.kernels.rms_norm.spec import IMPLS

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLS", "add_rms_norm", "norm_add", "norm_add_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, *, offset: float = 0.0, impl: str = "reference"
) -> torch.Tensor:
    """x / rms(x) · (weight + offset) over the last axis, computed in fp32 or wider and rounded once.

    Args:
        x: […, D].
        weight_D: [D], in x's dtype or wider (fp32 weights under 16-bit activations).
        eps: Added to the mean square.
        offset: Added to the weights, in fp32 or wider; Gemma's norms multiply by 1 + weight.
        impl: "reference" (torch) or "triton".

    Returns:
        […, D] in x's dtype.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
        tensor([[0.8485, 2.2627]])
    """
    _check(x, weight_D)
    if impl == "reference":
        from trimtab.kernels.rms_norm.impl_reference import rms_norm as reference

        return reference(x, weight_D, eps, offset)
    elif impl == "triton":
        from trimtab.kernels.rms_norm.impl_triton import rms_norm as fused

        return fused(x, weight_D, eps, offset)
    else:
        raise _unknown_impl_error(impl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of h, h) with h = x + residual: the residual addition and the norm that follows it.

    Args:
        x, residual: […, D], the same shape and dtype; a layer's output and the residual stream.
        weight_D, eps, offset, impl: As for `rms_norm`.

    Example:
        >>> import torch
        >>> add_rms_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.ones(2), 0.0)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    _check(x, weight_D)
    _check_residual(x, residual)
    if impl == "reference":
        from trimtab.kernels.rms_norm.impl_reference import add_rms_norm as reference

        return reference(x, residual, weight_D, eps, offset)
    elif impl == "triton":
        from trimtab.kernels.rms_norm.impl_triton import add_rms_norm as fused

        return fused(x, residual, weight_D, eps, offset)
    else:
        raise _unknown_impl_error(impl)


def norm_add(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    impl: str = "reference",
) -> torch.Tensor:
    """residual + norm(branch): a branch is normalized before the residual addition.

    Args:
        branch, residual: […, D], the same shape and dtype; the branch's output and the residual stream.
        weight_D, eps, offset, impl: As for `rms_norm`.

    Example:
        >>> import torch
        >>> norm_add(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(2), 0.0)
        tensor([[1.8485, 2.1314]])
    """
    _check(branch, weight_D)
    _check_residual(branch, residual)
    if impl == "reference":
        from trimtab.kernels.rms_norm.impl_reference import norm_add as reference

        return reference(branch, residual, weight_D, eps, offset)
    elif impl == "triton":
        from trimtab.kernels.rms_norm.impl_triton_branch import norm_add as fused

        return fused(branch, residual, weight_D, eps, offset)
    else:
        raise _unknown_impl_error(impl)


def norm_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    next_weight_D: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    impl: str = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of h, h) with h = residual + norm(branch): `norm_add` and the norm that follows it.

    Args:
        branch, residual: As for `norm_add`.
        weight_D, next_weight_D: [D], of the branch's norm and of the one that follows; eps and offset are the same.
        eps, offset, impl: As for `rms_norm`.

    Example:
        >>> import torch
        >>> branch, stream = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])
        >>> norm_add_norm(branch, stream, torch.ones(2), 2 * torch.ones(2), 0.0)
        (tensor([[1.6971, 2.2627]]), tensor([[0.8485, 1.1314]]))
    """
    _check(branch, weight_D)
    _check(branch, next_weight_D)
    _check_residual(branch, residual)
    if impl == "reference":
        from trimtab.kernels.rms_norm.impl_reference import norm_add_norm as reference

        return reference(branch, residual, weight_D, next_weight_D, eps, offset)
    elif impl == "triton":
        from trimtab.kernels.rms_norm.impl_triton_branch import norm_add_norm as fused

        return fused(branch, residual, weight_D, next_weight_D, eps, offset)
    else:
        raise _unknown_impl_error(impl)


def _check(x: torch.Tensor, weight_D: torch.Tensor) -> None:
    assert weight_D.shape == x.shape[-1:], f"rows of {tuple(x.shape)}, weights {tuple(weight_D.shape)}"


def _check_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    assert x.shape == residual.shape, f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"x is {x.dtype}, residual {residual.dtype}"


def _unknown_impl_error(impl: str) -> Exception:
    from trimtab.facts.errors import ModelError

    return ModelError(f"unknown RMSNorm implementation {impl!r}", f"use one of {', '.join(IMPLS)}")
