"""Loss and perplexity of a model on batches of text, weighted by tokens.

    loss = Σ over all target tokens of −ln p(token | previous tokens) / number of target tokens

The mean is over tokens, not over batches, so the result does not depend on how the sequences are batched.

The losses are also summed per document, so that two models can be compared document by document.

Legend: B sequences, T tokens, N = B · T, S segments of consecutive tokens of one document (or of padding).
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
"""With fewer documents (one long text, for instance) losses are reported per piece of a document."""
MAX_UNITS = 2048
"""With more documents neighbours are grouped, to bound the size of the log."""


class EvaluationBatch(Protocol):
    """The attributes of `trimtab.data.Batch` that are used here: labels are already shifted, -100 for no target."""

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor
    num_targets: int
    origins: list[list[str]]
    """For each sequence, the source (`file:row`) of each document piece in it."""

    def to(self, device: Any) -> Any:
        """The batch on a device."""
        ...


@dataclass(frozen=True)
class UnitLosses:
    """Mean loss and number of target tokens of each document, in the order of evaluation.

    With fewer than `MIN_DOCUMENTS` documents the units are pieces of documents (the part in one sequence), with more
    than `MAX_UNITS` they are groups of neighbouring documents.
    """

    unit: Literal["document", "piece", "group of documents"]
    losses: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class LossResult:
    """Mean loss in nats per token, perplexity, number of target tokens, and losses per document."""

    loss: float
    perplexity: float
    tokens: int
    units: UnitLosses


def loss(decoder: Decoder, batches: Iterable[EvaluationBatch]) -> LossResult:
    """The token-weighted mean loss over all batches; materializes no logits and synchronizes with the device once.

    Args:
        decoder: its training mode is restored afterwards.
        batches: batches of packed sequences, on any device.

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
                # Built from the CPU tensor, so that finding document boundaries needs no synchronization.
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
            "the evaluation text has no target token",
            "give evaluation text of at least two tokens per document",
        )
    # fp64 on the host: adding thousands of fp32 sums of different magnitude in fp32 loses precision.
    mean = float(torch.stack(sums).cpu().double().sum()) / tokens
    if not math.isfinite(mean):
        raise TrainingError(
            f"the loss on the evaluation text is {mean}",
            "weights are not finite, or overflow in this dtype: try an earlier checkpoint or fp32",
        )
    return LossResult(mean, math.exp(mean) if mean < 700 else math.inf, tokens, _units(segments))


class _SegmentLosses:
    """Losses of one batch, summed per segment; the sums remain on the device."""

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
        """(document, sum of losses, number of targets) of each piece with a target."""
        sums = self.sums_S.cpu().tolist()
        for (row, piece), total, tokens in zip(self.pieces_S, sums, self.tokens_S.tolist(), strict=True):
            if tokens:
                yield self.origins[row][piece], total, tokens


def _units(segments: list[_SegmentLosses]) -> UnitLosses:
    """Losses by document, by piece (few documents) or by group (many documents)."""
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
    """Sums over neighbouring units, in `count` groups.

    Example:
        >>> _grouped([(1.0, 2), (3.0, 4), (5.0, 6)], 2)
        [(1.0, 2), (8.0, 10)]
    """
    ends = [len(units) * i // count for i in range(count + 1)]
    parts = [units[first:end] for first, end in pairwise(ends)]
    return [(sum(total for total, _ in part), sum(tokens for _, tokens in part)) for part in parts]
