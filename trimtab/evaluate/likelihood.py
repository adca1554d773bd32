"""Likelihood evaluation: log-likelihoods of texts, and the probe, which compares alternatives by likelihood.

The score of a text is its log-likelihood, Σ ln p(token | previous tokens), as usual for minimal pairs, whose
alternatives differ in one word. It is not normalized by length: alternatives have the same number of words, and
normalization by tokens would favour an alternative whose rare word splits into many easily predicted tokens. The first
token is scored only if the tokenizer adds a BOS token before it (alternatives begin with the same token).

Legend: B texts, T tokens, N = B · T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trimtab.evaluate.minimal_pairs import ProbeItem
from trimtab.facts.errors import DataError, ModelError, TrainingError
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder
from trimtab.text import Tokenizer

IGNORE = -100
Row = tuple[Sequence[int], Sequence[bool] | None]
"""Token ids of a text and a loss mask; None for all tokens."""


def log_likelihoods(
    decoder: Decoder, tokenizer: Tokenizer, texts: Sequence[str], *, batch_size: int = 64
) -> list[float]:
    """Log-likelihood of each text in nats, in the given order.

    Texts are sorted by length and padded within a batch; padding is a separate document without targets.

    Example:
        >>> log_likelihoods(decoder, tokenizer, ["The dogs are here.", "The dogs is here."])  # doctest: +SKIP
        [-18.2, -24.9]
    """
    ids = [tokenizer.encode_prompt(text) for text in texts]
    for text, text_ids in zip(texts, ids, strict=True):
        if len(text_ids) > decoder.shape.max_positions:
            raise DataError(
                f"a text of {len(text_ids)} tokens is longer than the model's {decoder.shape.max_positions}: "
                f"{text[:40]!r} …",
                "shorten it",
            )
    return _scores(decoder, [(row, None) for row in ids], batch_size)


def mean_losses(decoder: Decoder, rows: Sequence[Row], *, batch_size: int = 8) -> list[float]:
    """Mean loss per target token of each row in nats: the mean of −ln p(token | previous tokens) over the mask.

    Args:
        decoder: its training mode is restored afterwards.
        rows: (token ids, loss mask) of each text; None for all tokens. The first token is never a target.
        batch_size: rows per batch.

    Raises:
        DataError: a row has no target token.
        ModelError: a row is longer than the model's context.
        TrainingError: a loss is not finite.

    Example:
        >>> mean_losses(decoder, [([5, 6, 7], None), ([5, 6, 7], [False, False, True])])   # doctest: +SKIP
        [3.1, 2.8]
    """
    counts = []
    for number, (ids, counted) in enumerate(rows, 1):
        if len(ids) > decoder.shape.max_positions:
            raise ModelError(
                f"text {number} has {len(ids)} tokens, the model's context {decoder.shape.max_positions}",
                "shorten it, or measure a file with `trimtab eval`, which splits text into sequences",
            )
        counts.append(len(ids) - 1 if counted is None else sum(counted[1:]))
        if counts[-1] < 1:
            raise DataError(f"text {number} has no token to measure the loss of", "give at least two tokens")
    sums = _scores(decoder, rows, batch_size)
    losses = [-score / count for score, count in zip(sums, counts, strict=True)]
    for number, value in enumerate(losses, 1):
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss of text {number} is {value}",
                "weights are not finite, or overflow in this dtype: try an earlier checkpoint or fp32",
            )
    return losses


def _scores(decoder: Decoder, rows: Sequence[Row], batch_size: int) -> list[float]:
    """Sum of ln p over the target tokens of each row, in the given order; rows are batched by length."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    was_training = decoder.training
    decoder.eval()
    try:
        with torch.no_grad():
            sums = [_sums(decoder, [rows[i] for i in chunk]) for chunk in chunks]
    finally:
        decoder.train(was_training)
    scores = [0.0] * len(rows)
    for chunk, sums_B in zip(chunks, sums, strict=True):
        for i, score in zip(chunk, sums_B.tolist(), strict=True):
            scores[i] = score
    return scores


def _sums(decoder: Decoder, rows: list[Row]) -> torch.Tensor:
    """Sum of ln p over the target tokens of each row of a batch, [B]."""
    B, T = len(rows), max(1, max(len(row) for row, _ in rows))
    ids_BT = torch.zeros(B, T, dtype=torch.int64)
    labels_BT = torch.full((B, T), IGNORE, dtype=torch.int64)
    documents_BT = torch.full((B, T), -1, dtype=torch.int32)
    for b, (row, counted) in enumerate(rows):
        ids_BT[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
        targets = row[1:] if counted is None else _targets(row, counted)
        labels_BT[b, : len(targets)] = torch.tensor(targets, dtype=torch.int64)
        documents_BT[b, : len(row)] = 0
    device = decoder.head_weight.device
    positions_BT = torch.arange(T, device=device)[None].expand(B, T)
    losses_N = decoder.loss(
        ids_BT.to(device), labels_BT.to(device), positions_BT, Layout.packed(documents_BT), reduction="none"
    )
    return -losses_N.view(B, T).double().sum(1)


def _targets(row: Sequence[int], counted: Sequence[bool]) -> list[int]:
    return [token if counts else IGNORE for token, counts in zip(row[1:], counted[1:], strict=True)]


def probe_choices(
    decoder: Decoder, tokenizer: Tokenizer, items: Sequence[ProbeItem], *, batch_size: int = 64
) -> dict[str, list[bool]]:
    """Whether the right alternative is the likeliest, for the items of each kind; a tie is wrong.

    Context and alternative are scored as one text, because a tokenizer may merge the end of a context with the
    beginning of a continuation. All alternatives of an item have the same context, so only they are compared.

    Example:
        >>> probe_choices(decoder, tokenizer, probe_items())          # doctest: +SKIP
        {'agreement': [True, True, False, …], …}
    """
    texts = [item.context + alternative for item in items for alternative in item.alternatives]
    scores = iter(log_likelihoods(decoder, tokenizer, texts, batch_size=batch_size))
    right: dict[str, list[bool]] = {}
    for item in items:
        right_score, *wrong_scores = [next(scores) for _ in item.alternatives]
        right.setdefault(item.kind, []).append(all(right_score > score for score in wrong_scores))
    return right


def probe(
    decoder: Decoder, tokenizer: Tokenizer, items: Sequence[ProbeItem], *, batch_size: int = 64
) -> dict[str, float]:
    """Share of the items of each kind in which the right alternative is the likeliest (`probe_choices`).

    Example:
        >>> probe(decoder, tokenizer, probe_items())          # doctest: +SKIP
        {'agreement': 0.94, 'determiner': 1.0, 'arithmetic': 0.55}
    """
    choices = probe_choices(decoder, tokenizer, items, batch_size=batch_size)
    return {kind: sum(right) / len(right) for kind, right in choices.items()}
