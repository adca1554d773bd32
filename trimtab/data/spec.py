"""Names, limits and costs of data as plain numbers; imports nothing, so that a planner can add them up."""

from __future__ import annotations

from typing import Literal

DocumentMode = Literal["file", "blank-lines", "lines"]
DOCUMENT_MODES: tuple[str, ...] = ("file", "blank-lines", "lines")
"""How a text file becomes documents: whole, cut at blank lines, or one a line."""

FormatName = Literal["auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca"]
FORMATS: tuple[str, ...] = ("auto", "text", "messages", "sharegpt", "prompt-completion", "alpaca")
"""What a row of a table is: a text, or an example of what to answer."""

TrainOn = Literal["completions", "last", "all"]
TRAIN_ON: tuple[str, ...] = ("completions", "last", "all")
"""Which tokens of an example are trained on: every answer, the last one, or everything."""

BadRows = Literal["stop", "skip"]
BAD_ROWS: tuple[str, ...] = ("stop", "skip")
"""What becomes of a row that is no example, or that the chat template refuses."""

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
"""Columns taken for the text when a recipe names none, most usual first."""

SEGMENT_CHARS = 1 << 17
"""Longest stretch of a document given to the tokenizer at once: it keeps about 120 bytes a token while it
works.
"""

BATCH_CHARS = 1 << 18
"""Characters that travel to a tokenizing process together."""

BATCH_EXAMPLES = 256
"""Conversations that travel to a template's process together."""

MIN_SEQ_LENGTH = 4
"""A window holds at least this many tokens: shorter ones have hardly a target."""

CHUNK_PIECES = 1 << 15
UNKNOWN_SIZE = 1
"""Stands for the bytes of rows that are streamed from Python: how many there will be is not known."""
IGNORE_INDEX = -100


def chunk_tokens(max_seq_length: int) -> int:
    """Tokens after which a chunk of documents is packed: windows enough that the last ones do not matter.

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
    """Disk that the token cache of a corpus takes: 32 bytes a document beside the tokens, and a byte a token for
    conversations, of which not all is trained on.
    """
    return num_tokens * (token_bytes(vocab_size) + masked) + 32 * num_documents


def batch_bytes(batch_size: int, max_seq_length: int) -> int:
    """Device memory of one Batch: ids, labels and positions of 8 bytes, document numbers of 4.

    Example:
        >>> batch_bytes(4, 1024)
        114688
    """
    return batch_size * max_seq_length * 28


def estimate_tokens(text_bytes: int) -> int:
    """A guess before tokenizing: four bytes of English text a token."""
    return text_bytes // 4
