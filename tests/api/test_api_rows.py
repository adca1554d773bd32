"""`data=`: rows from Python train like the same rows in a file, resume exactly, and fail with their number."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import CHATS, TEXTS, quiet, tiny_recipe

import trimtab
from trimtab.api.rows import DataArgument
from trimtab.cli.main import main


def test_rows_train_as_the_same_rows_in_a_file(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, eval_steps=3)
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    runs = []
    for number, data in enumerate(
        [
            {**recipe["data"], "train": str(file)},
            CHATS,
            ({"messages": chat} for chat in CHATS),
            {**recipe["data"], "train": [{"messages": chat, "source": "wiki"} for chat in CHATS]},
        ]
    ):
        runs.append(trimtab.train(recipe, data=data, view=quiet(), output_dir=str(tmp_path / f"run{number}")))
    assert all(run.losses == runs[0].losses for run in runs[1:])
    assert runs[1].evaluations == runs[0].evaluations
    examples = [run.data().of("example")[0] for run in runs]
    assert examples[1]["runs"] == examples[0]["runs"]
    assert (examples[1]["source"], examples[1]["origin"].split(":")[0]) == ("data", "data")


def test_lone_surrogates_in_rows_are_replaced_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a file."""
    recipe = tiny_recipe(tmp_path, max_steps=1)
    trimtab.train(recipe, data=["a\ud800b the cat sees", *TEXTS])
    assert "data: in 1 document unpaired Unicode surrogates" in " ".join(capsys.readouterr().out.split())


