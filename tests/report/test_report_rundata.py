"""Reading a run folder: valid data are read, damaged data are counted or refused with a remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import CheckpointError
from trimtab.report import read_run
from trimtab.report.closing import closing_summary
from trimtab.report.page import render
from trimtab.report.rundata import _record

MakeRun = Callable[..., Path]
TRAIN = {
    "kind": "train",
    "step": 1,
    "loss": 2.0,
    "lr": 1e-3,
    "grad_norm": 1.0,
    "tokens": 10,
    "tokens_per_second": 5.0,
    "seconds": 2.0,
    "memory_bytes": 7,
}

EVAL = {"kind": "eval", "step": 0, "name": "domain", "loss": 1.0, "perplexity": 2.7}


def test_a_complete_run_is_read(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run(learnt))
    assert data.damaged_lines == 0
    assert len(data.of("train")) == 300
    assert data.eval_names() == ["domain", "general"]
    assert data.device == "cpu"
    pair = data.before_after("eval", name="general")
    assert pair is not None
    assert [r["step"] for r in pair] == [0, 300]
    memory = data.memory("peak")
    assert memory is not None
    assert memory["activations"] == 447 * 2**20


def test_strings_for_nonfinite_numbers(make_run: MakeRun) -> None:
    rows = [{**TRAIN, "loss": w} for w in ("NaN", "Infinity", "-Infinity")]
    losses = [r["loss"] for r in read_run(make_run(rows)).of("train")]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"kind": "train", "step": 1',
        "[1, 2]",
        "null",
        "7",
        '{"step": 1}',
        '{"kind": "unheard-of", "step": 1}',
        '{"kind": ["train"]}',
        "[" * 100_000,
        '{"kind": "train", "step": 1}',
        json.dumps({**TRAIN, "loss": "two"}),
        json.dumps({**TRAIN, "loss": None}),
        json.dumps({**TRAIN, "loss": True}),
        json.dumps({**TRAIN, "step": -1}),
        json.dumps({**TRAIN, "step": 1.5}),
        json.dumps({**TRAIN, "tokens": 10**30}),
        json.dumps({**TRAIN, "loss": 10**400}),
        '{"kind": "probe", "step": 0, "scores": [1]}',
        '{"kind": "probe", "step": 0, "scores": {"grammar": "high"}}',
        '{"kind": "answers", "step": 0, "exact": 1, "total": 2, "by_topic": {"a": [1]}}',
        '{"kind": "answers", "step": 0, "exact": 1, "total": 2, "by_topic": {}, "right": "12"}',
        '{"kind": "probe", "step": 0, "scores": {}, "right": {"grammar": [1, 0]}}',
        '{"kind": "probe", "step": 0, "scores": {}, "items": {"grammar": -1}}',
        json.dumps({**EVAL, "units": [1.0]}),
        json.dumps({**EVAL, "units": {"unit": "document", "losses": [1.0, 2.0], "tokens": [3]}}),
        json.dumps({**EVAL, "units": {"unit": "document", "losses": [1.0], "tokens": [0]}}),
        json.dumps({**EVAL, "units": {"unit": "document", "losses": ["NaN"], "tokens": [1]}}),
        json.dumps({**EVAL, "units": {"unit": 7, "losses": [1.0], "tokens": [1]}}),
        json.dumps({**EVAL, "units": {"unit": "document", "losses": [1.0], "tokens": 1}}),
        '{"kind": "sample", "step": 0, "prompt": 1, "completion": "x"}',
        '{"kind": "memory", "when": "peak", "weights": "big"}',
        '{"kind": "example", "step": 0, "origin": "a:1", "tokens": 2, "trained": 1, "cut": false, "runs": ["x"]}',
        "\x00\x00\x00",
    ],
)
def test_damaged_lines_are_counted_and_the_rest_is_read(make_run: MakeRun, line: str) -> None:
    data = read_run(make_run([TRAIN, line, {**TRAIN, "step": 2}]))
    assert data.damaged_lines == 1
    assert [r["step"] for r in data.of("train")] == [1, 2]


def test_an_empty_checkpoint_folder_does_not_count(make_run: MakeRun) -> None:
    run = make_run([TRAIN])
    checkpoint = run / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    assert read_run(run).problems() == []
    (checkpoint / "manifest.json").write_text("{}")
    assert read_run(run).problems() == ["metrics.jsonl lacks steps 2 to 3 of 3: they are not shown"]


def test_bytes_that_are_not_text(make_run: MakeRun) -> None:
    folder = make_run([TRAIN])
    with (folder / "metrics.jsonl").open("ab") as log:
        log.write(b"\xff\xfe\x00binary\n")
    (folder / "recipe.yaml").write_bytes(b"model: \xff\n")
    data = read_run(folder)
    assert data.damaged_lines == 1
    assert data.recipe == "model: \ufffd\n"


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("NaN")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["train", "eval", "probe", "answers", "sample", "memory", "event"])
FIELDS = st.sampled_from(
    [
        "step",
        "loss",
        "lr",
        "name",
        "scores",
        "exact",
        "total",
        "by_topic",
        "prompt",
        "completion",
        "when",
        "weights",
    ]
)


@given(KINDS, st.dictionaries(FIELDS, VALUES))
def test_any_json_is_read_or_counted_as_damaged(kind: str, fields: dict[str, Any]) -> None:
    record = _record(json.dumps({"kind": kind, **fields}))
    if record is not None and "loss" in fields and kind == "train":
        assert isinstance(record["loss"], int | float)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(["model", "memory", "data", "time", "disk", "choices", "notes"]), VALUES)
def test_any_plan_is_rendered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, group: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_text(json.dumps(TRAIN) + "\n")
    (folder / "plan.json").write_text(json.dumps({"version": 1, group: value}))
    data = read_run(folder)
    assert "Curves" in render(data)
    closing_summary(data)


def test_missing_folders_and_files_have_remedies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no metrics.jsonl; give a run folder"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        read_run(tmp_path / "file")


@pytest.mark.parametrize("name", ["plan.json", "choices.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_damaged_json_files_are_named(make_run: MakeRun, name: str, content: str) -> None:
    folder = make_run([TRAIN])
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged.*restore it") as caught:
        read_run(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_damaged_environment_is_reported(make_run: MakeRun, content: str) -> None:
    folder = make_run([TRAIN])
    (folder / "environment.json").write_text(content)
    data = read_run(folder)
    assert data.environment == {}
    (flaw,) = data.problems()
    assert "environment.json is damaged" in flaw
    assert flaw.endswith(": versions and machine are not shown")


@pytest.mark.parametrize(
    "change",
    [
        {"memory": {"peak": {"weights": "many"}}},
        {"model": {"name": 3, "family": "llama", "parameters": 1}},
        {"data": {"windows": -1}},
        {"time": {"seconds": "soon"}},
    ],
)
def test_a_plan_of_wrong_types_is_refused(make_run: MakeRun, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"plan.json is damaged"):
        read_run(make_run([TRAIN], plan=change))


def test_a_plan_of_a_newer_version_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(CheckpointError, match=r"format version 2.*newer trimtab"):
        read_run(make_run([TRAIN], plan={"version": 2}))


def test_a_run_without_steps_has_its_metrics(make_run: MakeRun) -> None:
    data = read_run(make_run([], plan=None, recipe=None))
    assert data.records == {}
    assert data.plan == {}
    assert data.device is None
