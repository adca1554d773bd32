"""Loss and gradients in plain torch from a part of the logits at a time, with one of two strategies.

Small vocabularies: the forward pass computes gradients while a chunk's logits are live. Three products, as many as
plain autograd; the backward pass only scales by the upstream gradient.

Large vocabularies, and losses per token (whose upstream gradients are not known in the forward pass): the backward pass
recomputes the logits, one block of the vocabulary at a time, so that each part of weight's gradient is computed and
written once. Four products, but only a log-sum-exp per token is saved, and no fp32 accumulator for weight's gradient is
needed.
"""

# N tokens, n tokens of a chunk, C hidden size, V vocabulary, v entries of a block

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.linear_cross_entropy import spec
from trimtab.kernels.linear_cross_entropy.objective import Objective


def chunked(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    objective: Objective,
    *,
    ignore_index: int,
    by_token: bool,
    chunk_tokens: int | None,
    weight_gradient_dtype: torch.dtype,
) -> torch.Tensor:
    """Σ weight · loss, or one per token where `by_token`. See `linear_cross_entropy`."""
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows = max(min(chunk_tokens or spec.chunk_tokens(N, V), N), 1)
    kept_N = labels_N != ignore_index
    labels_N = torch.where(kept_N, labels_N, 0)
    inputs = (hidden_NC, weight_VC, bias_V, labels_N, kept_N, weights_N, objective, rows)
    needs_grad = any(x is not None and x.requires_grad for x in inputs[:3])
    if not (needs_grad and torch.is_grad_enabled()):
        losses_N = _losses(*inputs)[0]
    elif spec.recomputes(V, "none" if by_token else "sum"):
        losses_N = _Recomputed.apply(*inputs, weight_gradient_dtype)
    else:
        total: torch.Tensor = _Summed.apply(*inputs, weight_gradient_dtype)
        return total
    return losses_N if by_token else losses_N.sum()


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _wide(x: torch.Tensor) -> torch.dtype:
    """The dtype of reductions and exponentials: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


class _LogProbabilities:
    """Computes log-probabilities chunk by chunk, in buffers that all chunks share.

    On a CPU, newly allocated memory for every chunk would cost page faults, as much time as its softmax.
    """

    def __init__(
        self,
        hidden_NC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        objective: Objective,
        rows: int,
    ) -> None:
        self.weight_VC, self.bias_V, self.objective = weight_VC, bias_V, objective
        self.raw = hidden_NC.new_empty(rows, weight_VC.shape[0])
        self.logp = hidden_NC.new_empty(rows, weight_VC.shape[0], dtype=_wide(hidden_NC))

    def __call__(self, h_nC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (raw_nV, logp_nV) of a chunk; raw are logits before the softcap. The next call overwrites them."""
        raw_nV, logp_nV = self.raw[: h_nC.shape[0]], self.logp[: h_nC.shape[0]]
        _logits(h_nC, self.weight_VC, self.bias_V, raw_nV)
        if self.objective.softcap:
            _capped(raw_nV, self.objective.softcap, out=logp_nV)
            logp_nV.sub_(logp_nV.amax(-1, keepdim=True))
            logp_nV.sub_(logp_nV.exp().sum(-1, keepdim=True).log_())
        else:
            torch.log_softmax(raw_nV, dim=-1, dtype=logp_nV.dtype, out=logp_nV)
        return raw_nV, logp_nV

    def statistics(
        self, raw_nV: torch.Tensor, logp_nV: torch.Tensor, labels_n: torch.Tensor
    ) -> tuple[Any, Any, Any]:
        """Returns (loss_n, logp_n at the label, lse_n)."""
        logp_n = logp_nV.gather(1, labels_n[:, None])[:, 0]
        logit_n = raw_nV.gather(1, labels_n[:, None])[:, 0]
        if self.objective.softcap:
            logit_n = _capped(logit_n, self.objective.softcap, out=torch.empty_like(logp_n))
        lse_n = logit_n - logp_n
        loss_n = -logp_n
        if self.objective.label_smoothing:
            loss_n = loss_n + self.objective.label_smoothing * (logp_n - logp_nV.mean(-1))
        if self.objective.z_loss:
            loss_n = loss_n + self.objective.z_loss * lse_n.square()
        return loss_n, logp_n, lse_n


def _logits(
    h_nC: torch.Tensor, w_vC: torch.Tensor, bias_v: torch.Tensor | None, out_nv: torch.Tensor
) -> None:
    if bias_v is None:
        torch.mm(h_nC, w_vC.t(), out=out_nv)
    else:
        torch.addmm(bias_v, h_nC, w_vC.t(), out=out_nv)


