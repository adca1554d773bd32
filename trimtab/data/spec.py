"""Names, limits and memory costs of data as plain numbers, for the planner; imports nothing."""

from __future__ import annotations

from typing import Literal

DocumentMode = Literal["file", "blank-lines", "lines"]
DOCUMENT_MODES: tuple[str, ...] = ("file", "blank-lines", "lines")
"""How a text file becomes documents: the whole file, split at blank lines, or one per line."""

FormatName = Literal["auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca"]
FORMATS: tuple[str, ...] = ("auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca")
"""The format of a table's rows: plain text, or training examples with answers."""

TrainOn = Literal["completions", "last", "all"]
TRAIN_ON: tuple[str, ...] = ("completions", "last", "all")
"""Which tokens of an example are trained on: every answer, the last answer, or all tokens."""

BadRows = Literal["stop", "skip"]
BAD_ROWS: tuple[str, ...] = ("stop", "skip")
"""What to do with a row that is not a valid example or that the chat template rejects."""

TEXT_COLUMNS = (
    "text",
    "content",
    "document",
    "body",
    "raw_content",
    "markdown",
    "article",
    "passage",
    "contents",
)
"""Column names tried for the text when a recipe sets none, most common first."""

SEGMENT_CHARS = 1 << 17
"""The longest segment of a document passed to the tokenizer at once: tokenizing takes about 120 bytes per
token.
"""

BATCH_CHARS = 1 << 18
"""Characters per batch sent to a tokenizer process."""

BATCH_EXAMPLES = 256
"""Conversations per batch sent to the chat template's process."""

MIN_SEQ_LENGTH = 4
"""The smallest sequence length: shorter sequences have hardly any targets."""

CHUNK_PIECES = 1 << 15
UNKNOWN_SIZE = 1
"""A placeholder for the bytes of rows that are streamed from Python, which are unknown."""
IGNORE_INDEX = -100


def chunk_tokens(max_seq_length: int) -> int:
    """Tokens per packing chunk: enough that its last, less full sequences do not matter.

    Example:
        >>> chunk_tokens(1024), chunk_tokens(65536)
        (1048576, 4194304)
    """
    return max(1 << 20, 64 * max_seq_length)


def token_bytes(vocab_size: int) -> int:
    """Bytes of one cached token.

    Example:
        >>> token_bytes(49152), token_bytes(151936)
        (2, 4)
    """
    return 2 if vocab_size <= 1 << 16 else 4


def cache_bytes(num_tokens: int, num_documents: int, vocab_size: int, *, masked: bool = False) -> int:
    """Disk space of a corpus in the token cache: the tokens, 32 bytes per document, and one byte per token for
    the loss mask of conversations.
    """
    return num_tokens * (token_bytes(vocab_size) + masked) + 32 * num_documents


def batch_bytes(batch_size: int, max_seq_length: int) -> int:
    """Device memory of one Batch: ids, labels and positions of 8 bytes, document indices of 4.

    Example:
        >>> batch_bytes(4, 1024)
        114688
    """
    return batch_size * max_seq_length * 28


def estimate_tokens(text_bytes: int) -> int:
    """Estimates the number of tokens before tokenizing: four bytes of English text per token."""
    return text_bytes // 4
