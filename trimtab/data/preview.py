"""Previews of data for the user: how a source begins, and which text of an example is trained on."""

from __future__ import annotations

import itertools
from typing import Any

from trimtab.data.examples import TrainingExample
from trimtab.data.interface import Corpus
from trimtab.data.readers import SegmentReader, text_column_of
from trimtab.data.readers_csv import DELIMITERS, delimiter_of, usual_delimiter
from trimtab.data.sources import TABLES, ResolvedSource
from trimtab.facts.names import shortened
from trimtab.text.markers import markers
from trimtab.text.streaming import Detokenizer
from trimtab.text.tokenizer import Tokenizer

TextRuns = list[tuple[str, bool]]

SHOWN = 70
"""Characters of the first document that are shown."""
_LOOKED_AT = 100


def describe_beginning(source: ResolvedSource, *, template: bool = False) -> str:
    """One printable line with the detected format of a source and the beginning of its first document.

    Args:
        source: the files, with the detected format.
        template: whether there is a chat template.

    Example:
        >>> describe_beginning(resolve(SourceSpec("rows.csv")))                        # doctest: +SKIP
        "text column 'body', separated by semicolons; first document: 'Once upon a time …'"
    """
    segments = itertools.islice(SegmentReader(source, template=template), _LOOKED_AT)
    shown = next((segment for segment in segments if segment.text.strip() or segment.example), None)
    file = source.files[shown.file if shown is not None else 0]
    parts = []
    if source.form is not None:
        parts.append(f"format {source.form.name}")
    elif file.kind in TABLES:
        column = text_column_of(file, source.spec)
        parts.append("rows of strings" if column is None else f"text column '{shortened(column)}'")
    if file.kind == "csv" and delimiter_of(file) != usual_delimiter(file):
        parts.append(f"separated by {DELIMITERS[delimiter_of(file)]}")
    if len(source.files) > 1:
        parts.append(f"{len(source.files):,} files")
    if source.ignored:
        some = ", ".join(shortened(name, 40) for name in source.ignored[:3])
        more = f" and {len(source.ignored) - 3:,} more" if len(source.ignored) > 3 else ""
        parts.append(f"skipped (not text): {some}{more}")
    what = "first document" if source.form is None else "first example"
    words = "" if shown is None else _words(shown.example) if shown.example else shown.text
    first = f"{what}: '{shortened(words, SHOWN)}'"
    return f"{', '.join(parts)}; {first}" if parts else first


def _words(example: TrainingExample) -> str:
    if example.conversation is None:
        return " ".join(text for text, _ in example.parts)
    return " ".join(
        f"{message['role']}: {message.get('content')}" for message in example.conversation.messages
    )


def highlight_example(
    corpus: Corpus, tokenizer: Tokenizer, *, max_seq_length: int = 1024, number: int = 0
) -> dict[str, Any]:
    """A piece of a corpus as a record: `origin`, the number of `tokens` and of `trained` tokens, whether it was
    truncated to the sequence length (`cut`), the ids of the special tokens that end trained spans (`ends`), and the
    text as a list of (text, trained) (`runs`).

    Args:
        corpus: of examples or of texts, cached or streamed.
        tokenizer: the tokenizer that the corpus was opened with.
        max_seq_length: tokens of a sequence.
        number: index of the trained piece, from 0.

    Raises:
        DataError: there is nothing to train on.

    Example:
        >>> highlight_example(open_corpus("chats.jsonl", tokenizer), tokenizer)["runs"]      # doctest: +SKIP
        [('<|user|>Hi<|assistant|>', False), ('Hello!<|end|>', True)]
    """
    piece, cut = corpus.piece(number, max_seq_length)
    flags = [i > 0 and (piece.trained is None or bool(piece.trained[i])) for i in range(len(piece.ids))]
    return {
        "kind": "example",
        "step": 0,
        "source": corpus.display_name,
        "origin": piece.origin,
        "tokens": len(piece.ids),
        "trained": sum(flags),
        "cut": cut,
        "ends": sorted(_ends(tokenizer, piece.ids.tolist(), flags, cut)),
        "runs": text_runs(tokenizer, piece.ids.tolist(), flags),
    }


def _ends(tokenizer: Tokenizer, ids: list[int], flags: list[bool], cut: bool) -> set[int]:
    """The ids of special tokens that end trained spans, apart from white space after them."""
    marks = {*tokenizer.stop_ids, *markers(tokenizer)}
    ends = set()
    for i, flag in enumerate(flags):
        last = i + 1 == len(flags)
        if not flag or (cut if last else flags[i + 1]):
            continue
        while i > 0 and flags[i] and ids[i] not in marks and not tokenizer.backend.decode([ids[i]]).strip():
            i -= 1
        if flags[i] and ids[i] in marks:
            ends.add(ids[i])
    return ends


def text_runs(tokenizer: Tokenizer, ids: list[int], flags: list[bool]) -> TextRuns:
    """The text of ids in runs of equal flags, special tokens as text; a character of several tokens belongs to the
    last one.
    """
    stream = Detokenizer(tokenizer, skip_special=False)
    runs: TextRuns = []
    for token_id, flag in zip(ids, flags, strict=True):
        _add(runs, stream.push(token_id), flag)
    _add(runs, stream.finish(), flags[-1] if flags else False)
    return runs


def _add(runs: TextRuns, text: str, flag: bool) -> None:
    if not text:
        return
    if runs and runs[-1][1] == flag:
        runs[-1] = (runs[-1][0] + text, flag)
    else:
        runs.append((text, flag))
