"""Vocabulary-parallel cross-entropy: per-shard statistics, their combination, and per-shard gradients.

    partials_4N = shard_partials(hidden, weight_shard, labels, first=…)         on every rank; logits stay there
    statistics  = combine_partials(torch.stack(all ranks' partials))            16 bytes per token and rank, gathered
    losses_N    = statistics.losses(objective)
    gradients   = shard_gradients(upstream_N, hidden, weight_shard, labels, statistics, …)

The gradient of hidden is that of one shard: sum it over ranks. Weight's and bias's are complete. All ranks combine
the same values in the same order, so their losses are bitwise identical.

For authors of vocabulary-parallel (tensor-parallel) training loops, who gather the partials with their own process
group. No recipe shards the vocabulary, and trimtab's decoder does not use this module.
"""

# N tokens, C hidden size, V entries of the shard, S shards

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.linear_cross_entropy import spec
from trimtab.kernels.linear_cross_entropy.objective import LOWEST, Objective, combine, losses_of
from trimtab.kernels.linear_cross_entropy.schedule import schedule

IMPLS = ("chunked", "triton")
PLAIN = Objective()


@dataclass(frozen=True)
class RowStatistics:
    """Row statistics over the vocabulary: log-sum-exp, negative log-likelihood, the label's logit, sum of logits."""

    lse_N: torch.Tensor
    nll_N: torch.Tensor
    label_N: torch.Tensor
    sum_N: torch.Tensor

    def losses(self, vocabulary: int, objective: Objective = PLAIN) -> torch.Tensor:
        """loss_N, before token weights. Ignored tokens have a value too: exclude them by an upstream gradient of 0."""
        return losses_of(objective, vocabulary, self.lse_N, self.nll_N, self.label_N, self.sum_N)


def shard_partials(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    first: int,
    bias_V: torch.Tensor | None = None,
    objective: Objective = PLAIN,
    impl: str = "chunked",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """partials_4N in fp32: largest logit, Σ exp(logit − largest), the label's logit or 0, Σ logit.

    Args:
        weight_VC: Entries [first, first + V) of the vocabulary, with their `bias_V`.
        labels_N: Ids in the full vocabulary.

    Example:
        >>> hidden, head, labels = torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 7])
        >>> halves = [shard_partials(hidden, head[i : i + 4], labels, first=i) for i in (0, 4)]
        >>> combine_partials(torch.stack(halves)).losses(8)  # log 8
        tensor([2.0794, 2.0794])
    """
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows = max(min(chunk_tokens or spec.chunk_tokens(N, V), N), 1)
    with torch.no_grad():
        if impl == "triton":
            from trimtab.kernels.linear_cross_entropy import operators

            operators.check_dtype(hidden_NC.dtype)
            found: torch.Tensor = torch.ops.trimtab.linear_cross_entropy_partials(
                hidden_NC, weight_VC, bias_V, labels_N.contiguous(), objective.softcap, first, rows
            )
            return found
        elif impl == "chunked":
            return _partials(hidden_NC, weight_VC, labels_N - first, bias_V, objective, rows)
    raise ModelError(f"unknown sharded loss implementation {impl!r}", f"use one of {', '.join(IMPLS)}")


def _partials(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    columns_N: torch.Tensor,
    bias_V: torch.Tensor | None,
    objective: Objective,
    rows: int,
) -> torch.Tensor:
    wide = torch.promote_types(hidden_NC.dtype, torch.float32)
    V = weight_VC.shape[0]
    out_4N = hidden_NC.new_empty(4, hidden_NC.shape[0], dtype=wide)
    for start in range(0, hidden_NC.shape[0], rows):
        part = slice(start, start + rows)
        z_nV = torch.nn.functional.linear(hidden_NC[part], weight_VC, bias_V).to(wide)
        if objective.softcap:
            z_nV = z_nV.div_(objective.softcap).tanh_().mul_(objective.softcap)
        column_n = columns_N[part]
        label_n = z_nV.gather(1, column_n.clamp(0, V - 1)[:, None])[:, 0]
        inside_n = (column_n >= 0) & (column_n < V)
        largest_n = z_nV.amax(-1).clamp(min=LOWEST)
        out_4N[2, part] = torch.where(inside_n, label_n, 0.0)
        out_4N[3, part] = z_nV.sum(-1)
        out_4N[0, part] = largest_n
        out_4N[1, part] = z_nV.sub_(largest_n[:, None]).exp_().sum(-1)
    return out_4N


def combine_partials(partials_S4N: torch.Tensor) -> RowStatistics:
    """Combines the partials of all shards, stacked in rank order, to the statistics of whole rows."""
    return RowStatistics(*combine(partials_S4N.permute(1, 2, 0)))


def shard_gradients(
    upstream_N: torch.Tensor,
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    labels_N: torch.Tensor,
    statistics: RowStatistics,
    *,
    first: int,
    vocabulary: int,
    bias_V: torch.Tensor | None = None,
    objective: Objective = PLAIN,
    impl: str = "chunked",
    wanted: tuple[bool, bool, bool] = (True, True, True),
    weight_gradient_dtype: torch.dtype | None = None,
    memory_bytes: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of hidden (this shard's summand), weight and bias; None for those not requested.

    Args:
        upstream_N: fp32 upstream gradients of the tokens' losses, including token weights and divisor; 0
            where a token is ignored.
        vocabulary: Entries of all shards together.
        wanted: Whether to compute each of the three.
        weight_gradient_dtype: Dtype of weight's gradient; by default that of weight.
    """
    (N, C), V = hidden_NC.shape, weight_VC.shape[0]
    kind = weight_gradient_dtype or weight_VC.dtype
    wanted = (wanted[0], wanted[1], wanted[2] and bias_V is not None)
    with torch.no_grad():
        if impl == "triton":
            from trimtab.kernels.linear_cross_entropy import operators

            operators.check_dtype(hidden_NC.dtype)
            plan = schedule(
                N, C, V, hidden_NC.element_size(), kind.itemsize, memory_bytes=memory_bytes, by_token=True
            )
            found = torch.ops.trimtab.linear_cross_entropy_gradients(
                upstream_N.to(torch.float32).contiguous(),
                hidden_NC,
                weight_VC,
                bias_V,
                labels_N.contiguous(),
                statistics.lse_N,
                statistics.nll_N,
                objective.label_smoothing,
                objective.z_loss,
                objective.softcap,
                first,
                vocabulary,
                plan.scratch_bytes,
                *wanted,
                kind,
            )
            hidden, weight, bias = (x if want else None for want, x in zip(wanted, found, strict=True))
            return hidden, weight, bias
        elif impl == "chunked":
            from trimtab.kernels.linear_cross_entropy.impl_chunked import block_gradients

            size = spec.block_entries(spec.chunk_tokens(N, V), N, V)
            inputs = (hidden_NC, weight_VC, bias_V, labels_N, upstream_N, -statistics.nll_N, statistics.lse_N)
            return block_gradients(*inputs, objective, first, vocabulary, size, wanted, kind)
    raise ModelError(f"unknown sharded loss implementation {impl!r}", f"use one of {', '.join(IMPLS)}")
