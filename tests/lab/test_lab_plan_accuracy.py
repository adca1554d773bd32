"""The accuracy sweep: its lists, its tables, what it does with failures and stops, and three tiny cases on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_accuracy import __main__ as sweep
from benchmarks.plan_accuracy import inputs, rounds, table, worker
from benchmarks.plan_accuracy.cases import LISTS, METHODS, Case
from benchmarks.plan_accuracy.durations import start_seconds, step_seconds, steps_of, timed_seconds
from benchmarks.plan_accuracy.readings import predicted, step_times
from benchmarks.plan_accuracy.rounds import CONTEXT_BYTES, Moment, Rounds
from trimtab.facts.calibration import Calibration
from trimtab.facts.calibration_file import read_calibration
from trimtab.lab.records import append_record, read_records
from trimtab.recipe import build

DEVELOPMENT, HELD_OUT = LISTS["development"], LISTS["held-out"]


def test_the_lists_cover_what_is_promised() -> None:
    both = (*DEVELOPMENT, *HELD_OUT)
    assert len(both) >= 80
    assert abs(len(DEVELOPMENT) - len(HELD_OUT)) <= 4
    assert len({case.name for case in both}) == len(both)
    assert len({case.model for case in HELD_OUT} - {case.model for case in DEVELOPMENT}) >= 3
    assert len({case.model for case in both}) >= 6
    for cases in (DEVELOPMENT, HELD_OUT):
        assert {case.method for case in cases} == set(METHODS)
        assert {512, 65_536} <= {case.tokens for case in cases}
        assert {case.packed for case in cases} == {True, False}
        options = [case.options for case in cases]
        assert len({one["recompute"] for one in options if "recompute" in one}) >= 5
        for key, least in (("limit", 4), ("optim", 4), ("graphs", 5), ("compile", 2), ("accumulation", 2)):
            assert sum(key in one for one in options) >= least, key
        assert sum(case.tokens > 40_000 for case in cases) <= 2, "they take long"


def test_every_case_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "model_folder", lambda root, model, device: (root / model, "random"))
    monkeypatch.setattr(inputs, "documents_file", lambda root, case, sequences: root / "documents")
    for case in (*DEVELOPMENT, *HELD_OUT):
        recipe = build(inputs.recipe_of(case, tmp_path, tmp_path / "run", "cuda"))
        steps = steps_of(case)
        assert recipe.max_steps > steps.total, "the last step would save a checkpoint"
        assert recipe.logging_steps == steps.together
        assert recipe.max_seq_length == case.tokens


@pytest.mark.parametrize("line", ["gpt-5 full 1x1", "qwen3-0.6b full 1-1", "qwen3-0.6b full 1x1 speed=9"])
def test_invalid_options_are_rejected(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a case|unknown keys speed"):
        Case.parse(line)


def test_documents_fill_sequences(tmp_path: Path) -> None:
    whole = Case.parse("tiny-llama-8b full 2x64")
    texts = [json.loads(line)["text"].split() for line in inputs.documents_file(tmp_path, whole, 5).open()]
    assert [len(words) for words in texts] == [63] * 5
    packed = Case.parse("tiny-llama-8b full 2x64 packed")
    texts = [json.loads(line)["text"].split() for line in inputs.documents_file(tmp_path, packed, 50).open()]
    assert sum(len(words) + 1 for words in texts) >= 50 * 64
    assert len({len(words) for words in texts}) > 10
    assert max(len(words) for words in texts) < 64


def test_step_times_leave_the_first_group_out() -> None:
    rates = [10.0] * 3 + [1000.0] * 3 + [500.0] * 3
    rows: list[dict[str, Any]] = [{"kind": "event"}]
    rows += [{"kind": "train", "tokens": 100 * n, "tokens_per_second": r} for n, r in enumerate(rates, 1)]
    found = step_times(rows, 3)
    assert found["step_seconds"] == pytest.approx(0.15)
    assert found["first_seconds"] == pytest.approx(10.0)
    assert found["spread"] == pytest.approx(0.1 / 0.15)
    assert found["steps"] == 6
    later = step_times(rows, 1, warm_up=6)
    assert later["step_seconds"] == pytest.approx(100 / 500)
    assert later["steps"] == 3


def test_step_times_leave_the_pause_out() -> None:
    rows = [
        {"kind": "train", "tokens": 100 * n, "tokens_per_second": r}
        for n, r in enumerate([10.0, 100 / 4.5, 200.0, 200.0], 1)
    ]
    found = step_times(rows, 1, warm_up=1, waited=4.0)
    assert found["step_seconds"] == pytest.approx(0.5)
    assert found["spread"] == pytest.approx(0.0)


def fake_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, **settings: Any) -> Rounds:
    """Rounds whose processes run a script instead of a case; `log` is a file that they append to."""
    real = rounds.subprocess.Popen
    begin = (
        "import json, sys, time\n"
        "order, out = json.loads(sys.stdin.readline()), open(sys.argv[1], 'a')\n"
        "case = order['case']\n"
        f"log = open({str(tmp_path / 'log')!r}, 'a')\n"
        "def reach(moment, **facts):\n"
        "    print(json.dumps({'reached': moment, **facts}), file=out, flush=True)\n"
        "    assert sys.stdin.readline()\n"
        "def say(what):\n"
        "    print(what, case, file=log, flush=True)\n"
    )

    def popen(words: list[str], **more: Any) -> Any:
        return real([words[0], "-c", begin + script, words[-1]], **more)

    monkeypatch.setattr(rounds.subprocess, "Popen", popen)
    found: list[dict[str, Any]] = []
    made = Rounds("cpu", tmp_path, found.append, **settings)
    monkeypatch.setattr(made, "found", found, raising=False)
    return made


STEPS = """
reach("PLANNED", needs=40 if case.startswith("tiny-llama") else 20)
say("loads")
time.sleep(0.1)
reach("WARM")
say("begins")
time.sleep(0.2)
say("ends")
reach("MEASURED")
print(json.dumps({"case": case, "run_s": 1.0, "predicted": {}, "measured": {}}), file=out, flush=True)
"""


def test_steps_are_timed_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_rounds(tmp_path, monkeypatch, STEPS, at_once=3)
    assert not made.run(LISTS["cpu"])
    assert sorted(record["case"] for record in made.found) == sorted(case.name for case in LISTS["cpu"])  # type: ignore[attr-defined]
    events = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    assert [what for what, _ in events[:3]] == ["loads"] * 3, "all are loaded before one is timed"
    for before, after in zip(events[3::2], events[4::2], strict=True):
        assert (before[0], after[0]) == ("begins", "ends")
        assert before[1] == after[1]


def test_only_what_fits_together_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_rounds(tmp_path, monkeypatch, STEPS, at_once=3)
    monkeypatch.setattr(made, "_budget", lambda: 60)
    assert not made.run(LISTS["cpu"])
    assert len(made.found) == 3  # type: ignore[attr-defined]
    events = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    assert [what for what, _ in events] == [
        "loads",
        "loads",
        *["begins", "ends"] * 2,
        "loads",
        "begins",
        "ends",
    ]


def test_the_budget_leaves_memory_for_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rounds("cuda", tmp_path, print, at_once=4)
    monkeypatch.setattr(rounds, "gpu_memory", lambda which: {"total": 100 * 2**30}[which])
    assert made._budget() == pytest.approx(95 * 2**30 - 4 * CONTEXT_BYTES)


def test_the_process_has_what_becomes_free_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = STEPS.replace('"measured": {}', '"measured": {"reserved": 70, "reserved_last": 60}')
    made = fake_rounds(tmp_path, monkeypatch, script)
    made.device = "cuda"
    monkeypatch.setattr(made, "_budget", lambda: 1000)
    readings = iter(
        [500, 450, 435, 435]
    )  # before the process ends, and until two readings after it are equal
    monkeypatch.setattr(rounds, "gpu_memory", lambda which: next(readings))
    made.run(LISTS["cpu"][:1])
    assert made.found[0]["measured"] == {"reserved": 70, "process": 500 - 435 + 70 - 60}  # type: ignore[attr-defined]


def test_a_case_without_progress_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_rounds(tmp_path, monkeypatch, "time.sleep(60)", case_seconds=0.3)
    assert not made.run(LISTS["cpu"][:1])
    (found,) = made.found  # type: ignore[attr-defined]
    assert found == {"case": LISTS["cpu"][0].name, "failed": "stopped after 0 s", "log": []}


def test_the_end_of_the_time_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(rounds, "start_seconds", lambda case, work: 0.0)
    monkeypatch.setattr(rounds, "timed_seconds", lambda case: 0.0)
    made = fake_rounds(tmp_path, monkeypatch, "time.sleep(60)", until=rounds.time.monotonic() + 0.5)
    assert made.run(LISTS["cpu"][:1])
    assert made.found == []  # type: ignore[attr-defined]
    assert all(worker.process.poll() is not None for worker in made.workers)


def test_cases_that_take_too_long_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = Case.parse("llama-8b qlora 1x65536 limit=24GiB"), Case.parse("smollm2-135m full 8x512")
    written = start_seconds(long, tmp_path)
    assert timed_seconds(long) > 10 * timed_seconds(short)
    (tmp_path / "models" / "llama-8b").mkdir(parents=True)
    assert start_seconds(long, tmp_path) < written - 20, "its weights need not be written first"
    made = fake_rounds(tmp_path, monkeypatch, STEPS, at_once=3, until=rounds.time.monotonic() + 60)
    waiting = [long, short]
    made._start(waiting)
    assert waiting == [long]
    for one in made.workers:
        one.close()


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    pauses = worker.Pauses(tmp_path / "out.jsonl", (tmp_path / "orders").open("a+"))
    with pytest.raises(worker.Abandoned):
        pauses.wait(Moment.WARM)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"reached": "WARM"}


def test_steps_are_few_and_have_a_warm_up() -> None:
    for case in (*LISTS["development"], *LISTS["held-out"]):
        steps = steps_of(case)
        assert steps.together * steps.warm_up >= 3, "a CUDA graph is captured in the third step"
        assert steps.timed >= 2
        assert steps.total <= 48
        if step_seconds(case) > 2:
            assert steps.total == 5


def test_a_calibration_of_the_same_commit_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep.subprocess, "run", lambda *_, **__: pytest.fail("it is not measured again"))
    made = Calibration("a GPU", {"bf16": 1e14}, 1e12, 5e-6)
    where = {"commit": "abc", "device": "a GPU"}
    other = tmp_path / "plan-accuracy-development-a-gpu.jsonl"
    append_record(other, {"calibration_of": "abc", **where, "calibration": made.to_dict()})
    path = tmp_path / "plan-accuracy-held-out-a-gpu.jsonl"
    sweep.calibrate(path, sweep.parser().parse_args([]), where, where)
    assert read_calibration("a GPU") == made
    assert read_records(path, "calibration_of").keys() == {"abc"}


def record(case: str, told: float, seen: float, **more: Any) -> dict[str, Any]:
    sides = {}
    for name, factor in (("predicted", told), ("measured", seen)):
        sides[name] = {
            "allocated": factor * 1e9,
            "process": factor * 2e9,
            "step_seconds": factor,
            "buckets": {"weights": 5e8, "activations": factor * 1e9 - 5e8},
        }
    return {"case": case, "commit": "abc", **sides, **more}


def test_tables_have_errors_by_method_and_term() -> None:
    found = {
        one["case"]: one
        for one in (
            record("qwen3-0.6b full 4x1024", 1.02, 1.0),
            record("qwen3-0.6b full 4x4096 recompute=none", 0.96, 1.0),
            record("llama-8b qlora 2x2048", 1.0, 1.0),
            {"case": "llama-8b int8 2x2048 recompute=block", "failed": "out of memory"},
        )
    }
    text = table.markdown(found)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "3.00 % / -4.00 % (2)" in lines["full"]
    assert "0.00 % / +0.00 % (1)" in lines["qlora"]
    assert "(3)" in lines["all"]
    assert "2.00 % / -4.00 % (3)" in lines["activations"]
    assert lines["llama-8b int8 2x2048 recompute=block"].endswith("out of memory |")


def test_a_plan_without_a_time_has_no_error_of_it() -> None:
    told = predicted({"memory": {"peak": {"total": 4}, "needed": 8}, "time": {"basis": "unknown device"}})
    assert (told["allocated"], told["process"], told["step_seconds"]) == (4, 8, None)
    assert table.error({"predicted": told, "measured": {"step_seconds": 1.0}}, "step_seconds") is None
    told = predicted({"memory": {"needed": 8, "reserved": {"reserved": 5, "process": 6}}})
    assert (told["reserved"], told["process"]) == (5, 6)


def test_failures_are_kept_and_retried_only_on_demand(tmp_path: Path) -> None:
    path, cases, same = tmp_path / "out.jsonl", list(LISTS["cpu"]), {"commit": "abc", "device": "a GPU"}
    append_record(path, {"case": cases[0].name, **same})
    append_record(path, {"case": cases[1].name, **same, "failed": "out of memory"})
    append_record(path, {"case": cases[2].name, **same, "commit": "other"})
    assert sweep.missing(path, cases, same, retry=False) == cases[2:]
    assert sweep.missing(path, cases, same, retry=True) == cases[1:]


def test_a_worker_that_dies_is_recorded_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rounds(tmp_path, monkeypatch, "if case.startswith('tiny-qwen3'): sys.exit('killed')\n" + STEPS)
    monkeypatch.setattr(sweep.table, "markdown", lambda records: "")
    path = tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--list", "cpu", "--no-calibration", "--out", str(path), "--commit", "abc"]
    assert sweep.main([*words, "--at-once", "2"]) == 1
    found = read_records(path, "case")
    assert set(found) == {case.name for case in LISTS["cpu"]}
    assert found["tiny-qwen3-0.6b full 2x64"]["failed"] == "the process ended with 1: killed"
    assert found["tiny-qwen3-0.6b full 2x64"]["log"] == ["killed"]
    assert sum("failed" in one for one in found.values()) == 1
    assert sweep.main([*words, "--seconds", "0"]) == 1, "nothing is left to run, one has failed"


ABORTED = """
import faulthandler, os
faulthandler.enable()
print("capture_error_mode\\nterminate called after throwing an instance of 'c10::Error'")
print("  what():  uc >= 0 INTERNAL ASSERT FAILED")
for n in range(25):
    print(f"frame #{n}: here", flush=True)
