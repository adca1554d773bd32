"""Selects the documents that are held out for evaluation and those that are left out, with messages about both.

The content decides whether a document is held out, so that both sides never share one. The content hash is 64 bits of
its first segment (up to 131,072 characters), the same in every run, on every machine and in every file; copies of a
document are on the same side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.facts.errors import DataError

LEFT_OUT = {
    "empty": "empty",
    "short": "shorter than two tokens",
    "untrained": "without a token to train on (no answer, or one that the chat template omits)",
    "bad": "unusable as examples, or refused by the chat template",
}
"""Reasons why documents are left out, for messages."""


@dataclass(frozen=True)
class SourceCounts:
    """Counts from reading a source: documents left out, by reason, and documents that were changed."""

    empty: int = 0
    """Documents without any text, left out."""
    short: int = 0
    """Documents of fewer than two tokens, left out."""
    untrained: int = 0
    """Examples without a token to train on, left out."""
    bad: int = 0
    """Rows that are not valid examples or that the chat template rejects, left out."""
    first_error: str = ""
    """The error of the first bad row."""
    repaired: int = 0
    """Documents with broken Unicode escapes, which became U+FFFD."""
    unanswered: int = 0
    """Conversations that end with messages without an answer."""
    rewritten: int = 0
    """Conversations whose earlier turns the chat template renders differently once an answer follows."""
    trained: int | None = None
    """Tokens of examples that are trained on; None for plain text."""
    cut: int = 0
    """Examples longer than a sequence, counted if sequences are packed while reading."""
    lost: int = 0
    """Examples left out because nothing within the sequence is trained on."""

    def left_out(self) -> dict[str, int]:
        """The numbers of documents left out, by reason, in the order of messages."""
        return {why: count for why in LEFT_OUT if (count := getattr(self, why))}


def heldout_threshold(share: float) -> int:
    """The hash below which documents are held out.

    Example:
        >>> heldout_threshold(0.5) == 1 << 63
        True
    """
    if not 0 < share < 1:
        raise DataError(f"a held-out share of {share} leaves one side empty", "set a share between 0 and 1")
    return int(share * 2.0**64)


def is_heldout(content_hash: int, share: float) -> bool:
    """Whether a document is held out, which does not depend on other documents."""
    return content_hash < heldout_threshold(share)


def heldout_mask(hashes_N: np.ndarray, share: float | None, count: int | None) -> np.ndarray:
    """Boolean [N], True for documents to hold out: by share of all possible hashes, or the `count` smallest.

    Copies stay together, so that copies of the last document may exceed `count`. With two or more distinct documents,
    each side gets at least one.
    """
    assert (share is None) != (count is None), "either a share or a count"
    distinct = np.unique(hashes_N)
    if share is not None:
        mask_N = hashes_N < np.uint64(heldout_threshold(share))
        wanted = 1 if not mask_N.any() else len(distinct) - 1 if mask_N.all() else None
    else:
        assert count is not None
        if count < 1:
            raise DataError(f"a held-out count of {count} holds out nothing", "give 1 or more")
        wanted, mask_N = min(count, len(distinct) - 1), np.zeros(len(hashes_N), bool)
    if wanted is not None and len(distinct) > 1:
        mask_N = hashes_N <= distinct[wanted - 1]
    return mask_N


def left_out_note(count: int, why: str) -> str:
    """A sentence about documents that were left out.

    Example:
        >>> left_out_note(2, "empty")
        '2 documents are empty and were left out'
    """
    what, are, were = ("document", "is", "was") if count == 1 else ("documents", "are", "were")
    return f"{count} {what} {are} {LEFT_OUT[why]} and {were} left out"


def no_documents_error(name: str, counts: SourceCounts) -> DataError:
    """The error for a source without any usable document."""
    counted = [f"{count} {LEFT_OUT[why]}" for why, count in counts.left_out().items()]
    why = f": {' and '.join(counted)} were skipped" if counted else ""
    if counts.first_error:
        return DataError(
            f"{name} contains no usable rows{why}", f"repair the rows; the first: {counts.first_error}"
        )
    if counts.untrained:
        return DataError(
            f"{name} contains nothing to train on{why}",
            "give conversations with answers, or set train_on: all to train on everything",
        )
    return DataError(f"{name} contains no documents{why}", "use a source that contains text")


def no_sequences_error(name: str, lost: int, max_seq_length: int) -> DataError:
    """The error for a source that yields no sequence."""
    if lost:
        return DataError(
            f"all {lost} examples of {name} have nothing to train on within max_seq_length ({max_seq_length} tokens)",
            "raise max_seq_length, or shorten the text before the answers",
        )
    return DataError(f"{name} contains no documents", "use a source that contains text")


def truncation_note(name: str, cut: int, lost: int, max_seq_length: int) -> str:
    """A sentence about truncated examples.

    Example:
        >>> truncation_note("chats.jsonl", 3, 0, 512)
        'chats.jsonl: 3 examples are longer than max_seq_length (512) and are truncated'
    """
    what, are = ("example", "is") if cut == 1 else ("examples", "are")
    text = f"{name}: {cut} {what} {are} longer than max_seq_length ({max_seq_length}) and {are} truncated"
    if lost:
        has, are = ("has", "is") if lost == 1 else ("have", "are")
        text += f"; {lost} of them {has} nothing to train on before that point and {are} left out"
    return text
