"""Loss and gradients of any function of the logits, without materializing [tokens, vocabulary].

    logits_nv = hidden_n · weight_v + bias_v
    loss_n    = fn(logits_n, per-token arguments of n)

`fn` is plain torch; its derivative comes from autograd, one chunk of tokens at a time. Cross-entropy has its own
package (`linear_cross_entropy`), which is faster; `losses.py` here has distillation and a clipped policy loss.
No recipe uses this package: it is for training loops that users write themselves.
"""

# N tokens, n tokens of a chunk, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trimtab.kernels.linear_loss.spec import IMPLS, REDUCTIONS

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLS", "REDUCTIONS", "linear_loss"]


def linear_loss(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    fn: Callable[..., torch.Tensor],
    *per_token: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    impl: str = "chunked",
    reduction: str = "sum",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Computes Σ_n fn(logits_n, …), differentiable in hidden, weight, bias and the per-token tensors.

    For training loops that users write themselves, with a loss of their own; no recipe uses it.

    Args:
        hidden_NC: Hidden states, in weight's dtype.
        weight_VC: The head. Without `requires_grad` its gradient is not computed.
        fn: `fn(logits_nV, *per_token_n) -> losses_n`, on a chunk of tokens: fp32 logits (fp64 for fp64 inputs)
            and the same tokens of each per-token tensor. It must treat tokens independently: chunk boundaries are
            arbitrary. It is called with autograd enabled, and again in the backward for "none". Captured tensors are
            constants; one that requires a gradient raises.
        per_token: Tensors whose first dimension is N.
        bias_V: Added to the logits.
        impl: "chunked", or "reference" (the full logits).
        reduction: "sum", or "none" for one loss per token (whose backward recomputes the logits). Divide as the method
            requires: by tokens, by sequences.
        chunk_tokens: Rows of logits per chunk; by default `spec.chunk_tokens(N, V)`.

    Returns:
        fp32, a scalar or [N].

    Example:
        >>> import torch
        >>> entropy = lambda logits_nV: torch.distributions.Categorical(logits=logits_nV).entropy()
        >>> linear_loss(torch.zeros(3, 4), torch.zeros(8, 4), entropy)  # 3 · log 8
        tensor(6.2383)
    """
    assert hidden_NC.ndim == 2, f"hidden must be [tokens, size], not {tuple(hidden_NC.shape)}"
    assert weight_VC.ndim == 2, f"weight must be [vocabulary, size], not {tuple(weight_VC.shape)}"
    assert hidden_NC.shape[1] == weight_VC.shape[1], f"{hidden_NC.shape} against {weight_VC.shape}"
    assert hidden_NC.dtype == weight_VC.dtype, f"hidden is {hidden_NC.dtype}, weight {weight_VC.dtype}"
    assert reduction in REDUCTIONS, f"reduction must be one of {REDUCTIONS}, not {reduction!r}"
    for x in per_token:
        assert x.shape[:1] == hidden_NC.shape[:1], (
            f"{hidden_NC.shape[0]} tokens, per-token tensor {tuple(x.shape)}"
        )
    if impl == "chunked":
        from trimtab.kernels.linear_loss.impl_chunked import chunked

        return chunked(hidden_NC, weight_VC, bias_V, fn, per_token, reduction, chunk_tokens)
    elif impl == "reference":
        from trimtab.kernels.linear_loss.impl_reference import reference

        return reference(hidden_NC, weight_VC, bias_V, fn, per_token, reduction)
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(f"unknown linear loss implementation {impl!r}", f"use one of {', '.join(IMPLS)}")
