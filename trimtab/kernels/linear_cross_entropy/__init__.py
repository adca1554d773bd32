"""The loss of a language model from its last hidden states, without materializing the [tokens, vocabulary] logits.

    logits_nv = hidden_n · weight_v + bias_v
    loss_n    = log Σ_v exp(logits_nv) − logits_n,label(n)          (0 where label(n) is ignore_index)
    ∂loss_n/∂logits_nv = softmax(logits_n)_v − [v = label(n)]

The logits are the largest tensor of a training step: 4096 tokens × 151,936 entries are 2.3 GiB in fp32, and plain
autograd allocates two or three copies.
"""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.kernels.linear_cross_entropy.spec import IMPLS, REDUCTIONS

if TYPE_CHECKING:
    import torch

__all__ = ["IMPLS", "REDUCTIONS", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    impl: str = "chunked",
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weights_N: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    memory_bytes: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against labels, in fp32.

    Args:
        hidden_NC: Hidden states, in weight's dtype; under autocast hidden states, weight and bias are cast to
            autocast's.
        weight_VC: The head (or the tied embedding). Without `requires_grad` its gradient is not computed.
        labels_N: int64 ids in [0, V), or `ignore_index` for a token without a target.
        bias_V: Added to the logits, in weight's dtype.
        impl: "chunked" (logits of a few rows at a time), "triton" (the same on a CUDA device, faster) or "reference"
            (the full logits).
        reduction: "sum", "mean" over the tokens that have a target (0 if there are none), or "none".
        token_weights_N: Weights of the tokens' losses, not differentiated. "mean" still divides by the number
            of tokens with a target, not by the sum of the weights. For training loops that users write themselves; no
            recipe sets it.
        label_smoothing: Fraction of the target distribution that is uniform over the vocabulary.
        z_loss: Coefficient of the squared log-sum-exp that is added to each token's loss.
        softcap: Logit soft cap: `softcap · tanh(logits / softcap)`. For models that users write
            themselves; no recipe sets it.
        chunk_tokens: Rows of logits per chunk; by default `spec.chunk_tokens(N, V)` for "chunked", and the maximum that
            `memory_bytes` allows for "triton". With more than 48 chunks, "triton" accumulates the gradient of a 16-bit
            weight in fp32, which needs 4 bytes per element of weight temporarily.
        memory_bytes: For "triton": memory budget in addition to inputs and gradients. By default small (a twelfth of
            the gradients, at least 24 MiB); more is faster until all logits fit, in the inputs' dtype.
            `choice.choose_loss` sets it for all steps of a run. The same budget gives bitwise identical results.

    Returns:
        An fp32 scalar, or fp32 [N] for "none" (0 where ignored).

    Example:
        >>> import torch
        >>> from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
        >>> hidden, head = torch.zeros(3, 4), torch.zeros(8, 4)
        >>> linear_cross_entropy(hidden, head, torch.tensor([1, -100, 7]), reduction="sum")  # 2 · log 8
        tensor(4.1589)
    """
    from trimtab.kernels.linear_cross_entropy.inputs import cast_for_autocast, check_inputs, gradient_dtype
    from trimtab.kernels.linear_cross_entropy.objective import Objective

    hidden_NC, weight_VC = cast_for_autocast(hidden_NC), cast_for_autocast(weight_VC)
    bias_V = None if bias_V is None else cast_for_autocast(bias_V)
    check_inputs(hidden_NC, weight_VC, bias_V, labels_N, token_weights_N, ignore_index)
    assert reduction in REDUCTIONS, f"reduction must be one of {REDUCTIONS}, not {reduction!r}"
    objective = Objective(label_smoothing, z_loss, softcap or 0.0)
    by_token = reduction == "none"
    inputs = (hidden_NC, weight_VC, bias_V, labels_N, token_weights_N, objective)
    count = None
    if reduction == "mean":
        count = (labels_N != ignore_index).sum().clamp(min=1)
    if impl == "chunked":
        from trimtab.kernels.linear_cross_entropy.impl_chunked import chunked

        loss = chunked(
            *inputs,
            ignore_index=ignore_index,
            by_token=by_token,
            chunk_tokens=chunk_tokens,
            weight_gradient_dtype=gradient_dtype(weight_VC),
        )
    elif impl == "triton":
        from trimtab.kernels.linear_cross_entropy.operators import triton_loss

        return triton_loss(
            *inputs,
            ignore_index=ignore_index,
            by_token=by_token,
            count=count,
            memory_bytes=memory_bytes,
            chunk_tokens=chunk_tokens,
            weight_gradient_dtype=gradient_dtype(weight_VC),
        )
    elif impl == "reference":
        from trimtab.kernels.linear_cross_entropy.impl_reference import reference

        losses_N = reference(*inputs, ignore_index=ignore_index)
        loss = losses_N if by_token else losses_N.sum()
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(
            f"unknown linear cross-entropy implementation {impl!r}", f"use one of {', '.join(IMPLS)}"
        )
    return loss if count is None else loss / count
