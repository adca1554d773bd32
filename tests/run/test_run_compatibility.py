"""Runs that were started with an earlier version of trimtab resume with that version's data and settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_model import sentences, write_recipe, write_texts
from whole_run import Silent, losses

from trimtab import launch
from trimtab.data import detection, fingerprints, preview, readers_csv
from trimtab.data.sources import SourceFile
from trimtab.facts.errors import DataError
from trimtab.plan.resolved_json import REQUIRED
from trimtab.recipe import Recipe, load
from trimtab.run import open_model
from trimtab.run.folder import read_json, write_json


class Stop(Exception):
    pass


def stop_at(wanted: int) -> object:
    def stop(step: int) -> None:
        if step == wanted:
            raise Stop

    return stop


def without_checkpoints(folder: Path) -> None:
    """Changes a run folder as if the run had been killed in its first step."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "metrics.jsonl").unlink()


def earlier(patch: pytest.MonkeyPatch) -> None:
    """Reads CSV as in versions that supported only commas and tabs, and used any first row as header."""
    for module in (preview, readers_csv, fingerprints):
        patch.setattr(module, "delimiter_of", readers_csv.usual_delimiter)
    patch.setattr(readers_csv, "_is_data", lambda fields: False)


def rows(kind: str) -> str:
    """CSV that is read differently today, or raises in a new run."""
    texts = sentences(1, 60)
    if kind == "question":
        return "\n".join(["What do you think about it?", *texts]) + "\n"
    if kind == "numbers":
        return "\n".join(["text;2", *(f"{text};{i}" for i, text in enumerate(texts))]) + "\n"
    assert kind == "uneven"
    return (
        "\n".join(["id;text", *(f"{i};{text}{' ; more' * (i % 2)}" for i, text in enumerate(texts))]) + "\n"
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["question", "numbers", "uneven"])
def test_a_csv_file_is_read_as_when_the_run_began(tmp_path: Path, kind: str, streaming: bool) -> None:
    (tmp_path / "rows.csv").write_text(rows(kind))
    data = {"train": [str(tmp_path / "rows.csv")], "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    data |= {"streaming": streaming, **({} if streaming else {"eval_share": 0.1})}
    settings = {
        "data": data,
        "max_steps": 5,
        "num_train_epochs": None,
        "logging_steps": 1,
        "eval_steps": None,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        earlier(patch)
        launch.train(load(write_recipe(tmp_path, output_dir=str(whole), **settings)), Silent())
        recipe = load(write_recipe(tmp_path, output_dir=str(stopped), **settings))
        with pytest.raises(Stop):
            launch.train(recipe, Silent(), after_step=stop_at(3))  # type: ignore[arg-type]
    launch.resume(stopped, [], Silent())
    assert losses(stopped) == losses(whole)
    # The file is still checked.
    (tmp_path / "rows.csv").write_text(rows(kind) + "one more row\n")
    with pytest.raises(DataError, match=r"has changed since the run began \(changed: rows.csv\)"):
        launch.resume(stopped, ["max_steps=7"], Silent())


def test_a_resumed_run_reads_semicolons_as_a_new_run_does(tmp_path: Path) -> None:
    """Also if commas would raise, because the named columns do not exist with them."""
    texts = [f"{i};a question;{text}" for i, text in enumerate(sentences(1, 60))]
    (tmp_path / "rows.csv").write_text("\n".join(["id;asked;said", *texts]) + "\n")
    source = {"source": str(tmp_path / "rows.csv"), "columns": {"prompt": "asked", "completion": "said"}}
    data = {"train": [source], "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    settings = {
        "data": data,
        "max_steps": 4,
        "num_train_epochs": None,
        "logging_steps": 1,
        "eval_steps": None,
    }
    with pytest.raises(Stop):
        launch.train(load(write_recipe(tmp_path, **settings)), Silent(), after_step=stop_at(3))  # type: ignore[arg-type]
    view = Silent()
    launch.resume(tmp_path / "run", [], view)
    assert len(losses(tmp_path / "run")) == 4
    assert any("separated by semicolons" in text for text in view.messages)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "{\\rtf1 a text that begins like RTF}"),
        ("a.jsonl", '{"prompt": "one", "chosen": [], "rejected": []}\n'),
    ],
)
def test_a_file_that_a_run_began_with_is_not_refused(tmp_path: Path, name: str, content: str) -> None:
    """New runs raise for a probable mistake; here the user cannot correct it any more."""
    import dataclasses

    from trimtab.data.readers import SegmentReader
    from trimtab.data.sources import SourceSpec, resolve

    (tmp_path / name).write_text(content)
    spec = SourceSpec(str(tmp_path / name))

    def read(spec: SourceSpec) -> list[str]:
        source = fingerprints.as_resumed(resolve(spec), None)
        source = dataclasses.replace(source, form=detection.detect(source))
        return [segment.text for segment in SegmentReader(source)]

    with pytest.raises(DataError):
        read(spec)
    assert len(read(dataclasses.replace(spec, original_fingerprints=frozenset()))) == 1


