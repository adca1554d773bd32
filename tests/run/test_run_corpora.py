"""Opened data of a recipe: evaluation text is never trained on, and a resume checks every file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tiny_model import sentences, write_texts, write_tiny_model

from trimtab import text
from trimtab.facts.errors import DataError
from trimtab.recipe import build
from trimtab.run.corpora import Corpora, open_corpora


class Quiet:
    """A view that shows nothing."""

    def message(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> text.Tokenizer:
    return text.load(write_tiny_model(tmp_path_factory.mktemp("corpora") / "model"))


def opened(folder: Path, tokenizer: text.Tokenizer, kept: Any = None, **data: Any) -> Corpora:
    section = {
        "train": [str(folder / "train.jsonl")],
        "cache_dir": str(folder / "cache"),
        "num_proc": 1,
        **data,
    }
    recipe = build({"model": "x", "data": section, "max_seq_length": 64, "max_steps": 3})
    return open_corpora(recipe, tokenizer, Quiet(), pins=kept)


def trained_texts(corpora: Corpora, tokenizer: text.Tokenizer, **data: Any) -> set[str]:
    """Every document of one epoch of the training data, as text."""
    from trimtab.parallel import Mesh

    section = {"train": ["x"], "replay": {"share": 0.5, "sources": ["x"]} if corpora.replay else None, **data}
    recipe = build(
        {
            "model": "x",
            "data": section,
            "max_seq_length": 1000,
            "max_steps": 1,
            "per_device_train_batch_size": 1000,
            "gradient_accumulation_steps": 1,
        }
    )
    found = set()
    for batch in dataclasses.replace(corpora, recipe=recipe).loader(Mesh.single()).next_step():
        for ids, documents in zip(batch.input_ids_BT, batch.documents_BT, strict=True):
            for number in set(documents.tolist()) - {-1}:
                found.add(tokenizer.decode(ids[documents == number].tolist()))
    return found


@pytest.mark.parametrize("streaming", [False, True])
def test_evaluation_text_is_not_trained_on(
    tmp_path: Path, tokenizer: text.Tokenizer, streaming: bool
) -> None:
    write_texts(tmp_path / "train.jsonl", 1, 30)
    write_texts(tmp_path / "replay.jsonl", 2, 30)
    import json

    measured = [*sentences(1, 30)[:5], *sentences(2, 30)[:5]]
    rows = "".join(json.dumps({"text": row}) + "\n" for row in measured)
    (tmp_path / "eval.jsonl").write_text(rows)
    corpora = opened(
        tmp_path,
        tokenizer,
        streaming=streaming,
        replay={"share": 0.5, "sources": [str(tmp_path / "replay.jsonl")]},
        eval={"domain": [str(tmp_path / "eval.jsonl")]},
    )
    trained = trained_texts(corpora, tokenizer, streaming=streaming)
    assert trained & set(measured) == set()
    assert set(sentences(1, 30)[5:]) <= trained


@pytest.mark.parametrize("changed", ["train", "replay", "domain", "general"])
def test_every_changed_file_is_noticed(tmp_path: Path, tokenizer: text.Tokenizer, changed: str) -> None:
    for seed, name in enumerate(("train", "replay", "domain", "general")):
        write_texts(tmp_path / f"{name}.jsonl", seed, 20)
    data = {
        "replay": {"share": 0.5, "sources": [str(tmp_path / "replay.jsonl")]},
        "eval": {name: [str(tmp_path / f"{name}.jsonl")] for name in ("domain", "general")},
    }
    kept = opened(tmp_path, tokenizer, **data).pins()
    opened(tmp_path, tokenizer, kept, **data)  # as it was: fine
    write_texts(tmp_path / f"{changed}.jsonl", 99, 20)
    with pytest.raises(DataError, match=f"{changed}.jsonl"):
        opened(tmp_path, tokenizer, kept, **data)


def test_all_of_the_training_text_held_out_is_an_error(tmp_path: Path, tokenizer: text.Tokenizer) -> None:
    write_texts(tmp_path / "train.jsonl", 1, 5)
    with pytest.raises(DataError):
        opened(tmp_path, tokenizer, eval={"domain": [str(tmp_path / "train.jsonl")]})


def test_replaced_characters_are_reported(tmp_path: Path, tokenizer: text.Tokenizer) -> None:
    class Listening(Quiet):
        said: ClassVar[list[str]] = []

        def message(self, text: str) -> None:
            self.said.append(text)

    rows = ["the cat sees \ud83d a dog.", "a dog runs."]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = {"train": [str(tmp_path / "some.jsonl")], "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    recipe = build({"model": "x", "data": data, "max_seq_length": 64, "max_steps": 3})
    open_corpora(recipe, tokenizer, Listening())
    assert [note for note in Listening.said if "U+FFFD" in note] == [
        f"{tmp_path / 'some.jsonl'}: in 1 document unpaired Unicode surrogates were replaced by U+FFFD"
    ]


def test_held_out_text_of_a_source_is_in_no_other_source(tmp_path: Path, tokenizer: text.Tokenizer) -> None:
    """Each source has at least one held-out document, and which one depends on its other documents."""
    words = [" ".join(sentences(seed, 3)) for seed in range(24)]
    shared_by_chance = 0
    for case in range(8):
        for name, picked in (("a", words[: 2 + case]), ("b", words[: 12 + case])):
            rows = "".join(json.dumps({"text": word}) + "\n" for word in picked)
            (tmp_path / f"{name}{case}.jsonl").write_text(rows)
        sources = [str(tmp_path / f"{name}{case}.jsonl") for name in "ab"]
        corpora = opened(tmp_path, tokenizer, train=sources, eval_share=0.01)
        heldout = {int(h) for part in corpora.evaluation["domain"] for h in part.records_N["hash"]}
        kept = {int(h) for part, _ in corpora.train for h in part.records_N["hash"]}
        assert heldout
        assert not heldout & kept
        first, second = corpora.evaluation["domain"]
        shared_by_chance += set(first.records_N["hash"]) != set(second.records_N["hash"])
    assert shared_by_chance, "where both hold out the same, nothing was tested"