def _capped(raw: torch.Tensor, softcap: float, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(raw).div_(softcap).tanh_().mul_(softcap)


def _at_label(objective: Objective, V: int, logp_n: torch.Tensor, lse_n: torch.Tensor) -> torch.Tensor:
    """∂loss/∂z at the label. p − 1 is expm1(log p): accurate where p is nearly 1."""
    at_label_n = torch.expm1(logp_n)
    if objective.z_loss:
        at_label_n = at_label_n + 2 * objective.z_loss * lse_n * logp_n.exp()
    return at_label_n + objective.label_smoothing * (1 - 1 / V)


def _gradient_(
    raw_nv: torch.Tensor,
    logp_nv: torch.Tensor,
    objective: Objective,
    V: int,
    lse_n: torch.Tensor,
    column_n: torch.Tensor,
    at_label_n: torch.Tensor,
    scale_n: torch.Tensor | None,
) -> torch.Tensor:
    """scale · ∂loss/∂raw in raw's dtype, in place of raw or logp. A column of −1: the label is outside this block."""
    same = raw_nv.dtype == logp_nv.dtype
    plain = scale_n is None and objective == Objective()
    d_nv = torch.exp(logp_nv, out=raw_nv if plain and not same else logp_nv)
    if objective.z_loss:
        d_nv.mul_((1 + 2 * objective.z_loss * lse_n)[:, None])
    if objective.label_smoothing:
        d_nv.sub_(objective.label_smoothing / V)
    here_n = torch.where(column_n >= 0, at_label_n.to(d_nv.dtype), d_nv[:, 0])
    d_nv.scatter_(1, column_n.clamp(min=0)[:, None], here_n[:, None])
    if objective.softcap:
        t_nv = torch.div(raw_nv.to(d_nv.dtype), objective.softcap).tanh_()
        d_nv.mul_(t_nv.square_().neg_().add_(1))
    if scale_n is not None:
        d_nv = torch.mul(d_nv, scale_n[:, None], out=d_nv if same else raw_nv)
    return d_nv if d_nv.dtype == raw_nv.dtype else raw_nv.copy_(d_nv)


def _losses(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    kept_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    objective: Objective,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (weight · loss, 0 where ignored; the label's log-probability; the log-sum-exp)."""
    log_probabilities = _LogProbabilities(hidden_NC, weight_VC, bias_V, objective, rows)
    found_3N = hidden_NC.new_empty(3, hidden_NC.shape[0], dtype=_wide(hidden_NC))
    for part in _parts(hidden_NC.shape[0], rows):
        for place_N, value_n in zip(
            found_3N,
            log_probabilities.statistics(*log_probabilities(hidden_NC[part]), labels_N[part]),
            strict=True,
        ):
            place_N[part] = value_n
    losses_N, logp_N, lse_N = found_3N
    if weights_N is not None:
        losses_N = losses_N * weights_N
    return torch.where(kept_N, losses_N, 0.0), logp_N, lse_N


class _Summed(torch.autograd.Function):
    """Σ weight · loss, with gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        kept_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        objective: Objective,
        rows: int,
        weight_gradient_dtype: torch.dtype,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        (N, C), V, wide = hidden_NC.shape, weight_VC.shape[0], _wide(hidden_NC)
        grad_hidden_NC = torch.empty_like(hidden_NC) if needs_hidden else None
        grad_weight_VC = hidden_NC.new_zeros(V, C, dtype=wide) if needs_weight else None
        grad_bias_V = hidden_NC.new_zeros(V, dtype=wide) if needs_bias else None
        losses_N = hidden_NC.new_empty(N, dtype=wide)
        log_probabilities = _LogProbabilities(hidden_NC, weight_VC, bias_V, objective, rows)
        for part in _parts(N, rows):
            # An ignored token is masked by its hidden state: n × C elements instead of n × V. Before the logits, since
            # a gradient that overflowed would give NaN even times zero.
            h_nC = hidden_NC[part].masked_fill(~kept_N[part, None], 0.0)
            raw_nV, logp_nV = log_probabilities(h_nC)
            kept_n, scale_n = kept_N[part], None if weights_N is None else weights_N[part]
            loss_n, logp_n, lse_n = log_probabilities.statistics(raw_nV, logp_nV, labels_N[part])
            losses_N[part] = torch.where(kept_n, loss_n if scale_n is None else loss_n * scale_n, 0.0)
            at_label_n = _at_label(objective, V, logp_n, lse_n)
            d_nV = _gradient_(raw_nV, logp_nV, objective, V, lse_n, labels_N[part], at_label_n, scale_n)
            if grad_hidden_NC is not None:
                torch.mm(d_nV, weight_VC, out=grad_hidden_NC[part])
            if grad_weight_VC is not None:
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
        # Never in place: backward may run again on the same graph (retain_graph).
        if hidden_NC is not None:
            hidden_NC = (hidden_NC * upstream[0]).to(hidden_NC.dtype)
        if weight_VC is not None:
            scaled_VC = torch.empty_like(weight_VC, dtype=ctx.weight_gradient_dtype)
            weight_VC = torch.mul(weight_VC, upstream[0], out=scaled_VC)
        if bias_V is not None:
            bias_V = bias_V * upstream[0]
        return hidden_NC, weight_VC, bias_V, None, None, None, None, None, None


class _Recomputed(torch.autograd.Function):
    """weight · loss per token; the backward loops over the vocabulary and recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        kept_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        objective: Objective,
        rows: int,
        weight_gradient_dtype: torch.dtype,
    ) -> torch.Tensor:
        losses_N, logp_N, lse_N = _losses(
            hidden_NC, weight_VC, bias_V, labels_N, kept_N, weights_N, objective, rows
        )
        ctx.save_for_backward(hidden_NC, weight_VC, bias_V, labels_N, kept_N, weights_N, logp_N, lse_N)
        ctx.rows, ctx.weight_gradient_dtype, ctx.objective = rows, weight_gradient_dtype, objective
        return losses_N

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, weight_VC, bias_V, labels_N, kept_N, weights_N, logp_N, lse_N = ctx.saved_tensors
        scale_N = torch.where(kept_N, upstream[0] if weights_N is None else upstream[0] * weights_N, 0.0)
        shape = (hidden_NC, weight_VC, bias_V)
        numbers = (labels_N, scale_N, logp_N, lse_N)
        wanted = ctx.needs_input_grad[:3]
        size = spec.block_entries(ctx.rows, hidden_NC.shape[0], weight_VC.shape[0])
        found = block_gradients(
            *shape, *numbers, ctx.objective, 0, weight_VC.shape[0], size, wanted, ctx.weight_gradient_dtype
        )
        return *found, None, None, None, None, None, None


def block_gradients(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    scale_N: torch.Tensor,
    logp_N: torch.Tensor,
    lse_N: torch.Tensor,
    objective: Objective,
    first: int,
    vocabulary: int,
    size: int,
    wanted: tuple[bool, bool, bool],
    weight_gradient_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden, weight and bias for a known log-sum-exp, `size` entries of the vocabulary at a time.

    weight may be a shard: its first row is entry `first` of `vocabulary` entries.
    """
    (N, C), V, wide = hidden_NC.shape, weight_VC.shape[0], _wide(hidden_NC)
    at_label_N = _at_label(objective, vocabulary, logp_N, lse_N)
    grad_hidden_NC = hidden_NC.new_zeros(N, C, dtype=wide) if wanted[0] else None
    grad_weight_VC = torch.empty_like(weight_VC, dtype=weight_gradient_dtype) if wanted[1] else None
    grad_bias_V = hidden_NC.new_empty(V, dtype=wide) if wanted[2] else None
    # 0 · NaN is NaN: rows with a scale of 0 are cleared where their logits overflowed. Only an eager CPU can check
    # without a synchronization whether there are any.
    idle_N = (scale_N == 0) & ~torch.isfinite(lse_N)
    eager = hidden_NC.device.type == "cpu" and not torch.compiler.is_compiling()
    clear = not eager or bool(idle_N.any())
    raw, exponents = hidden_NC.new_empty(N * size), hidden_NC.new_empty(N * size, dtype=wide)
    for part in _parts(V, size):
        w_vC = weight_VC[part]
        raw_Nv = raw[: N * w_vC.shape[0]].view(N, w_vC.shape[0])
        logp_Nv = exponents[: raw_Nv.numel()].view(raw_Nv.shape)
        _logits(hidden_NC, w_vC, None if bias_V is None else bias_V[part], raw_Nv)
        if objective.softcap:
            _capped(raw_Nv, objective.softcap, out=logp_Nv).sub_(lse_N[:, None])
        else:
            torch.sub(raw_Nv, lse_N[:, None], out=logp_Nv)
        column_N = labels_N - (first + part.start)
        column_N = torch.where((column_N >= 0) & (column_N < w_vC.shape[0]), column_N, -1)
        d_Nv = _gradient_(raw_Nv, logp_Nv, objective, vocabulary, lse_N, column_N, at_label_N, scale_N)
        if clear:
            d_Nv.masked_fill_(idle_N[:, None], 0.0)
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
    return grad_hidden_NC, grad_weight_VC, grad_bias_V
