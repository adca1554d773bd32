"""Loss and gradients from a part of the logits at a time, in plain torch, in one of two ways.

Small vocabularies: gradients are computed in the forward, while a chunk of rows has its logits. Three
products, as many as plain autograd; the backward only scales by the upstream gradient.

Large ones, and losses by token (whose upstream gradients are not known in the forward): the backward computes
the logits again, a block of the vocabulary at a time, so that each part of weight's gradient is finished and
written once. Four products, but nothing is kept beside a number a token, and there is no fp32 copy of
weight's gradient to add to.
"""

# N tokens, n tokens of a chunk, C hidden size, V vocabulary, v entries of a block

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.linear_cross_entropy import spec


def chunked(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    ignore_index: int,
    reduction: str,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """See `trimtab.kernels.linear_cross_entropy.linear_cross_entropy`."""
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows = max(min(chunk_tokens or spec.chunk_tokens(N, V), N), 1)
    kept_N = labels_N != ignore_index
    labels_N = torch.where(kept_N, labels_N, 0)
    inputs = (hidden_NC, weight_VC, bias_V, labels_N, kept_N, rows)
    needs_grad = any(x is not None and x.requires_grad for x in inputs[:3])
    if not (needs_grad and torch.is_grad_enabled()):
        losses_N = _losses(*inputs)[0]
    elif spec.recomputes(V, reduction):
        losses_N = _Recomputed.apply(*inputs, _gradient_dtype(weight_VC))
    else:
        total = _Summed.apply(*inputs, _gradient_dtype(weight_VC))
        return total if reduction == "sum" else total / kept_N.sum().clamp(min=1)
    if reduction == "none":
        return losses_N
    return losses_N.sum() if reduction == "sum" else losses_N.sum() / kept_N.sum().clamp(min=1)


def _gradient_dtype(weight_VC: torch.Tensor) -> torch.dtype:
    """What weight's gradient is accumulated in: a 16-bit parameter may ask for fp32 (`Tensor.grad_dtype`)."""
    if torch.compiler.is_compiling() or not weight_VC.is_leaf:
        return weight_VC.dtype
    return weight_VC.grad_dtype or weight_VC.dtype


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _wide(x: torch.Tensor) -> torch.dtype:
    """fp32 for what is summed or exponentiated; fp64 stays fp64."""
    return torch.promote_types(x.dtype, torch.float32)


class _Rows:
    """Log-probabilities of one chunk of rows after another, in buffers that all chunks share.

    Shared, because on a CPU fresh memory for every chunk costs page faults, as much as its softmax.
    """

    def __init__(
        self, hidden_NC: torch.Tensor, weight_VC: torch.Tensor, bias_V: torch.Tensor | None, rows: int
    ) -> None:
        self.hidden_NC, self.weight_VC, self.bias_V = hidden_NC, weight_VC, bias_V
        self.logits = hidden_NC.new_empty(rows, weight_VC.shape[0])
        self.logp = hidden_NC.new_empty(rows, weight_VC.shape[0], dtype=_wide(hidden_NC))

    def __call__(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits_nV, logp_nV) of a chunk; the next call overwrites them."""
        h_nC = self.hidden_NC[part]
        logits_nV, logp_nV = self.logits[: h_nC.shape[0]], self.logp[: h_nC.shape[0]]
        if self.bias_V is None:
            torch.mm(h_nC, self.weight_VC.t(), out=logits_nV)
        else:
            torch.addmm(self.bias_V, h_nC, self.weight_VC.t(), out=logits_nV)
        torch.log_softmax(logits_nV, dim=-1, dtype=logp_nV.dtype, out=logp_nV)
        return logits_nV, logp_nV


def _losses(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    kept_N: torch.Tensor,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss_N, 0 where ignored; lse_N, the log of the sum of exponentials)."""
    walk = _Rows(hidden_NC, weight_VC, bias_V, rows)
    picked_N2 = hidden_NC.new_empty(2, hidden_NC.shape[0], dtype=_wide(hidden_NC))
    for part in _parts(hidden_NC.shape[0], rows):
        for values_nV, place_N in zip(walk(part), picked_N2, strict=True):
            place_N[part] = values_nV.gather(1, labels_N[part, None])[:, 0]
    logit_N, logp_N = picked_N2
    return torch.where(kept_N, -logp_N, 0.0), logit_N - logp_N


class _Summed(torch.autograd.Function):
    """Σ loss_n, its gradients computed with it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        kept_N: torch.Tensor,
        rows: int,
        weight_gradient_dtype: torch.dtype,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        (N, C), V, wide = hidden_NC.shape, weight_VC.shape[0], _wide(hidden_NC)
        grad_hidden_NC = torch.empty_like(hidden_NC) if needs_hidden else None
        grad_weight_VC = hidden_NC.new_zeros(V, C, dtype=wide) if needs_weight else None
        grad_bias_V = hidden_NC.new_zeros(V, dtype=wide) if needs_bias else None
        losses_N = hidden_NC.new_empty(N, dtype=wide)
        walk = _Rows(hidden_NC, weight_VC, bias_V, rows)
        for part in _parts(N, rows):
            logits_nV, logp_nV = walk(part)
            kept_n = kept_N[part]
            picked_n = logp_nV.gather(1, labels_N[part, None])[:, 0]
            losses_N[part] = torch.where(kept_n, -picked_n, 0.0)
            # ∂loss/∂logits = p − [label]; at the label that is expm1(log p), exact where p is nearly 1.
            d_nV = torch.exp(logp_nV, out=logp_nV if logits_nV.dtype == wide else logits_nV)
            d_nV.scatter_(1, labels_N[part, None], torch.expm1(picked_n)[:, None].to(d_nV.dtype))
            if grad_hidden_NC is not None:
                torch.mm(d_nV, weight_VC, out=grad_hidden_NC[part])
            if grad_weight_VC is not None:
                # An ignored token is left out by its hidden state: n × C numbers instead of n × V.
                h_nC = hidden_NC[part].masked_fill(~kept_n[:, None], 0.0)
                if d_nV.dtype == wide:
                    grad_weight_VC.addmm_(d_nV.t(), h_nC)
                else:
                    grad_weight_VC.add_(d_nV.t() @ h_nC)
            if grad_bias_V is not None:
                grad_bias_V.add_(d_nV.t() @ kept_n.to(d_nV.dtype))
        if grad_hidden_NC is not None:
            grad_hidden_NC.masked_fill_(~kept_N[:, None], 0.0)
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC, grad_bias_V)
        ctx.weight_gradient_dtype = weight_gradient_dtype
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, weight_VC, bias_V = ctx.saved_tensors
        # Never in place: the same graph may be walked again (retain_graph).
        if hidden_NC is not None:
            hidden_NC = (hidden_NC * upstream[0]).to(hidden_NC.dtype)
        if weight_VC is not None:
            scaled_VC = torch.empty_like(weight_VC, dtype=ctx.weight_gradient_dtype)
            weight_VC = torch.mul(weight_VC, upstream[0], out=scaled_VC)
        if bias_V is not None:
            bias_V = bias_V * upstream[0]
        return hidden_NC, weight_VC, bias_V, None, None, None, None


class _Recomputed(torch.autograd.Function):
    """loss_N; the backward walks over the vocabulary and computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        kept_N: torch.Tensor,
        rows: int,
        weight_gradient_dtype: torch.dtype,
    ) -> torch.Tensor:
        losses_N, lse_N = _losses(hidden_NC, weight_VC, bias_V, labels_N, kept_N, rows)
        ctx.save_for_backward(hidden_NC, weight_VC, bias_V, labels_N, kept_N, losses_N, lse_N)
        ctx.rows, ctx.weight_gradient_dtype = rows, weight_gradient_dtype
        return losses_N

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, weight_VC, bias_V, labels_N, kept_N, losses_N, lse_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        (N, C), V, wide = hidden_NC.shape, weight_VC.shape[0], _wide(hidden_NC)
        upstream_N = torch.where(kept_N, upstream[0], 0.0)
        at_label_N = torch.expm1(-losses_N) * upstream_N  # (p − 1) · upstream, exact where p is nearly 1
        grad_hidden_NC = hidden_NC.new_zeros(N, C, dtype=wide) if needs_hidden else None
        grad_weight_VC = (
            torch.empty_like(weight_VC, dtype=ctx.weight_gradient_dtype) if needs_weight else None
        )
        grad_bias_V = hidden_NC.new_empty(V, dtype=wide) if needs_bias else None

        size = spec.block_entries(ctx.rows, N, V)
        logits, exponents = hidden_NC.new_empty(N * size), hidden_NC.new_empty(N * size, dtype=wide)
        for part in _parts(V, size):
            w_vC = weight_VC[part]
            logits_Nv = logits[: N * w_vC.shape[0]].view(N, w_vC.shape[0])
            p_Nv = exponents[: logits_Nv.numel()].view(logits_Nv.shape)
            if bias_V is None:
                torch.mm(hidden_NC, w_vC.t(), out=logits_Nv)
            else:
                torch.addmm(bias_V[part], hidden_NC, w_vC.t(), out=logits_Nv)
            torch.sub(logits_Nv, lse_N[:, None], out=p_Nv).exp_()
            d_Nv = torch.mul(p_Nv, upstream_N[:, None], out=logits_Nv)
            inside_N = (labels_N >= part.start) & (labels_N < part.stop)
            column_N1 = torch.where(inside_N, labels_N - part.start, 0)[:, None]
            here_N = torch.where(inside_N, at_label_N.to(d_Nv.dtype), d_Nv[:, 0])
            d_Nv.scatter_(1, column_N1, here_N[:, None])
            if grad_hidden_NC is not None:
                if d_Nv.dtype == wide:
                    grad_hidden_NC.addmm_(d_Nv, w_vC)
                else:
                    grad_hidden_NC.add_(d_Nv @ w_vC)
            if grad_weight_VC is not None:
                if grad_weight_VC.dtype == d_Nv.dtype:
                    torch.mm(d_Nv.t(), hidden_NC, out=grad_weight_VC[part])
                else:
                    grad_weight_VC[part] = d_Nv.t() @ hidden_NC
            if grad_bias_V is not None:
                grad_bias_V[part] = d_Nv.sum(0, dtype=wide)
        if grad_hidden_NC is not None:
            grad_hidden_NC = grad_hidden_NC.to(hidden_NC.dtype)
        return grad_hidden_NC, grad_weight_VC, grad_bias_V, None, None, None, None
