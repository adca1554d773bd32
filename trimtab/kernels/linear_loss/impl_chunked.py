"""One chunk of tokens at a time: logits by a product, the function and its derivative by autograd, two more products.

"sum" computes the gradients with the loss; its backward scales them. "none", whose upstream gradients are not known
in the forward, recomputes logits and function in the backward.
"""

# N tokens, n tokens of a chunk, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.linear_loss import spec

Function = Callable[..., torch.Tensor]


def chunked(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    fn: Function,
    per_token: tuple[torch.Tensor, ...],
    reduction: str,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """See `trimtab.kernels.linear_loss.linear_loss`."""
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows = max(min(chunk_tokens or spec.chunk_tokens(N, V), N), 1)
    inputs = (hidden_NC, weight_VC, bias_V, *per_token)
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not training:
        losses_N = _losses(fn, rows, hidden_NC, weight_VC, bias_V, *per_token)
        return losses_N if reduction == "none" else losses_N.sum()
    kind = weight_VC.grad_dtype if weight_VC.is_leaf else None
    way = _Recomputed if reduction == "none" else _Summed
    out: torch.Tensor = way.apply(fn, rows, kind or weight_VC.dtype, *inputs)
    return out


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(h_nC: torch.Tensor, weight_VC: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(h_nC, weight_VC, bias_V).to(_wide(h_nC))


def _losses(
    fn: Function,
    rows: int,
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    *per_token: torch.Tensor,
) -> torch.Tensor:
    out_N = hidden_NC.new_empty(hidden_NC.shape[0], dtype=_wide(hidden_NC))
    with torch.no_grad():
        for part in _parts(hidden_NC.shape[0], rows):
            logits_nV = _logits(hidden_NC[part], weight_VC, bias_V)
            out_N[part] = _check_losses(fn(logits_nV, *(x[part] for x in per_token)), logits_nV)
    return out_N


def _check_losses(losses_n: torch.Tensor, logits_nV: torch.Tensor) -> torch.Tensor:
    assert losses_n.shape == logits_nV.shape[:1], (
        f"fn returned {tuple(losses_n.shape)} for {logits_nV.shape[0]} tokens; it must return one loss per token"
    )
    return losses_n


def _check_captured(losses_n: torch.Tensor, ours: list[torch.Tensor]) -> None:
    """Raises if the function captured a tensor that requires a gradient, which would silently get none."""
    known, seen, nodes = {id(x) for x in ours}, set(), [losses_n.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ModelError(
                f"fn captures a tensor of shape {tuple(leaf.shape)} that requires a gradient",
                "detach() it if it is a constant, or pass it per token",
            )
        nodes += [following for following, _ in node.next_functions]


class _Gradients:
    """Gradients accumulated over chunks: of weight and bias in fp32, of hidden and per-token tensors as rows."""

    def __init__(self, wanted: tuple[bool, ...], inputs: tuple[torch.Tensor | None, ...]) -> None:
        hidden_NC = inputs[0]
        assert hidden_NC is not None
        self.wanted, self.inputs, wide = wanted, inputs, _wide(hidden_NC)
        self.out: list[torch.Tensor | None] = [None] * len(inputs)
        for i, (want, x) in enumerate(zip(wanted, inputs, strict=True)):
            if want and x is not None:
                self.out[i] = torch.zeros_like(x, dtype=wide if i in (1, 2) else x.dtype)

    def add(self, fn: Function, part: slice, upstream_n: torch.Tensor | None, first: bool) -> torch.Tensor:
        """Returns the chunk's losses and accumulates its gradients."""
        hidden_NC, weight_VC, bias_V, *per_token = self.inputs
        assert hidden_NC is not None
        assert weight_VC is not None
        with torch.no_grad():
            logits_nV = _logits(hidden_NC[part], weight_VC, bias_V)
        given = [x[part].detach() for x in per_token if x is not None]
        leaves = [logits_nV.requires_grad_()]
        leaves += [x.requires_grad_() for x, want in zip(given, self.wanted[3:], strict=True) if want]
        with torch.enable_grad():
            losses_n = _check_losses(fn(logits_nV, *given), logits_nV)
        if not losses_n.requires_grad:
            return losses_n
        if first:
            _check_captured(losses_n, leaves)
        upstream_n = torch.ones_like(losses_n) if upstream_n is None else upstream_n.to(losses_n.dtype)
        found: list[torch.Tensor | None] = []
        found += torch.autograd.grad(losses_n, leaves, upstream_n, allow_unused=True)
        self._accumulate(found, part)
        return losses_n.detach()

    def _accumulate(self, found: list[torch.Tensor | None], part: slice) -> None:
        hidden_NC, weight_VC, *_ = self.inputs
        assert hidden_NC is not None
        assert weight_VC is not None
        grad_hidden_NC, grad_weight_VC, grad_bias_V, *others = self.out
        wide_nV = found.pop(0)
        for place in others:
            if place is not None and (x := found.pop(0)) is not None:
                place[part] = x
        if wide_nV is None:
            return
        d_nV = wide_nV.to(hidden_NC.dtype)
        if grad_bias_V is not None:
            grad_bias_V += d_nV.sum(0, dtype=grad_bias_V.dtype)
        if grad_hidden_NC is not None:
            torch.mm(d_nV, weight_VC, out=grad_hidden_NC[part])
        if grad_weight_VC is not None:
            if d_nV.dtype == grad_weight_VC.dtype:
                grad_weight_VC.addmm_(d_nV.t(), hidden_NC[part])
            else:
                grad_weight_VC.add_(d_nV.t() @ hidden_NC[part])


class _Summed(torch.autograd.Function):
    """Σ losses, with gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, fn: Function, rows: int, kind: torch.dtype, *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        hidden_NC = inputs[0]
        assert hidden_NC is not None
        gradients = _Gradients(ctx.needs_input_grad[3:], inputs)
        losses_N = hidden_NC.new_empty(hidden_NC.shape[0], dtype=_wide(hidden_NC))
        for part in _parts(hidden_NC.shape[0], rows):
            losses_N[part] = gradients.add(fn, part, None, part.start == 0)
        ctx.save_for_backward(*gradients.out)
        ctx.kind = kind
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        # Never in place: backward may run again on the same graph (retain_graph).
        found = [None if x is None else (x * upstream[0]).to(x.dtype) for x in ctx.saved_tensors]
        if found[1] is not None:
            found[1] = found[1].to(ctx.kind)
        return None, None, None, *found


class _Recomputed(torch.autograd.Function):
    """Loss per token; the backward recomputes logits and function."""

    @staticmethod
    def forward(ctx: Any, fn: Function, rows: int, kind: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.fn, ctx.rows, ctx.kind = fn, rows, kind
        return _losses(fn, rows, *inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        gradients = _Gradients(ctx.needs_input_grad[3:], ctx.saved_tensors)
        for part in _parts(ctx.saved_tensors[0].shape[0], ctx.rows):
            gradients.add(ctx.fn, part, upstream[0][part], part.start == 0)
        found = gradients.out
        if found[1] is not None:
            found[1] = found[1].to(ctx.kind)
        return None, None, None, *found
