"""y = W·x + s·B·(A·x) and its gradients; saves only x and A·x.

    dh = s · dy·B        dA = dhᵀ·x        dB = s · dyᵀ·h        dx = dy·W + dh·A

All products run in x's dtype: A and B, usually fp32, are cast when they are used (they are small) and the casts are not
saved. dx is accumulated in place, so that no second [N, in] is allocated. With dropout the backward pass recomputes the
mask from its key, and neither the mask nor the dropped x is saved.
"""

# N tokens, I input features, O output features, R rank

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from trimtab.adapt.lora_dropout import apply_dropout
from trimtab.facts.errors import RecipeError
from trimtab.model.labels import with_factor


def _times_a(x_NI: torch.Tensor, a_RI: torch.Tensor) -> torch.Tensor:
    """h [N, R] = x·Aᵀ in x's dtype."""
    with with_factor("adapter_a"):
        return x_NI @ a_RI.to(x_NI.dtype).t()


def _plus_times_b(y_NO: torch.Tensor, h_NR: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """y + s·h·Bᵀ, not in place."""
    with with_factor("adapter_b"):
        return torch.addmm(y_NO, h_NR, b_OR.t(), alpha=scaling)


class _Linear(torch.autograd.Function):
    """The layer and its adapter together, for a frozen weight [O, I]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        bias_O = None if bias_O is None else bias_O.to(x.dtype)
        y_NO = F.linear(x_NI, weight_OI.to(x.dtype), bias_O)
        h_NR = _times_a(x_NI, a_RI)
        # Not in place: a recompute policy may have saved the frozen weight's product.
        y_NO = _plus_times_b(y_NO, h_NR, b_OR.to(x.dtype), scaling)
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR, h_NR)
        ctx.scaling = scaling
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight_OI, a_RI, b_OR, h_NR = ctx.saved_tensors
        dy_NO = grads[0].reshape(-1, grads[0].shape[-1])
        dh_NR = (dy_NO @ b_OR.to(dy_NO.dtype)).mul_(ctx.scaling)
        da_RI, db_OR = _factor_gradients(x.reshape(-1, x.shape[-1]), h_NR, dy_NO, dh_NR, ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx_NI = dy_NO @ weight_OI.to(dy_NO.dtype)
            dx = dx_NI.addmm_(dh_NR, a_RI.to(dy_NO.dtype)).view(x.shape)
        return dx, None, None, da_RI.to(a_RI.dtype), db_OR.to(b_OR.dtype), None


class _Added(torch.autograd.Function):
    """Adds an adapter's output to the output `y` of a layer that has its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        h_NR = _times_a(x_NI, a_RI)
        y_NO = _plus_times_b(y.reshape(-1, y.shape[-1]), h_NR, b_OR.to(x.dtype), scaling)
        ctx.save_for_backward(x, a_RI, b_OR, h_NR)
        ctx.scaling = scaling
        return y_NO.view(y.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, a_RI, b_OR, h_NR = ctx.saved_tensors
        dy_NO = grads[0].reshape(-1, grads[0].shape[-1])
        dh_NR = (dy_NO @ b_OR.to(dy_NO.dtype)).mul_(ctx.scaling)
        da_RI, db_OR = _factor_gradients(x.reshape(-1, x.shape[-1]), h_NR, dy_NO, dh_NR, ctx.scaling)
        dx = (dh_NR @ a_RI.to(dy_NO.dtype)).view(x.shape) if ctx.needs_input_grad[1] else None
        return grads[0], dx, da_RI.to(a_RI.dtype), db_OR.to(b_OR.dtype), None


class _AddedDropped(torch.autograd.Function):
    """Like `_Added`, with dropout of probability `p` on x."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        key_5: torch.Tensor,
        scaling: float,
        p: float,
    ) -> torch.Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        h_NR = _times_a(apply_dropout(x_NI, key_5, p), a_RI)
        y_NO = _plus_times_b(y.reshape(-1, y.shape[-1]), h_NR, b_OR.to(x.dtype), scaling)
        # Saved by value: the training loop writes the next microbatch's key into the same tensor.
        ctx.save_for_backward(x, a_RI, b_OR, h_NR, key_5.clone())
        ctx.scaling, ctx.p = scaling, p
        return y_NO.view(y.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, a_RI, b_OR, h_NR, key_5 = ctx.saved_tensors
        dy_NO = grads[0].reshape(-1, grads[0].shape[-1])
        dh_NR = (dy_NO @ b_OR.to(dy_NO.dtype)).mul_(ctx.scaling)
        dropped_NI = apply_dropout(x.reshape(-1, x.shape[-1]), key_5, ctx.p)
        da_RI, db_OR = _factor_gradients(dropped_NI, h_NR, dy_NO, dh_NR, ctx.scaling)
        del dropped_NI  # before two more of its size are allocated
        dx = None
        if ctx.needs_input_grad[1]:
            dx = apply_dropout(dh_NR @ a_RI.to(dy_NO.dtype), key_5, ctx.p).view(x.shape)
        return grads[0], dx, da_RI.to(a_RI.dtype), db_OR.to(b_OR.dtype), None, None, None


def _factor_gradients(
    x_NI: torch.Tensor, h_NR: torch.Tensor, dy_NO: torch.Tensor, dh_NR: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return dh_NR.t() @ x_NI, (dy_NO.t() @ h_NR).mul_(scaling)


def lora_linear(
    x: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """A frozen linear layer with an adapter: [..., I] → [..., O] in x's dtype; differentiable in x, A and B.

    Example:
        >>> x, weight, a, b = torch.ones(1, 4), torch.zeros(3, 4), torch.ones(2, 4), torch.ones(3, 2)
        >>> lora_linear(x, weight, None, a, b, 0.5)
        tensor([[4., 4., 4.]])
    """
    y: torch.Tensor = _Linear.apply(x, weight_OI, bias_O, a_RI, b_OR, scaling)
    return y


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    scaling: float,
    *,
    p: float = 0.0,
    key_5: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns y + s·B·(A·x) for a layer's output y [..., O] and input x [..., I], with dropout of probability `p` on x.

    Example:
        >>> add_lora(torch.zeros(1, 3), torch.ones(1, 4), torch.ones(2, 4), torch.ones(3, 2), 0.5)
        tensor([[4., 4., 4.]])
    """
    if p:
        if key_5 is None:
            raise RecipeError(
                "adapters with dropout require masks before the first step",
                "masks = trimtab.adapt.create_dropout_masks(decoder, device), then masks.set(seed, step, "
                "first_sequence, tokens) before each microbatch",
            )
        out: torch.Tensor = _AddedDropped.apply(y, x, a_RI, b_OR, key_5, scaling, p)
        return out
    out = _Added.apply(y, x, a_RI, b_OR, scaling)
    return out