os.abort()
"""


def test_the_record_of_an_aborted_process_has_its_error_and_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_rounds(tmp_path, monkeypatch, ABORTED)
    made.run(LISTS["cpu"][:1])
    (found,) = made.found  # type: ignore[attr-defined]
    assert found["failed"] == "the process ended with SIGABRT: what():  uc >= 0 INTERNAL ASSERT FAILED"
    assert found["log"][0].strip() == "what():  uc >= 0 INTERNAL ASSERT FAILED"
    assert found["log"][25] == "frame #24: here"
    assert "Fatal Python error: Aborted" in found["log"]
    assert any("most recent call first" in line for line in found["log"]), "the Python stack"


def test_an_excerpt_of_a_long_log_has_the_error_and_the_end() -> None:
    log = [*map(str, range(100)), "RuntimeError: full", *map(str, range(100, 200)), "x" * 1000]
    found = rounds.excerpt(log)
    assert found[0] == "RuntimeError: full"
    assert found[: rounds.LOG_LINES] == log[100 : 100 + rounds.LOG_LINES]
    assert found[rounds.LOG_LINES : -1] == log[-rounds.LOG_LINES : -1]
    assert len(found[-1]) == rounds.LINE_LENGTH
    assert rounds.excerpt([]) == []
    assert rounds.ending(-250, []) == "the process ended with signal 250: "


@pytest.mark.slow
def test_three_tiny_cases_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--list", "cpu", "--work", str(tmp_path / "work"), "--out", str(path)]
    words += ["--calibration-seconds", "2", "--commit", "abc", "--profile-above", "0"]
    assert sweep.main([*words, "--only", "qwen3"]) == 0
    assert sweep.main([*words, "--at-once", "2"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"] for line in lines if "case" in line] == [case.name for case in LISTS["cpu"]]
    calibrated = [line for line in lines if "calibration_of" in line]
    assert len(calibrated) == 1, "once for a commit"
    assert calibrated[0]["calibration"]["flops"]["fp32"] > 1e8
    assert list((tmp_path / "cache" / "trimtab" / "calibration").iterdir())
    for line in lines:
        if "case" in line:
            assert line["measured"]["allocated"] > 0
            assert line["predicted"]["allocated"] > 0
            assert line["measured"]["step_seconds"] > 0
            assert line["measured"]["process"] > line["measured"]["allocated"]
            assert {"commit", "device", "versions", "time"} <= set(line)
            profile = line["measured"]["profile"]
            assert profile["kernels"][0]["ms"] <= profile["busy_ms"] <= profile["host_ms"]
    assert not list((tmp_path / "work" / "runs").iterdir())


@pytest.mark.slow
def test_a_record_has_what_the_run_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train = worker.launch.train

    def saying(recipe: Any, view: Any, **settings: Any) -> Any:
        view.message("CUDA graph capture failed")
        return train(recipe, view, **settings)

    monkeypatch.setattr(worker.launch, "train", saying)
    found = worker.run(LISTS["cpu"][0], tmp_path, "cpu")
    assert "CUDA graph capture failed" in found["messages"]


@pytest.mark.slow
def test_a_stopped_case_writes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker.shutil, "rmtree", lambda folder, **_: None)
    reached: list[Moment] = []

    def wait(moment: Moment, **facts: Any) -> float:
        reached.append(moment)
        return 0.0

    found = worker.run(LISTS["cpu"][0], tmp_path, "cpu", wait)
    assert reached == [Moment.PLANNED, Moment.WARM, Moment.MEASURED]
    assert found["measured"]["steps"] == 3
    [folder] = (tmp_path / "runs").iterdir()
    assert not (folder / "checkpoints").exists()
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 6
    assert "profile" not in found["measured"]
