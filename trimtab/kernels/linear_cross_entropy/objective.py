"""The options of the loss, and the loss from four statistics per row of logits.

    raw_nv  = hidden_n · weight_v + bias_v
    z_nv    = softcap · tanh(raw_nv / softcap)                          (raw_nv without a softcap)
    loss_n  = (lse_n − z_n,y) + ε · (z_n,y − mean_v z_nv) + ζ · lse_n²
                                                 y: n's label, ε: label smoothing, ζ: z_loss

A row, or a part of one (a block, another rank's shard), is described by four values that can be merged: the largest
z, the sum of exp(z − largest), z at the label, and the sum of all z.
"""

# N tokens, V vocabulary, S parts of a row

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOWEST = -3.0e38
"""The largest z of an empty part: finite, so that differences are not NaN."""


@dataclass(frozen=True)
class Objective:
    """The options of the loss that change its value.

    Example:
        >>> Objective(label_smoothing=0.1).softcap
        0.0
    """

    label_smoothing: float = 0.0
    """ε: label smoothing, as in `F.cross_entropy`."""
    z_loss: float = 0.0
    """ζ: the coefficient of lse², which keeps logits from drifting."""
    softcap: float = 0.0
    """Logits are bounded to ±softcap by a tanh; 0 disables it."""

    def __post_init__(self) -> None:
        assert 0 <= self.label_smoothing <= 1, (
            f"label_smoothing must be within 0…1, not {self.label_smoothing}"
        )
        assert self.softcap >= 0, f"softcap must be positive, or 0 for none, not {self.softcap}"


def combine(partials_4NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (lse_N, nll_N, label_N, sum_N) of full rows from their parts.

    nll = lse − z at the label, computed as log Σ − (label − largest): this stays accurate if the model is nearly
    certain, so that lse and the label's logit are large and almost equal.
    """
    import torch

    largest_NS, sums_NS, label_NS, total_NS = partials_4NS.unbind(0)
    largest_N = largest_NS.amax(-1)
    log_N = (sums_NS * torch.exp(largest_NS - largest_N[:, None])).sum(-1).log()
    label_N = label_NS.sum(-1)
    return largest_N + log_N, log_N - (label_N - largest_N), label_N, total_NS.sum(-1)


def losses_of(
    objective: Objective,
    vocabulary: int,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    label_N: torch.Tensor,
    sum_N: torch.Tensor,
) -> torch.Tensor:
    """Returns loss_N, not yet multiplied by the weights of the tokens."""
    losses_N = nll_N
    if objective.label_smoothing:
        losses_N = losses_N + objective.label_smoothing * (label_N - sum_N / vocabulary)
    if objective.z_loss:
        losses_N = losses_N + objective.z_loss * lse_N.square()
    return losses_N
