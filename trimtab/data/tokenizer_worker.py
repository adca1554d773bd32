"""A tokenizer process: reads texts from stdin and writes token ids to stdout, until stdin ends.

Run as a script by `tokenizer_pool.py` and importing nothing of trimtab, so that it starts in a fraction of a
second, needs no `if __name__ == "__main__"` in the caller's program (as multiprocessing's spawn would),
unpickles nothing, and exits when its parent dies, even by kill -9.

Messages are frames of little-endian int64 fields, followed by data:

    request    the number n of texts; n byte lengths (negative if the text continues a document); n span counts (-1 if
               all of a text is trained on); the spans (start and end in characters); the UTF-8 texts
    response   n; whether a loss mask follows; n token counts; n content hashes (uint64); all ids (uint32); the mask,
               one byte per token, 1 if it is trained on

The first request has two texts: the JSON of the tokenizer, and of the tokenizer for texts that continue a document.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import numpy as np

Spans = Sequence[tuple[int, int]]


class TextChunk(NamedTuple):
    """A UTF-8 text, whether it continues a document that began in another text, and the spans of characters that are
    trained on (None: all of them, without a mask).
    """

    raw: bytes
    continued: bool = False
    spans: Spans | None = None


class Tokens(NamedTuple):
    """Ids of all texts [tokens], token count of each [N], content hash of each [N], and the loss mask [tokens] if any
    text has spans.
    """

    ids: np.ndarray
    counts_N: np.ndarray
    hashes_N: np.ndarray
    trained: np.ndarray | None = None


def load(tokenizer_json: str) -> Any:
    """Loads a `tokenizers.Tokenizer` from JSON, without padding, truncation and post-processing.

    Special tokens are never added here, and the post-processors of byte-level tokenizers would remove the spaces from
    tokens' offsets.
    """
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = processors.Sequence([])
    return tokenizer


def load_pair(tokenizer_json: str, continued_json: str) -> tuple[Any, Any]:
    """The tokenizers for texts that begin a document and for those that continue one, often the same."""
    tokenizer = load(tokenizer_json)
    return tokenizer, tokenizer if continued_json == tokenizer_json else load(continued_json)


def encode(pair: tuple[Any, Any], texts: Sequence[TextChunk]) -> Tokens:
    """Tokens of texts; special tokens are not added."""
    counts_N = np.empty(len(texts), "<i8")
    hashes_N = np.empty(len(texts), "<u8")
    parts, masks = [], []
    masked = any(text.spans is not None for text in texts)
    for i, (raw, continued, spans) in enumerate(texts):
        tokenizer, text = pair[continued], raw.decode("utf-8")
        # One text per call: tokenizers' own threads would compete with other processes. The fast one has no offsets.
        encode_batch = tokenizer.encode_batch_fast if spans is None else tokenizer.encode_batch
        (encoding,) = encode_batch([text], add_special_tokens=False)
        parts.append(np.array(encoding.ids, dtype="<u4"))
        if masked:
            masks.append(
                np.ones(len(parts[-1]), np.uint8) if spans is None else mask_of(encoding.offsets, spans)
            )
        counts_N[i] = len(parts[-1])
        hashes_N[i] = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
    ids = np.concatenate(parts) if parts else np.empty(0, "<u4")
    return Tokens(ids, counts_N, hashes_N, np.concatenate(masks) if masked else None)


def mask_of(offsets: Sequence[tuple[int, int]], spans: Spans) -> np.ndarray:
    """uint8 [tokens]: 1 for a token that has a character in a span, as in Hugging Face's assistant masks.

    Example:
        >>> mask_of([(0, 3), (3, 5), (5, 9)], [(4, 6)]).tolist()
        [0, 1, 1]
    """
    trained_T = np.zeros(len(offsets), np.uint8)
    if offsets and spans:
        bounds_T2 = np.array(offsets, np.int64)
        begin_T, end_T = bounds_T2[:, 0], np.maximum(bounds_T2[:, 1], bounds_T2[:, 0] + 1)
        for start, end in spans:
            trained_T |= (begin_T < end) & (end_T > start) & (start < end)
    return trained_T


def write_texts(stream: IO[bytes], texts: Sequence[TextChunk]) -> None:
    """Sends one frame of texts."""
    lengths = [-len(text.raw) if text.continued else len(text.raw) for text in texts]
    counts = [-1 if text.spans is None else len(text.spans) for text in texts]
    spans = [bound for text in texts for span in text.spans or () for bound in span]
    stream.write(np.array([len(texts), *lengths, *counts, *spans], "<i8").tobytes())
    stream.writelines(text.raw for text in texts)
    stream.flush()


def read_texts(stream: IO[bytes]) -> list[TextChunk] | None:
    """Receives one frame of texts; None when the other side has closed."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    n = int(np.frombuffer(head, "<i8")[0])
    fields = np.frombuffer(_exactly(stream, 16 * n), "<i8").tolist()
    lengths, counts = fields[:n], fields[n:]
    total = sum(max(0, count) for count in counts)
    bounds = iter(np.frombuffer(_exactly(stream, 16 * total), "<i8").tolist())
    spans = [None if count < 0 else [(next(bounds), next(bounds)) for _ in range(count)] for count in counts]
    return [
        TextChunk(_exactly(stream, abs(length)), length < 0, span)
        for length, span in zip(lengths, spans, strict=True)
    ]


def write_tokens(stream: IO[bytes], tokens: Tokens) -> None:
    """Sends one frame of tokens."""
    masked = tokens.trained is not None
    stream.write(np.array([len(tokens.counts_N), masked], "<i8").tobytes())
    stream.write(tokens.counts_N.tobytes() + tokens.hashes_N.tobytes())
    stream.write(tokens.ids.tobytes())
    if tokens.trained is not None:
        stream.write(tokens.trained.tobytes())
    stream.flush()


def read_tokens(stream: IO[bytes]) -> Tokens:
    """Receives one frame of tokens."""
    n, masked = np.frombuffer(_exactly(stream, 16), "<i8").tolist()
    counts_N = np.frombuffer(_exactly(stream, 8 * n), "<i8")
    hashes_N = np.frombuffer(_exactly(stream, 8 * n), "<u8")
    total = int(counts_N.sum())
    ids = np.frombuffer(_exactly(stream, 4 * total), "<u4")
    trained = np.frombuffer(_exactly(stream, total), np.uint8) if masked else None
    return Tokens(ids, counts_N, hashes_N, trained)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError(f"the pipe closed after {len(data)} of {size} bytes")
    return data


def main() -> None:
    """Serves until stdin closes."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    first = read_texts(stdin)
    if first is None:
        return
    pair = load_pair(*(text.raw.decode("utf-8") for text in first))
    while (texts := read_texts(stdin)) is not None:
        write_tokens(stdout, encode(pair, texts))


if __name__ == "__main__":
    main()
