"""The loss of a language model from its last hidden states, without ever holding [tokens, vocabulary].

    logits_nv = hidden_n · weight_v + bias_v
    loss_n    = log Σ_v exp(logits_nv) − logits_n,label(n)          (0 where label(n) is ignore_index)
    ∂loss_n/∂logits_nv = softmax(logits_n)_v − [v = label(n)]

The product with the vocabulary is the largest tensor of a training step: 4096 tokens × 151,936 entries are
2.3 GiB in fp32, and plain autograd holds two or three of them.
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
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` against labels, in fp32.

    Args:
        hidden_NC: Hidden states, in weight's dtype; under autocast both are cast to autocast's.
        weight_VC: The head (or the tied embedding). Without `requires_grad` its gradient is not computed.
        labels_N: int64 ids in [0, V), or `ignore_index` for a token without a target.
        bias_V: Added to the logits.
        impl: "chunked" (memory of a few chunks) or "reference" (the full logits).
        reduction: "sum", "mean" over the tokens that have a target (0 if there are none), or "none".
        chunk_tokens: Rows of logits held at once; by default `spec.chunk_tokens(N, V)`. For "chunked".

    Returns:
        An fp32 scalar, or fp32 [N] for "none" (0 where ignored).

    Example:
        >>> import torch
        >>> from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
        >>> hidden, head = torch.zeros(3, 4), torch.zeros(8, 4)
        >>> linear_cross_entropy(hidden, head, torch.tensor([1, -100, 7]), reduction="sum")  # 2 · log 8
        tensor(4.1589)
    """
    from trimtab.kernels.linear_cross_entropy.labels import check_labels

    assert hidden_NC.ndim == 2, f"hidden is [tokens, size], not {tuple(hidden_NC.shape)}"
    assert weight_VC.ndim == 2, f"weight is [vocabulary, size], not {tuple(weight_VC.shape)}"
    assert hidden_NC.shape[1] == weight_VC.shape[1], f"{hidden_NC.shape} against {weight_VC.shape}"
    assert labels_N.shape == hidden_NC.shape[:1], (
        f"{hidden_NC.shape[0]} tokens, {tuple(labels_N.shape)} labels"
    )
    hidden_NC, weight_VC = _under_autocast(hidden_NC), _under_autocast(weight_VC)
    assert hidden_NC.dtype == weight_VC.dtype, f"hidden is {hidden_NC.dtype}, weight {weight_VC.dtype}"
    assert reduction in REDUCTIONS, f"reduction is one of {REDUCTIONS}, not {reduction!r}"
    check_labels(labels_N, weight_VC.shape[0], ignore_index)
    if impl == "chunked":
        from trimtab.kernels.linear_cross_entropy.impl_chunked import chunked

        return chunked(hidden_NC, weight_VC, bias_V, labels_N, ignore_index, reduction, chunk_tokens)
    elif impl == "reference":
        from trimtab.kernels.linear_cross_entropy.impl_reference import reference

        return reference(hidden_NC, weight_VC, bias_V, labels_N, ignore_index, reduction)
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(
            f"there is no linear cross-entropy called {impl!r}", f"use one of {', '.join(IMPLS)}"
        )


def _under_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's dtype where it is on, as for any other matrix product."""
    import torch

    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
