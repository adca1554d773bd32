"""A tokenizing process: texts in on stdin, token ids out on stdout, until stdin ends.

Run as a script by `tokenizing.py` and importing nothing of trimtab, so that it starts in a fraction of a
second, needs no `if __name__ == "__main__"` in anybody's program (as multiprocessing's spawn would),
unpickles nothing, and ends by itself when its parent dies, however it dies.

A frame is int64 fields, little-endian: in, the count n, n byte lengths (negative where the text continues a
document), then the UTF-8 texts; out, n, n token counts, n content hashes (uint64), then all ids (uint32). The
first frame in is two texts: the JSON of the tokenizer and of the one for continued texts.
"""

from __future__ import annotations

import hashlib
import sys
from typing import IO, Any

import numpy as np

Text = tuple[bytes, bool]
"""UTF-8, and whether it continues a document whose beginning was another text."""


def load(tokenizer_json: str) -> Any:
    """The `tokenizers.Tokenizer` that a JSON text describes, without padding and truncation."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_pair(tokenizer_json: str, continued_json: str) -> tuple[Any, Any]:
    """The tokenizers for texts that begin a document and for those that continue one, often the same."""
    tokenizer = load(tokenizer_json)
    return tokenizer, tokenizer if continued_json == tokenizer_json else load(continued_json)


def encode(pair: tuple[Any, Any], texts: list[Text]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids of all texts, token count of each, content hash of each); special tokens are not added."""
    counts_N = np.empty(len(texts), "<i8")
    hashes_N = np.empty(len(texts), "<u8")
    parts = []
    for i, (raw, continued) in enumerate(texts):
        tokenizer = pair[continued]
        # One text a call: tokenizers' own threads would fight with the other processes.
        (encoding,) = tokenizer.encode_batch_fast([raw.decode("utf-8")], add_special_tokens=False)
        parts.append(np.array(encoding.ids, dtype="<u4"))
        counts_N[i] = len(parts[-1])
        hashes_N[i] = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
    return np.concatenate(parts) if parts else np.empty(0, "<u4"), counts_N, hashes_N


def write_texts(stream: IO[bytes], texts: list[Text]) -> None:
    """Sends one frame of texts."""
    lengths = [-len(raw) if continued else len(raw) for raw, continued in texts]
    stream.write(np.array([len(texts), *lengths], "<i8").tobytes())
    stream.writelines(raw for raw, _ in texts)
    stream.flush()


def read_texts(stream: IO[bytes]) -> list[Text] | None:
    """Receives one frame of texts; None when the other side has closed."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    lengths = np.frombuffer(_exactly(stream, 8 * int(np.frombuffer(head, "<i8")[0])), "<i8")
    return [(_exactly(stream, abs(length)), length < 0) for length in lengths.tolist()]


def write_tokens(stream: IO[bytes], ids: np.ndarray, counts: np.ndarray, hashes: np.ndarray) -> None:
    """Sends one frame of tokens."""
    stream.write(np.array([len(counts)], "<i8").tobytes() + counts.tobytes() + hashes.tobytes())
    stream.write(ids.tobytes())
    stream.flush()


def read_tokens(stream: IO[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Receives one frame of tokens: (ids, counts, hashes)."""
    n = int(np.frombuffer(_exactly(stream, 8), "<i8")[0])
    counts = np.frombuffer(_exactly(stream, 8 * n), "<i8")
    hashes = np.frombuffer(_exactly(stream, 8 * n), "<u8")
    return np.frombuffer(_exactly(stream, 4 * int(counts.sum())), "<u4"), counts, hashes


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
    pair = load_pair(*(raw.decode("utf-8") for raw, _ in first))
    while (texts := read_texts(stdin)) is not None:
        write_tokens(stdout, *encode(pair, texts))


if __name__ == "__main__":
    main()
