"""Writes rows to a file, opens it as a corpus, and reads the pieces of its batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.data import Batch, CachedCorpus, SourceSpec, highlight_example, open_corpus
from trimtab.text.tokenizer import Tokenizer

ASKED = {"role": "user", "content": "Add."}
ANSWERED = {"role": "assistant", "content": "4"}
QUESTION = {"role": "user", "content": "What is two plus two?"}
ANSWER = {"role": "assistant", "content": "It is four."}
SAME = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "conversations with roles": {"conversations": [QUESTION, ANSWER]},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": QUESTION["content"]},
            {"from": "gpt", "value": ANSWER["content"]},
        ]
    },
    "other names": {"dialog": [{"role": "Human", "content": QUESTION["content"]}, {**ANSWER, "role": "model"}]},
    "lists of messages": {"prompt": [QUESTION], "completion": [ANSWER]},
    "a string and a list": {"prompt": QUESTION["content"], "completion": [ANSWER]},
    "alpaca": {"instruction": QUESTION["content"], "input": "", "output": ANSWER["content"], "text": "no"},
    "parts": {"messages": [{**QUESTION, "content": [{"type": "text", "text": QUESTION["content"]}]}, ANSWER]},
    "json in a string": {"messages": json.dumps([QUESTION, ANSWER])},
    "lists as json in strings": {"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])},
    "a string and json in one": {"prompt": QUESTION["content"], "completion": f" {json.dumps([ANSWER])}"},
    "question and answer": {"question": QUESTION["content"], "answer": ANSWER["content"]},
}  # fmt: skip


def write(path: Path, rows: list[Any]) -> Path:
    """Writes rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, tokenizer: Tokenizer, **spec: Any) -> CachedCorpus:
    """Opens the file as a corpus, with its cache next to it."""
    return open_corpus(SourceSpec(str(path), **spec), tokenizer, cache_dir=path.parent / "cache", num_proc=1)


def runs(path: Path, tokenizer: Tokenizer, number: int = 0, **spec: Any) -> list[tuple[str, bool]]:
    """The texts of an example in order, each with whether it is trained on."""
    found: list[tuple[str, bool]] = highlight_example(
        opened(path, tokenizer, **spec), tokenizer, number=number
    )["runs"]
    return found


def pieces(batch: Batch) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(origin, ids, labels) of every piece of a batch."""
    found = []
    for b, origins in enumerate(batch.origins):
        for number, origin in enumerate(origins):
            here = batch.documents_BT[b] == number
            ids, labels = batch.input_ids_BT[b][here].tolist(), batch.labels_BT[b][here].tolist()
            found.append((origin, tuple(ids), tuple(labels)))
    return found


def epoch_of(loader: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """The pieces of all batches up to the end of an epoch."""
    found = []
    while True:
        found += [piece for batch in loader.next_step() for piece in pieces(batch)]
        if loader.epoch == int(loader.epoch):
            return found


def assert_numbered(parts: list[list[Batch]]) -> None:
    """Checks that microbatches of all ranks, in order, have the index of their first sequence in the step."""
    begun = 0
    for batch in (batch for part in parts for batch in part):
        count = sum(map(bool, batch.origins))
        assert batch.to("cpu").first_sequence == (begun if count else 0)
        begun += count