def test_keys_by_name_and_a_recipe_file_without_data(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    section = {**recipe["data"], "train": [{"text": text} for text in TEXTS]}
    by_name = trimtab.train(**{**recipe, "data": section}, view=quiet())
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    other = trimtab.train(
        tmp_path / "recipe.yaml", data=TEXTS, view=quiet(), output_dir=str(tmp_path / "other")
    )
    assert by_name.losses == other.losses
    assert trimtab.plan_run(tmp_path / "recipe.yaml", data=TEXTS)["data"]["steps"] == 3


def test_the_default_length_fits_the_model(tmp_path: Path) -> None:
    """The tiny model has 128 positions, and max_seq_length is 1024 by default."""
    recipe = {
        key: value for key, value in tiny_recipe(tmp_path, max_steps=1).items() if key != "max_seq_length"
    }
    run = trimtab.train(recipe, data=TEXTS, view=quiet())
    assert "max_seq_length: 128\n" in (run.folder / "recipe.yaml").read_text()
    with pytest.raises(trimtab.TrimtabError, match="max_seq_length 1024 is beyond the model's 128"):
        trimtab.train(recipe, data=TEXTS, view=quiet(), max_seq_length=1024, output_dir=str(tmp_path / "b"))


def halfway(recipe: dict[str, Any], data: Any, **more: Any) -> trimtab.RunResult:
    """A run of six steps that is stopped after the third."""

    class Stop(trimtab.Callback):
        def on_step_end(self, control: Any) -> None:
            if control.step == 3:
                control.stop()

    return trimtab.train(recipe, data=data, view=quiet(), max_steps=6, callbacks=[Stop()], **more)


@pytest.mark.parametrize("streaming", [False, True])
def test_resume_continues_exactly_and_refuses_other_rows(
    tmp_path: Path, streaming: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.data.stream_sequences.chunk_tokens", lambda max_seq_length: 200)
    recipe = tiny_recipe(tmp_path)
    recipe["data"]["streaming"] = streaming

    def rows() -> Iterator[str]:
        return itertools.cycle(TEXTS) if streaming else iter(TEXTS)

    whole = trimtab.train(recipe, data=rows(), view=quiet(), max_steps=6, output_dir=str(tmp_path / "whole"))
    assert whole.step == 6
    stopped = halfway(recipe, rows())
    assert (stopped.status, stopped.step) == ("stopped", 3)
    others = [*TEXTS[:4], "another text", *TEXTS[5:]]
    where = "" if streaming else r" \(row 5 differs\)"
    with pytest.raises(
        trimtab.TrimtabError,
        match=f"data is not the data with which .* was started{where}; pass the same rows",
    ):
        trimtab.resume(stopped.folder, data=others, view=quiet())
    with pytest.raises(
        trimtab.TrimtabError, match=r"data contains \./other, but a resumed run uses the data"
    ):
        trimtab.resume(stopped.folder, data="./other", view=quiet())
    if not streaming:
        shutil.rmtree(tmp_path / "cache")
    assert main(["train", "--resume", str(stopped.folder)]) == 3
    assert "were passed from Python, are not in the cache" in "".join(capsys.readouterr())
    assert trimtab.resume(stopped.folder, data=rows(), view=quiet()).losses == whole.losses


def test_rows_that_change_after_the_first_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream is named after its first 16 rows; later rows are compared up to the end of the last chunk."""
    monkeypatch.setattr("trimtab.data.stream_sequences.chunk_tokens", lambda max_seq_length: 1000)
    recipe = tiny_recipe(tmp_path)
    recipe["data"]["streaming"] = True
    stopped = halfway(recipe, TEXTS)
    with pytest.raises(
        trimtab.TrimtabError, match=r"data: the rows before row \d+ are not those that the run"
    ):
        trimtab.resume(stopped.folder, data=[*TEXTS[:17], "another text", *TEXTS[18:]], view=quiet())
    assert trimtab.resume(stopped.folder, data=TEXTS, view=quiet()).status == "finished"


def test_the_command_line_resumes_rows_that_are_in_the_cache(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=6, output_dir=str(tmp_path / "whole"))
    stopped = halfway(recipe, iter(TEXTS))
    assert main(["train", "--resume", str(stopped.folder)]) == 0
    assert trimtab.RunResult(stopped.folder, "finished", 6).losses == whole.losses


def test_a_key_selects_cached_rows(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    first = trimtab.train(recipe, data=TEXTS, data_key="texts-1", view=quiet())
    assert "memory:texts-1" in (first.folder / "recipe.yaml").read_text()

    def never() -> Iterator[str]:
        raise AssertionError("the rows are known")

    again = trimtab.train(
        recipe, data=never, data_key="texts-1", view=quiet(), output_dir=str(tmp_path / "two")
    )
    assert again.losses == first.losses
    with pytest.raises(
        trimtab.TrimtabError, match=r"data_key is 'texts-2', but .* was started with 'texts-1'"
    ):
        trimtab.resume(first.folder, data=TEXTS, data_key="texts-2", view=quiet())
    with pytest.raises(trimtab.TrimtabError, match="data_key 'a b' is not a valid name"):
        trimtab.train(recipe, data=TEXTS, data_key="a b", view=quiet())
    with pytest.raises(trimtab.TrimtabError, match="data_key is given without rows"):
        trimtab.train(recipe, data="./texts", data_key="a", view=quiet())


def test_train_and_eval_with_options(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    measured = [{"text": text} for text in TEXTS[30:]]
    data = {
        **recipe["data"],
        "train": [{"source": [{"body": t} for t in TEXTS[:30]], "text_column": "body", "weight": 2.0}],
        "eval": {"general": measured},
    }
    run = trimtab.train(recipe, data=data, view=quiet())
    assert {one.name for one in run.evaluations} == {"domain", "general"}
    alone = trimtab.train(
        recipe,
        data={**recipe["data"], "train": [{"text": t} for t in TEXTS[:30]], "eval": measured},
        view=quiet(),
        output_dir=str(tmp_path / "two"),
    )
    assert {one.name for one in alone.evaluations} == {"domain"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (["a b", 3], "row 2 of data is 3 (int)"),
        ([], "data has no rows"),
        ([[{"role": "king", "content": "x"}]], "data:1: messages[0] has the role 'king'"),
        ([{"text": "a b"}, {"text": 5}], "column 'text' of data:2 contains a number, not text"),
        ([{"title": "a", "verse": "b"}], "data has no obvious text column; its columns: title, verse"),
        ({"eval": []}, "data is a mapping without 'train' (it has eval)"),
        ({"train": ["two words", "and more"]}, "train of data is a list of strings, which name files"),
        (5, "data is 5 (int), which has no rows"),
    ],
)
def test_bad_rows_fail_with_their_number(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(trimtab.TrimtabError) as raised:
        trimtab.train(tiny_recipe(tmp_path), data=data, view=quiet())
    assert said in raised.value.cause
    assert not (tmp_path / "run").exists()


def test_a_list_of_files_is_not_trained_on_as_their_names(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(trimtab.TrimtabError, match="which is a file or folder"):
        DataArgument.of([str(file)])
    assert DataArgument.of({"train": [str(file)]}).rows == {}
    mixed = DataArgument.of({"train": [str(file), iter(TEXTS)]})
    assert mixed.section["train"] == [str(file), {"source": "memory:train.1"}]


def test_recipe_errors_are_reported_before_rows_are_read(tmp_path: Path) -> None:
    def never() -> Iterator[str]:
        raise AssertionError

    recipe = tiny_recipe(tmp_path)
    with pytest.raises(trimtab.TrimtabError, match="learning_rate"):
        trimtab.train(recipe, data=never, view=quiet(), lerning_rate=1.0)
    trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=1)
    with pytest.raises(trimtab.TrimtabError, match="already contains a run"):
        trimtab.train(recipe, data=never, view=quiet())


def test_streams_with_equal_first_rows_have_different_names(tmp_path: Path) -> None:
    """A stream is named after its first 16 rows, and an evaluation list after all of its rows."""
    from trimtab.api.rows import DataArgument
    from trimtab.recipe import build

    head = [f"the cat sees {i}" for i in range(16)]
    own, old, measured = [*head, *["a dog"] * 5], [*head, *["a tree"] * 5], list(head)
    data: dict[str, Any] = {
        "train": [{"source": own}],
        "replay": {"share": 0.5, "sources": [{"source": old}]},
        "eval": [{"source": measured}],
    }
    recipe = tiny_recipe(tmp_path)
    given = DataArgument.of({**recipe["data"], **data, "streaming": True})
    built, passed = given.store(build({**recipe, "data": given.section}), quiet())
    assert built.data.replay is not None
    sources = (built.data.train[0], built.data.replay.sources[0], built.data.eval.domain[0])
    streams = [passed[source.source].stream for source in sources]
    assert [stream and [value for _, value in stream.values()] for stream in streams] == [own, old, None]
    # On resume, equal rows get the same names, and different rows are refused.
    again = DataArgument.of(data).store_for_resume(built, quiet(), tmp_path)
    assert set(again) == {source.source for source in sources}
    same = {**recipe["data"], **data, "streaming": True}
    assert set(DataArgument.of(same).store_for_resume(built, quiet(), tmp_path)) == set(again)
    with pytest.raises(
        trimtab.TrimtabError, match="data contains eval_sequences, but a resumed run uses the data"
    ):
        DataArgument.of({**same, "eval_sequences": 7}).store_for_resume(built, quiet(), tmp_path)
    data["train"] = [{"source": ["another", *own[1:]]}]
    with pytest.raises(trimtab.TrimtabError, match=r"is not the data with which .* was started"):
        DataArgument.of(data).store_for_resume(built, quiet(), tmp_path)


def test_streamed_rows_end_or_are_combined_with_files(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe["data"]["streaming"] = True
    file = tmp_path / "a.txt"
    file.write_text("the cat sees a dog")
    with pytest.raises(trimtab.TrimtabError, match="are streamed together with"):
        trimtab.train(recipe, data={**recipe["data"], "train": [str(file), iter(TEXTS)]}, view=quiet())
    with pytest.raises(trimtab.TrimtabError, match="max_steps"):
        trimtab.train(recipe, data=itertools.cycle(TEXTS), view=quiet(), max_steps=-1)

    def failing() -> Iterator[str]:
        yield from TEXTS
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        trimtab.train(recipe, data=failing(), view=quiet())


def test_a_list_of_sources_names_files_and_rows(tmp_path: Path) -> None:
    from trimtab.api.rows import DataArgument

    given = DataArgument.of([{"source": str(tmp_path / "a.txt"), "weight": 2}, {"source": TEXTS}])
    assert given.section["train"][0] == {"source": str(tmp_path / "a.txt"), "weight": 2}
    assert given.rows == {("train", 1): TEXTS}
    rows = [{"source": "int main() {}"}, {"source": "def f(): ..."}]  # texts in a column of this name
    assert DataArgument.of(rows).rows == {("train", 0): rows}
