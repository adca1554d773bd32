"""What is trained on, to be looked at: an example's text in stretches that are trained on and such that are not."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

from trimtab.data.batch import Piece
from trimtab.data.corpus import Corpus
from trimtab.data.loader import PackedCorpus
from trimtab.data.stream_corpus import StreamCorpus
from trimtab.data.streaming import Cursor, Reading, nothing_streamed
from trimtab.text.markers import markers
from trimtab.text.streaming import Detokenizer
from trimtab.text.tokenizer import Tokenizer

Runs = list[tuple[str, bool]]


def highlighted(
    corpus: Corpus | StreamCorpus, tokenizer: Tokenizer, *, max_seq_length: int = 1024, number: int = 0
) -> dict[str, Any]:
    """One piece of a corpus as a record: `origin`, `tokens`, how many of them are `trained`, whether it was `cut` at
    the window's end, the special tokens that close what is trained on as `ends`, ids, and `runs`, its text as [text,
    trained on].

    Args:
        corpus: of examples or of texts, cached or streamed.
        tokenizer: the one it was opened with.
        max_seq_length: tokens of a window.
        number: which of the pieces that are trained on, from 0.

    Raises:
        DataError: there is nothing to train on.

    Example:
        >>> highlighted(open_corpus("chats.jsonl", tokenizer), tokenizer)["runs"]      # doctest: +SKIP
        [('<|user|>Hi<|assistant|>', False), ('Hello!<|end|>', True)]
    """
    piece, cut = _piece(corpus, max_seq_length, number)
    flags = [i > 0 and (piece.trained is None or bool(piece.trained[i])) for i in range(len(piece.ids))]
    return {
        "kind": "example",
        "step": 0,
        "source": corpus.shown,
        "origin": piece.origin,
        "tokens": len(piece.ids),
        "trained": sum(flags),
        "cut": cut,
        "ends": sorted(_ends(tokenizer, piece.ids.tolist(), flags, cut)),
        "runs": runs_of(tokenizer, piece.ids.tolist(), flags),
    }


def _ends(tokenizer: Tokenizer, ids: list[int], flags: list[bool], cut: bool) -> set[int]:
    """The special tokens that end stretches which are trained on, white space after them aside."""
    marks = {*tokenizer.stop_ids, *markers(tokenizer)}
    found = set()
    for i, flag in enumerate(flags):
        last = i + 1 == len(flags)
        if not flag or (cut if last else flags[i + 1]):
            continue
        while i > 0 and flags[i] and ids[i] not in marks and not tokenizer.backend.decode([ids[i]]).strip():
            i -= 1
        if flags[i] and ids[i] in marks:
            found.add(ids[i])
    return found


def runs_of(tokenizer: Tokenizer, ids: list[int], flags: list[bool]) -> Runs:
    """The text of ids in stretches of equal flags, special tokens spelled out; a character of several tokens belongs
    to its last one.
    """
    stream = Detokenizer(tokenizer, skip_special=False)
    runs: Runs = []
    for token_id, flag in zip(ids, flags, strict=True):
        _add(runs, stream.push(token_id), flag)
    _add(runs, stream.finish(), flags[-1] if flags else False)
    return runs


def _add(runs: Runs, text: str, flag: bool) -> None:
    if not text:
        return
    if runs and runs[-1][1] == flag:
        runs[-1] = (runs[-1][0] + text, flag)
    else:
        runs.append((text, flag))


def _piece(corpus: Corpus | StreamCorpus, max_seq_length: int, number: int) -> tuple[Piece, bool]:
    """The piece with this number, and whether its document goes on after it."""
    if isinstance(corpus, StreamCorpus):
        reading = Reading(dataclasses.replace(corpus, num_proc=1), max_seq_length, True, Cursor())
        seen = 0
        with closing(iter(reading)) as pieces:
            for _, piece in pieces:
                if seen == number:
                    return piece, len(piece.ids) == max_seq_length
                seen += 1
        if not seen:
            raise nothing_streamed(corpus, reading.skipped, max_seq_length)
        raise IndexError(number)
    packed = PackedCorpus(corpus, max_seq_length, True)
    pieces_P = packed.packing.pieces
    document, start = int(pieces_P.document_P[number]), int(pieces_P.start_P[number])
    end = start + int(pieces_P.length_P[number])
    trained = corpus.trained(document)
    mask = None if trained is None else trained[start:end]
    piece = Piece(corpus.tokens(document)[start:end], corpus.origin(document), mask)
    return piece, end < int(corpus.lengths_N[document])
