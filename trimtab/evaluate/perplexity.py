"""Loss and perplexity of a model on batches of text, weighted by tokens.

    loss = Σ over all target tokens of −ln p(token | before it) / number of target tokens

The sum runs over tokens and not over batches: a batch with few targets counts for little, and the result
does not depend on how the windows were batched.

The same losses are also summed document by document, so that two models can be compared on each of them.

Legend: B windows, T tokens, N = B · T, S segments of tokens of one piece (or of padding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch

from trimtab.facts.errors import DataError, TrainingError
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder

IGNORE = -100
MIN_DOCUMENTS = 10
"""Below so many documents, as where one long text is evaluated, losses are kept by piece of a document instead."""
MAX_UNITS = 2048
"""Beyond so many documents neighbours are added up, so that a log stays small however much text is evaluated."""


class EvaluationBatch(Protocol):
    """What is needed of a batch (`trimtab.data.Batch`): labels already shifted, -100 for no target."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor
    num_targets: int
    origins: list[list[str]]
    """For each sequence, the document (`file:row`) of each of its pieces."""

    def to(self, device: Any) -> Any:
        """The same windows on a device."""
        ...


@dataclass(frozen=True)
class UnitLosses:
    """Mean loss and number of target tokens of each document, in the order in which they were met.

    Where there are fewer than `MIN_DOCUMENTS` the units are pieces of them (what fits into a sequence), where there are
    more than `MAX_UNITS` groups of neighbouring documents.
    """

    unit: Literal["document", "piece", "group of documents"]
    losses: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class LossResult:
    """Mean loss in nats per token, its exponential, how many tokens were measured, and the losses by document."""

    loss: float
    perplexity: float
    tokens: int
    units: UnitLosses


def loss(decoder: Decoder, batches: Iterable[EvaluationBatch]) -> LossResult:
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
    segments: list[_SegmentLosses] = []
    tokens = 0
    try:
        with torch.no_grad():
            for batch in batches:
                # Built from the CPU tensor: its document offsets are then found without a synchronization.
                layout = Layout.packed(batch.documents_BT)
                moved = batch.to(device)
                losses_N = decoder.loss(
                    moved.input_ids_BT, moved.labels_BT, moved.positions_BT, layout, reduction="none"
                )
                sums.append(losses_N.sum())
                segments.append(_SegmentLosses(batch, losses_N))
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
    return LossResult(mean, math.exp(mean) if mean < 700 else math.inf, tokens, _units(segments))


class _SegmentLosses:
    """Losses of one batch summed over segments of one piece, which lie one behind another; left on the device."""

    def __init__(self, batch: EvaluationBatch, losses_N: torch.Tensor) -> None:
        documents_BT = batch.documents_BT.cpu().numpy()
        starts_BT = np.ones(documents_BT.shape, bool)
        starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        starts_S = np.flatnonzero(starts_BT)
        lengths_S = np.diff(starts_S, append=documents_BT.size)
        targets_N = (batch.labels_BT.cpu().numpy() != IGNORE).reshape(-1)
        self.tokens_S = np.add.reduceat(targets_N, starts_S, dtype=np.int64)
        rows_S = starts_S // documents_BT.shape[1]
        self.pieces_S = list(zip(rows_S.tolist(), documents_BT.reshape(-1)[starts_S].tolist(), strict=True))
        self.origins = batch.origins
        self.sums_S = torch.segment_reduce(
            losses_N.double(), "sum", lengths=torch.from_numpy(lengths_S).to(losses_N.device), unsafe=True
        )

    def pieces(self) -> Iterator[tuple[str, float, int]]:
        """(document, sum of losses, targets) of each piece that has a target."""
        sums = self.sums_S.cpu().tolist()
        for (row, piece), total, tokens in zip(self.pieces_S, sums, self.tokens_S.tolist(), strict=True):
            if tokens:
                yield self.origins[row][piece], total, tokens


def _units(segments: list[_SegmentLosses]) -> UnitLosses:
    """Losses by document, or by piece where there are few, or by groups where there are many."""
    pieces = [piece for batch in segments for piece in batch.pieces()]
    documents: dict[str, tuple[float, int]] = {}
    for origin, total, tokens in pieces:
        before = documents.get(origin, (0.0, 0))
        documents[origin] = (before[0] + total, before[1] + tokens)
    unit: Literal["document", "piece", "group of documents"] = "document"
    units = list(documents.values())
    if len(units) < MIN_DOCUMENTS:
        unit, units = "piece", [(total, tokens) for _, total, tokens in pieces]
    if len(units) > MAX_UNITS:
        unit = "group of documents" if unit == "document" else unit
        units = _grouped(units, MAX_UNITS)
    return UnitLosses(unit, [total / tokens for total, tokens in units], [tokens for _, tokens in units])


def _grouped(units: list[tuple[float, int]], count: int) -> list[tuple[float, int]]:
    """Neighbours added up until `count` are left.

    Example:
        >>> _grouped([(1.0, 2), (3.0, 4), (5.0, 6)], 2)
        [(1.0, 2), (8.0, 10)]
    """
    ends = [len(units) * i // count for i in range(count + 1)]
    parts = [units[first:end] for first, end in pairwise(ends)]
    return [(sum(total for total, _ in part), sum(tokens for _, tokens in part)) for part in parts]