def test_the_order_of_a_run_that_has_no_checkpoint_yet(tmp_path: Path) -> None:
    """In earlier versions the first step could have replay alone; such a run trains on the same sequences."""
    from trimtab.data import cached_loader

    texts = [
        str(write_texts(tmp_path / f"{name}.jsonl", seed, 60)) for seed, name in enumerate(("own", "old"))
    ]
    data = {"train": texts[:1], "replay": {"share": 0.9, "sources": texts[1:]}, "eval_share": 0.1}
    data |= {"cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    settings = {
        "data": data,
        "max_steps": 4,
        "num_train_epochs": None,
        "logging_steps": 1,
        "eval_steps": None,
    }
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "save_steps": 3}
    whole, stopped, new = (tmp_path / name for name in ("whole", "stopped", "new"))

    def recipe(folder: Path) -> Recipe:
        return load(write_recipe(tmp_path, output_dir=str(folder), **settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cached_loader, "train_source_first", lambda source_E, window_E, *_: (source_E, window_E)
        )
        launch.train(recipe(whole), Silent())
        with pytest.raises(Stop):
            launch.train(recipe(stopped), Silent(), after_step=stop_at(2))  # type: ignore[arg-type]
    choices = json.loads((stopped / "choices.json").read_text())
    choices["data"].pop("own_text_first", None)
    (stopped / "choices.json").write_text(json.dumps(choices))
    without_checkpoints(stopped)
    launch.resume(stopped, [], Silent())
    assert losses(stopped) == losses(whole)
    # A run of this version has train text in the first step, restarted or not.
    with pytest.raises(Stop):
        launch.train(recipe(new), Silent(), after_step=stop_at(2))  # type: ignore[arg-type]
    first = losses(new)[0]
    without_checkpoints(new)
    launch.resume(new, [], Silent())
    assert losses(new)[0] == first != losses(whole)[0]


def test_dropout_masks_of_a_run_stay_those_of_its_version(tmp_path: Path) -> None:
    """Earlier versions drew them per microbatch; such a run resumes with the same masks, bit-identically."""
    from trimtab.run import build

    settings = {
        "max_steps": 4,
        "num_train_epochs": None,
        "logging_steps": 1,
        "eval_steps": None,
        "save_steps": 2,
    }
    settings |= {
        "lora": {"r": 4, "lora_dropout": 0.5},
        "learning_rate": 0.05,
        "gradient_accumulation_steps": 2,
    }
    whole, stopped, new = (tmp_path / name for name in ("whole", "stopped", "new"))

    def recipe(folder: Path) -> Recipe:
        return load(write_recipe(tmp_path, output_dir=str(folder), **settings))

    with pytest.MonkeyPatch.context() as patch:
        by_microbatch = build._dropout_masks
        patch.setattr(
            build, "_dropout_masks", lambda *args, by_sequence: by_microbatch(*args, by_sequence=False)
        )
        launch.train(recipe(whole), Silent())
        with pytest.raises(Stop):
            launch.train(recipe(stopped), Silent(), after_step=stop_at(3))  # type: ignore[arg-type]
    choices = json.loads((stopped / "choices.json").read_text())
    assert choices.pop("dropout_by_sequence") is True
    (stopped / "choices.json").write_text(json.dumps(choices))
    launch.resume(stopped, [], Silent())
    assert losses(stopped) == losses(whole)
    launch.train(recipe(new), Silent())
    assert losses(new) != losses(whole)


def test_a_known_delimiter_is_not_detected_again(tmp_path: Path) -> None:
    path = tmp_path / "gone.csv"
    assert readers_csv.delimiter_of(SourceFile(path, path.name, "csv", delimiter="|")) == "|"


def test_choices_json_of_the_first_runs(tmp_path: Path) -> None:
    """Their sections exist in every version: the run resumes bit-identically, and its model can be opened."""
    settings = {
        "max_steps": 4,
        "num_train_epochs": None,
        "logging_steps": 1,
        "save_steps": 2,
        "device": "cpu",
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    launch.train(load(write_recipe(tmp_path, output_dir=str(whole), **settings)), Silent())
    recipe = load(write_recipe(tmp_path, output_dir=str(stopped), **settings))
    with pytest.raises(Stop):
        launch.train(recipe, Silent(), after_step=stop_at(3))  # type: ignore[arg-type]
    kept = read_json(stopped / "choices.json")
    names = [*REQUIRED, "model_commit", "tokenizer_commit", "data", "recipe"]
    write_json(stopped / "choices.json", {"version": 1, **{name: kept[name] for name in names}})
    launch.resume(stopped, [], Silent())
    assert losses(stopped) == losses(whole)
    optimizer, of_whole = (
        read_json(folder / "plan.json")["choices"]["optimizer"] for folder in (stopped, whole)
    )
    assert {**optimizer, "reason": ""} == {**of_whole, "reason": ""}  # the section is of later versions
    # What is only opened needs less: the layout of its weights.
    write_json(stopped / "choices.json", {"version": 1, "recipe": kept["recipe"]})
    assert open_model(str(stopped), device=torch.device("cpu"), on_event=print).step == 4
