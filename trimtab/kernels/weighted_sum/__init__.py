"""A weighted sum over each row: the smallest operation here, and the template for a new one.

For contributors who read or copy it (docs/writing-a-kernel.md); no recipe and no model uses it.

y_n = Σ_d x_nd · w_d
∂L/∂x_nd = g_n · w_d            ∂L/∂w_d = Σ_n g_n · x_nd            with g = ∂L/∂y
"""

# N rows (any leading shape), D elements per row

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.kernels.weighted_sum.spec import IMPLS

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLS", "weighted_sum"]


def weighted_sum(x_ND: torch.Tensor, w_D: torch.Tensor, *, impl: str = "reference") -> torch.Tensor:
    """Computes Σ_d x[…, d] · w[d], accumulated in fp32 or wider and rounded once.

    Args:
        x_ND: […, D], any strides.
        w_D: [D], in x's dtype.
        impl: "reference" (torch) or "triton".

    Returns:
        […], in x's dtype.

    Example:
        >>> import torch
        >>> weighted_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 1.0]))
        tensor([12., 34.])
    """
    assert w_D.shape == x_ND.shape[-1:], f"rows of {tuple(x_ND.shape)}, weights {tuple(w_D.shape)}"
    assert x_ND.dtype == w_D.dtype, f"x is {x_ND.dtype}, w {w_D.dtype}"
    if impl == "reference":
        from trimtab.kernels.weighted_sum.impl_reference import reference

        return reference(x_ND, w_D)
    elif impl == "triton":
        from trimtab.kernels.weighted_sum.impl_triton import weighted_sum as triton_version

        return triton_version(x_ND, w_D)
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(f"unknown weighted sum implementation {impl!r}", f"use one of {', '.join(IMPLS)}")
