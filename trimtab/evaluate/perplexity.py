"""Loss and perplexity of a model on batches of text, weighted by tokens.

    loss = Σ over all target tokens of −ln p(token | before it) / number of target tokens

The sum runs over tokens and not over batches: a batch with few targets counts for little, and the result
does not depend on how the windows were batched.

Legend: B windows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.facts.errors import DataError, TrainingError
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder


class Windows(Protocol):
    """What is needed of a batch (`trimtab.data.Batch`): labels already shifted, -100 for no target."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor
    num_targets: int

    def to(self, device: Any) -> Any:
        """The same windows on a device."""
        ...


@dataclass(frozen=True)
class LossResult:
    """Mean loss in nats a token, its exponential, and how many tokens were measured."""

    loss: float
    perplexity: float
    tokens: int


def loss(decoder: Decoder, batches: Iterable[Windows]) -> LossResult:
    """The token-weighted mean loss over all batches; never holds logits, and reads the device once.

    Args:
        decoder: left in the mode (training or not) in which it came.
        batches: windows of packed documents, input_ids_BT and the rest, on any device.

    Raises DataError if there is nothing to measure, TrainingError if the loss is not finite.

    Example:
        >>> loss(decoder, batches).perplexity            # doctest: +SKIP
        23.4
    """
    device = decoder.head_weight.device
    was_training = decoder.training
    decoder.eval()
    sums: list[torch.Tensor] = []
    tokens = 0
    try:
        with torch.no_grad():
            for batch in batches:
                # Built from the CPU tensor: its document offsets are then found without a synchronization.
                layout = Layout.packed(batch.documents_BT)
                moved = batch.to(device)
                sums.append(
                    decoder.loss(
                        moved.input_ids_BT, moved.labels_BT, moved.positions_BT, layout, reduction="sum"
                    )
                )
                tokens += batch.num_targets
    finally:
        decoder.train(was_training)
    if tokens == 0:
        raise DataError(
            "there is no token to measure the loss on",
            "give evaluation text of at least two tokens a document",
        )
    # fp64 on the host: thousands of fp32 sums of different sizes lose digits when added in fp32.
    mean = float(torch.stack(sums).cpu().double().sum()) / tokens
    if not math.isfinite(mean):
        raise TrainingError(
            f"the loss on the evaluation text is {mean}",
            "weights are not finite, or overflow in this dtype: try an earlier checkpoint or fp32",
        )
    return LossResult(mean, math.exp(mean) if mean < 700 else math.inf, tokens)
