"""The comparison of two commits: it detects flipped bits, changed names, missing cases; its cases cover the recipe."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools.sameness import store
from tools.sameness.actions import ACTION_FUNCTIONS, _ended
from tools.sameness.case import ACTIONS, Case
from tools.sameness.compare import compare, difference
from tools.sameness.coverage import NOT_COVERED, covered, uncovered, wanted
from tools.sameness.recording import exact, read_tensors
from tools.sameness.sets import DEVICES, base_of, cases_of
from tools.sameness.store import Recording
from trimtab.api import RunResult
from trimtab.recipe import Recipe, build

LOSS = 5.6974029541015625
VALUES = {"step 1 loss": exact(LOSS), "step 1 grad_norm": exact(1.5), "checkpoint a.weight": "F32 [2] 0a1b"}
ONE = Recording("one", "parent", VALUES)


def changed(**values: str) -> Recording:
    return dataclasses.replace(ONE, commit="head", values={**VALUES, **values})


def test_a_flipped_last_bit_is_reported() -> None:
    assert difference(ONE, changed()) is None
    wrong = difference(ONE, changed(**{"step 1 loss": exact(math.nextafter(LOSS, 9.0))}))
    assert wrong is not None
    assert wrong.startswith('step 1 loss: "0x1.6ca2')


def test_a_flipped_bit_of_a_tensor_changes_its_checksum(tmp_path: Path) -> None:
    weight = np.ones((2, 3), dtype=np.float32)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    before = read_tensors(tmp_path)
    weight[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    assert before.keys() == read_tensors(tmp_path).keys() == {"a.weight"}
    assert before != read_tensors(tmp_path)


def test_a_changed_name_a_new_one_and_a_missing_case_are_reported() -> None:
    renamed = {name.replace("a.weight", "b.weight"): value for name, value in VALUES.items()}
    other = dataclasses.replace(ONE, values=renamed)
    assert difference(ONE, other) == "checkpoint a.weight is gone; new: checkpoint b.weight"
    assert difference(ONE, changed(**{"step 2 loss": exact(1.0)})) == "step 2 loss is new"
    assert difference(ONE, None) == "missing in the head"


def test_a_failure_in_one_commit_differs_and_the_same_in_both_is_named() -> None:
    failed = Recording("one", "head", error="ModelError: no")
    assert difference(ONE, failed) == "fails now: ModelError: no"
    assert difference(failed, ONE) == "failed before: ModelError: no"
    (verdict,) = compare([Case("one")], {"one": failed}, {"one": failed}, {})
    assert (verdict.different, verdict.text[:13]) == (False, "FAILS IN BOTH")


@pytest.mark.parametrize("where", ["resumed", "handed over"])
def test_a_resumed_run_must_equal_the_unstopped_one(where: str) -> None:
    cases = [Case("one"), Case("two", stop_at=1, same_as="one")]
    two, wrong = dataclasses.replace(ONE, case="two"), changed(**{"step 1 loss": exact(1.0)})
    sides = {"one": ONE, "two": wrong if where == "resumed" else two}
    taken = {"handover/two": wrong if where == "handed over" else two}
    found = [one.case for one in compare(cases, sides, sides, taken) if one.different]
    assert found == (["two = one"] if where == "resumed" else ["handover/two"])


def test_recordings_continue_after_a_truncated_line(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    store.append(file, ONE)
    with file.open("a") as out:
        out.write('{"case": "tw\n')
    store.append(file, dataclasses.replace(ONE, case="three"))
    store.append(file, dataclasses.replace(ONE, case="four", commit="other"))
    assert list(store.read(file, "parent")) == ["one", "three"]
    assert store.read(file, "parent")["one"] == ONE


@pytest.mark.parametrize("device", DEVICES)
def test_all_recipes_are_valid(device: str, tmp_path: Path) -> None:
    cases = cases_of(device)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for case in cases:
        build(case.recipe(base_of(device), tmp_path))
        assert set(case.then) <= set(ACTIONS)
        assert case.same_as is None or case.same_as in names
    assert set(ACTION_FUNCTIONS) == set(ACTIONS)


def test_every_key_and_value_of_the_recipe_is_covered_or_has_a_reason() -> None:
    assert uncovered(Recipe) == []
    known, have = set(wanted(Recipe)), covered()
    assert [one for one in NOT_COVERED if one not in known or one in have] == [], (
        "reasons that are out of date"
    )
    assert "lr_scheduler_type=cosine" in known
    assert "recompute=offload_half" in known


def test_an_interrupted_run_is_no_recording() -> None:
    _ended(RunResult(Path("run"), "finished", 3))
    with pytest.raises(KeyboardInterrupt):
        _ended(RunResult(Path("run"), "interrupted", 2))
    with pytest.raises(RuntimeError, match="ended as stopped, not finished"):
        _ended(RunResult(Path("run"), "stopped", 2))
