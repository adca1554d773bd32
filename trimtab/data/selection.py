"""Selection of documents: which are held out for evaluation, which are left out, and how messages say so.

A document is held out by its content, so that the two sides never share one. Its content hash is 64 bits of its first
segment (up to 131,072 characters), the same in every run, on every machine and in whatever file it lies; copies of a
document fall on the same side.
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
"""Why documents are left out, in words."""


@dataclass(frozen=True)
class Counts:
    """What was found while a source was read: documents that are left out, by reason, and what happened to others."""

    empty: int = 0
    """Documents without any text, left out."""
    short: int = 0
    """Documents of fewer than two tokens, left out."""
    untrained: int = 0
    """Examples without a token to train on, left out."""
    bad: int = 0
    """Rows that are no example or that the chat template refuses, left out."""
    complaint: str = ""
    """The error of the first bad row."""
    repaired: int = 0
    """Documents with broken Unicode escapes, which became U+FFFD."""
    unanswered: int = 0
    """Conversations whose last messages no answer follows."""
    rewritten: int = 0
    """Conversations whose earlier turns the chat template renders differently once an answer follows."""
    trained: int | None = None
    """Tokens of examples that are trained on; None where documents are texts."""
    cut: int = 0
    """Examples that are longer than a sequence, where sequences are packed while reading."""
    lost: int = 0
    """Those of them that have nothing to train on within it, left out."""

    def left_out(self) -> dict[str, int]:
        """The numbers of documents that are left out, by reason, in the order of messages."""
        return {why: count for why in LEFT_OUT if (count := getattr(self, why))}


def threshold(share: float) -> int:
    """Documents whose hash is below this are held out.

    Example:
        >>> threshold(0.5) == 1 << 63
        True
    """
    if not 0 < share < 1:
        raise DataError(f"a held-out share of {share} leaves one side empty", "set a share between 0 and 1")
    return int(share * 2.0**64)


def is_heldout(content_hash: int, share: float) -> bool:
    """Whether one document is held out, without knowing any other."""
    return content_hash < threshold(share)


def heldout_mask(hashes_N: np.ndarray, share: float | None, count: int | None) -> np.ndarray:
    """Boolean [N], True for documents to hold out: by share of all possible hashes, or the `count` smallest.

    Copies go together, so that `count` may be exceeded by copies of the last one. Of two documents or more,
    each side gets at least one.
    """
    assert (share is None) != (count is None), "either a share or a count"
    distinct = np.unique(hashes_N)
    if share is not None:
        mask_N = hashes_N < np.uint64(threshold(share))
        wanted = 1 if not mask_N.any() else len(distinct) - 1 if mask_N.all() else None
    else:
        assert count is not None
        if count < 1:
            raise DataError(f"a held-out count of {count} holds out nothing", "give 1 or more")
        wanted, mask_N = min(count, len(distinct) - 1), np.zeros(len(hashes_N), bool)
    if wanted is not None and len(distinct) > 1:
        mask_N = hashes_N <= distinct[wanted - 1]
    return mask_N


def left_out(count: int, why: str) -> str:
    """Why documents were left out, and how many, as a sentence.

    Example:
        >>> left_out(2, "empty")
        '2 documents are empty and were left out'
    """
    what, are, were = ("document", "is", "was") if count == 1 else ("documents", "are", "were")
    return f"{count} {what} {are} {LEFT_OUT[why]} and {were} left out"


def nothing_left(name: str, counts: Counts) -> DataError:
    """The error for a source without any usable document."""
    counted = [f"{count} {LEFT_OUT[why]}" for why, count in counts.left_out().items()]
    why = f": {' and '.join(counted)} were skipped" if counted else ""
    if counts.complaint:
        return DataError(
            f"{name} contains no usable rows{why}", f"repair the rows; the first: {counts.complaint}"
        )
    if counts.untrained:
        return DataError(
            f"{name} contains nothing to train on{why}",
            "give conversations with answers, or set train_on: all to train on everything",
        )
    return DataError(f"{name} contains no documents{why}", "use a source that contains text")


def nothing_packed(name: str, lost: int, max_seq_length: int) -> DataError:
    """The error for a source that yields no sequence."""
    if lost:
        return DataError(
            f"all {lost} examples of {name} have nothing to train on within max_seq_length ({max_seq_length} tokens)",
            "raise max_seq_length, or shorten the text before the answers",
        )
    return DataError(f"{name} contains no documents", "use a source that contains text")


def cut_note(name: str, cut: int, lost: int, max_seq_length: int) -> str:
    """What was cut, in a sentence.

    Example:
        >>> cut_note("chats.jsonl", 3, 0, 512)
        'chats.jsonl: 3 examples are longer than max_seq_length (512) and are truncated'
    """
    what, are = ("example", "is") if cut == 1 else ("examples", "are")
    text = f"{name}: {cut} {what} {are} longer than max_seq_length ({max_seq_length}) and {are} truncated"
    if lost:
        has, are = ("has", "is") if lost == 1 else ("have", "are")
        text += f"; {lost} of them {has} nothing to train on before that point and {are} left out"
    return text
