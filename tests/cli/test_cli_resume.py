"""Resuming with missing or damaged files: the remaining files determine how, and no metrics are lost silently."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_world import Call, World

from trimtab.recipe import load
from trimtab.report.summary import signed

Job = Callable[..., Path]


def rows(run: Path, kind: str) -> list[dict[str, float]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == kind]


def losses(run: Path) -> list[tuple[float, str]]:
    return [(row["step"], float(row["loss"]).hex()) for row in rows(run, "train")]


@pytest.fixture
def run(world: World, tmp_path: Path) -> Path:
    """A copy of the finished run: six steps, checkpoints at 4 and 6, the best at 3 or 6."""
    return shutil.copytree(world.run, tmp_path / "done")


def commands(result: str) -> list[list[str]]:
    """Returns the arguments of each command in backquotes."""
    return [shlex.split(part)[1:] for part in result.split("`")[1::2] if part.startswith("trimtab ")]


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_metrics_are_not_truncated_without_checkpoints(run: Path, cli: Call, how: str) -> None:
    record = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    if how == "emptied":
        (run / "checkpoints").mkdir()
    result = cli("train", "--resume", run)
    result.refused(5, "saved checkpoints up to step 6", "missing" if how == "deleted" else "empty")
    assert result.out == ""  # no plan for a run that cannot resume
    assert (run / "metrics.jsonl").read_bytes() == record
    # Both remedies work.
    (again,) = commands(result.err)
    assert cli(*again).code == 0
    assert losses(Path(f"{run}-again")) == losses(run)
    expected = losses(run)
    (run / "metrics.jsonl").unlink()
    assert cli("train", "--resume", run).code == 0
    assert losses(run) == expected


def test_all_checkpoints_damaged(run: Path, cli: Call) -> None:
    record = (run / "metrics.jsonl").read_bytes()
    for file in (run / "checkpoints").glob("step-*/manifest.json"):
        file.write_text("{")
    result = cli("train", "--resume", run)
    result.refused(5, "every checkpoint", "damaged")
    assert (run / "metrics.jsonl").read_bytes() == record
    (again,) = commands(result.err)
    assert cli(*again).code == 0


def test_an_older_run_without_checkpoints_is_judged_by_its_steps(run: Path, cli: Call) -> None:
    """Runs of versions that did not record checkpoints: if finished, or far beyond the first save, they had one."""
    shutil.rmtree(run / "checkpoints")
    choices = json.loads((run / "choices.json").read_text())
    del choices["logs_checkpoints"]
    (run / "choices.json").write_text(json.dumps(choices))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["kind"] != "checkpoint"]
    (run / "metrics.jsonl").write_text("".join(lines))
    cli("train", "--resume", run).refused(5, "nothing to resume from")
    early = [line for line in lines if json.loads(line)["step"] <= 2]
    (run / "metrics.jsonl").write_text("".join(early))
    assert cli("train", "--resume", run).code == 0
    assert len(losses(run)) == 6


def test_a_run_that_never_saved_restarts_with_the_same_losses(run: Path, cli: Call) -> None:
    expected = losses(run)
    shutil.rmtree(run / "checkpoints")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    early = [
        line for line in lines if json.loads(line)["step"] <= 1 and json.loads(line)["kind"] != "checkpoint"
    ]
    (run / "metrics.jsonl").write_text("".join(early))
    result = cli("train", "--resume", run)
    assert result.code == 0, result.err
    assert "no checkpoint was saved yet" in result.out
    assert losses(run) == expected


def test_a_missing_newest_checkpoint_is_reported(run: Path, cli: Call) -> None:
    expected = losses(run)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    result = cli("train", "--resume", run)
    assert result.code == 0, result.err
    assert "the checkpoint of step 6 is missing or damaged" in " ".join(result.out.split())
    assert losses(run) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines, '{"kind": "train", "st'], "a damaged line was removed"),
        (lambda lines: [*lines[:3], "\x00garbage\n", *lines[3:]], "removed (the first is line 4)"),
        (lambda lines: [line for line in lines if '"step": 3,' not in line], "lacks step 3 of the 6"),
        (lambda lines: lines[: len(lines) // 3], "of the 6 trained steps"),
        (lambda lines: [], "missing or empty"),
    ],
)
def test_damaged_metrics_are_reported_by_resume_and_report(
    run: Path, cli: Call, damage: Callable[[list[str]], list[str]], message: str
) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    report = cli("report", run)
    assert report.code == 0, report.err
    assert "damaged line" in report.out or "metrics.jsonl lacks step" in report.out
    shown = cli("train", "--resume", run)
    assert shown.code == 0, shown.err
    assert message in " ".join(shown.out.split())


def test_complete_metrics_have_no_problems(run: Path, cli: Call) -> None:
    assert "metrics.jsonl" not in cli("report", run).out
    assert "metrics.jsonl" not in cli("train", "--resume", run).out


def test_a_resume_needs_disk_space_for_all_of_its_checkpoints(
    run: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing checkpoints are replaced; the one being written and a second one need additional disk space."""
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in run.glob("checkpoints/step-*")]
    usage = shutil.disk_usage(run)
    for extra, code in ((20 * max(sizes), 0), (0, 6)):
        again = shutil.copytree(run, run.with_name(f"room-{code}"))
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=extra: usage._replace(free=free))
        assert cli("train", "--resume", again, "max_steps=8", "save_total_limit=3").code == code


def test_a_resume_on_a_full_disk_gets_remedies_that_work(
    run: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=0))
    result = cli("train", "--resume", run, "max_steps=8", "save_total_limit=1")
    result.refused(6, f"free some space, move {run} to another disk and resume it there, or ")
    assert "output_dir" not in result.err
    assert "save_total_limit" not in result.err
    monkeypatch.undo()
    moved = run.rename(run.with_name("moved"))
    assert cli("train", "--resume", moved, "max_steps=8").code == 0


def test_a_lower_save_total_limit_frees_space_before_the_next_save(run: Path, cli: Call) -> None:
    before = {path.name for path in run.glob("checkpoints/step-*")}
    assert "step-00000004" in before
    result = cli("train", "--resume", run, "save_total_limit=1")  # all steps are trained: nothing is saved
    assert result.code == 0
    assert "removed step-00000004: save_total_limit is 1" in result.out
    assert "step-00000006" in {path.name for path in run.glob("checkpoints/step-*")}


def test_losses_after_a_resume_are_compared_with_the_first_of_the_run(run: Path, cli: Call) -> None:
    first = {row["name"]: row["loss"] for row in reversed(rows(run, "eval"))}
    result = cli("train", "--resume", run, "max_steps=8")
    assert result.code == 0
    last = {row["name"]: row["loss"] for row in rows(run, "eval")}
    for name, loss in last.items():
        change = signed(loss - first[name])
        assert f"{name} loss {loss:.4f} ({change})" in result.out, result.out


def test_a_resume_to_fewer_steps_is_refused_before_the_plan_is_shown(run: Path, cli: Call) -> None:
    result = cli("train", "--resume", run, "max_steps=1")
    result.refused(2, "max_steps")
    assert "─" not in result.out


# Starts that were killed before the first step.


@pytest.mark.parametrize("left", [[".lock", "recipe.yaml"], [".lock", "recipe.yaml", "model", "plan.json"]])
def test_a_killed_start_is_restarted_by_resume_and_by_train(
    run: Path, world: World, cli: Call, left: list[str], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    for words in (["--resume", half], [world.recipe, f"output_dir={half}"]):
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        for name in left:
            copy = shutil.copytree if (run / name).is_dir() else shutil.copyfile
            copy(run / name, half / name)
        result = cli("train", *words)
        assert result.code == 0, result.err
        assert losses(half) == losses(run)


def test_a_killed_start_with_a_resolved_sequence_length_is_restarted(
    world: World, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default exceeds the tiny model's context: the recipe in the folder must contain the resolved length."""
    text = world.recipe.read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("\n".join(line for line in text.splitlines() if "max_seq_length" not in line))
    half, left = tmp_path / "half", tmp_path / "left"

    def killed(*_: object, **__: object) -> None:
        shutil.copytree(half, left)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trimtab.run.lifecycle._execute", killed)
        assert cli("train", recipe, f"output_dir={half}").code == 130
    assert cli("train", "--resume", left).code == 0
    assert len(losses(left)) == 6


def test_saving_only_at_the_end_is_preserved(job: Job, cli: Call, tmp_path: Path) -> None:
    assert cli("train", job(save_steps=None, max_steps=2, output_dir=str(tmp_path / "end"))).code == 0
    assert "save_steps: null" in (tmp_path / "end" / "recipe.yaml").read_text()


@pytest.mark.parametrize("locked", [False, True])
def test_a_folder_with_user_files_is_not_emptied(run: Path, cli: Call, tmp_path: Path, locked: bool) -> None:
    """With the user's own recipe.yaml it could be mistaken for a run whose start was killed."""
    own = tmp_path / "own"
    for name in ("model/weights.txt", "wandb/notes.txt", "checkpoints/mine.pt", "story.txt"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("mine")
    shutil.copyfile(run / "recipe.yaml", own / "recipe.yaml")
    if locked:
        (own / ".lock").touch()
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    result = cli("train", "--resume", own)
    result.refused(5, "contains a recipe and no run", "trimtab train")
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def test_a_failed_restart_leaves_the_files_for_the_next(run: Path, cli: Call, tmp_path: Path) -> None:
    """A supervisor that resumes any existing folder must succeed once the cause is removed."""
    half = tmp_path / "half"
    half.mkdir()
    (half / ".lock").touch()
    shutil.copyfile(run / "recipe.yaml", half / "recipe.yaml")
    text = (half / "recipe.yaml").read_text()
    source = json.loads((run / "choices.json").read_text())["recipe"]["data"]["train"][0]["source"]
    (half / "recipe.yaml").write_text(text.replace(source, str(tmp_path / "absent.jsonl")))
    assert cli("train", "--resume", half).code == 3
    assert [path.name for path in sorted(half.iterdir())] == [".lock", "recipe.yaml"]
    shutil.copyfile(source, tmp_path / "absent.jsonl")
    assert cli("train", "--resume", half).code == 0


def test_missing_files_are_named(run: Path, world: World, cli: Call, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".lock").touch()
    result = cli("train", "--resume", empty)
    result.refused(5, "no run was started", "no recipe.yaml")
    words = [str(world.recipe) if word == "RECIPE" else word for word in commands(result.err)[0]]
    assert cli(*words).code == 0
    (run / "choices.json").unlink()
    result = cli("train", "--resume", run)
    result.refused(5, "was trained and lacks choices.json")
    assert cli(*commands(result.err)[0]).code == 0
    (run / "recipe.yaml").unlink()
    cli("train", "--resume", run).refused(5, "lacks choices.json and recipe.yaml")


def test_recipe_yaml_is_restored_from_choices_json(run: Path, cli: Call) -> None:
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").unlink()
    assert cli("train", "--resume", run).code == 0
    assert (run / "recipe.yaml").read_text() == text


# Training longer.


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
def test_a_constant_run_that_is_extended_equals_one_planned_so_long(
    job: Job, cli: Call, tmp_path: Path, schedule: str
) -> None:
    warmup = {"warmup_steps": 1} if schedule == "constant_with_warmup" else {}
    recipe = job(lr_scheduler_type=schedule, **warmup)
    assert cli("train", recipe).code == 0
    result = cli("train", "--resume", tmp_path / "run")
    assert "max_steps=4`" in result.out
    result = cli("train", "--resume", tmp_path / "run", "max_steps=5")
    assert result.code == 0, result.err
    assert "now ends at step 5 instead of 2; the learning rate does not change" in " ".join(
        result.out.split()
    )
    assert cli("train", recipe, "max_steps=5", f"output_dir={tmp_path / 'long'}").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "long")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_a_decaying_schedule_is_stretched_to_the_new_length(
    job: Job, cli: Call, tmp_path: Path, schedule: str
) -> None:
    run = tmp_path / "run"
    recipe = job(lr_scheduler_type=schedule, max_steps=3, save_steps=1, save_total_limit=9)
    assert cli("train", recipe).code == 0
    result = cli("train", "--resume", run, "max_steps=6")
    assert result.code == 0, result.err
    assert f"lr_scheduler_type: {schedule} is computed for 6 steps" in " ".join(result.out.split())
    assert cli("train", recipe, "max_steps=6", f"output_dir={tmp_path / 'long'}").code == 0
    rates = {row["step"]: row["lr"] for row in rows(run, "train")}
    longer = {row["step"]: row["lr"] for row in rows(tmp_path / "long", "train")}
    assert [rates[step] for step in (4, 5, 6)] == [longer[step] for step in (4, 5, 6)]
    assert rates[3] != longer[3] or schedule == "warmup_stable_decay"
    assert json.loads((run / "choices.json").read_text())["lengths"] == [
        {"step": 0, "total": 3},
        {"step": 3, "total": 6},
    ]
    # From a checkpoint before the extension, steps are repeated with their original learning rates.
    expected = losses(run)
    for step in (2, 3, 4, 5, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    assert cli("train", "--resume", run).code == 0
    assert losses(run) == expected
    cli("train", "--resume", run, "max_steps=2").refused(2, "6 steps", "max_steps=6")
    assert cli("train", "--resume", run, "max_steps=6").code == 0


def test_epochs_may_be_added(job: Job, cli: Call, tmp_path: Path) -> None:
    assert cli("train", job(max_steps=-1, num_train_epochs=1)).code == 0
    steps = len(losses(tmp_path / "run"))
    result = cli("train", "--resume", tmp_path / "run", "num_train_epochs=2")
    assert result.code == 0, result.err
    assert len(losses(tmp_path / "run")) == 2 * steps


@pytest.mark.parametrize("override", ["num_train_epochs=1e300", f"max_steps={10**15}"])
def test_an_invalid_number_of_steps_is_refused(job: Job, cli: Call, override: str) -> None:
    cli("train", job(), override).refused(2, override.split("=")[0], "less than or equal")


# Other devices, and runs as models of other runs.


def test_a_run_continues_on_another_device(run: Path, cli: Call) -> None:
    """A CPU run that is recorded as a GPU run: implementations that need a GPU are chosen again."""
    choices = json.loads((run / "choices.json").read_text())
    there = {**choices, "device": "cuda", "attention": {"impl": "triton", "reason": "", "rejected": []}}
    there["pointwise"] = {"impl": "triton", "reason": ""}
    there["recipe"]["device"] = "auto"
    there["version"] = 1
    (run / "choices.json").write_text(json.dumps(there))
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("device: cpu", "device: auto"))
    result = cli("train", "--resume", run, "max_steps=8")
    result.refused(6, "was trained on cuda", "device=cpu")
    for word in ("device=cpu", "device=auto"):
        (run / "choices.json").write_text(json.dumps(there))
        result = cli("train", "--resume", run, word, "max_steps=8")
        assert result.code == 0, result.err
    assert "device: cuda → cpu" in " ".join(result.out.split())
    assert len(losses(run)) == 8
    assert "cuda → cpu" in rows(run, "event")[-2]["message"]
    now = json.loads((run / "choices.json").read_text())
    assert (now["version"], now["device"], now["attention"], now["pointwise"]) == (
        choices["version"],
        "cpu",
        choices["attention"],
        choices["pointwise"],
    )
    assert cli("train", "--resume", run, "max_steps=9").code == 0  # and stays there


@pytest.mark.parametrize("name", ["{run}", "{run}/checkpoints/best", "{run}/checkpoints/step-00000004"])
def test_a_run_is_the_model_of_another(
    world: World, job: Job, cli: Call, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = name.format(run=world.run)
    assert cli("plan", job(), f"model.name={chosen}").code == 0
    assert cli("train", job(), f"model.name={chosen}").code == 0
    started = json.loads((tmp_path / "run" / "choices.json").read_text())["started_from"]
    step = Path(started["source"])
    assert step.parent == world.run / "checkpoints"
    assert set(started["files"]) == {path.name for path in step.glob("*.safetensors")}
    which = step.name.removeprefix("step-")
    exported = tmp_path / "exported"
    assert cli("export", "hf", world.run, exported, "--checkpoint", int(which), "--dtype", "fp32").code == 0
    assert cli("train", job(), f"model.name={exported}", f"output_dir={tmp_path / 'other'}").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_the_checkpoint_that_a_run_started_from_must_stay_the_same(
    run: Path, job: Job, cli: Call, tmp_path: Path
) -> None:
    assert cli("train", job(), f"model.name={run}").code == 0
    new, expected = tmp_path / "run", losses(tmp_path / "run")
    shutil.rmtree(new / "checkpoints")
    (new / "metrics.jsonl").unlink()
    assert cli("train", "--resume", run, "max_steps=8").code == 0  # the old run resumes; its step 6 stays
    assert cli("train", "--resume", new).code == 0
    assert losses(new) == expected
    shutil.rmtree(new / "checkpoints")
    (new / "metrics.jsonl").unlink()
    file = next((run / "checkpoints" / "step-00000006").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    cli("train", "--resume", new).refused(5, "other base weights")
    cli("train", job(), f"model.name={file.parent}", f"output_dir={tmp_path / 'x'}").refused(5, "is damaged")
    cli("train", job(), f"model.name={run}", f"output_dir={run}").refused(5, "already contains a run")


def test_the_remedy_for_keys_that_may_not_change_works(run: Path, cli: Call) -> None:
    result = cli("train", "--resume", run, "learning_rate=1e-4", "per_device_train_batch_size=1")
    result.refused(2, "may not change", "learning_rate")
    (words,) = commands(result.err)
    assert cli(*words).code == 0
    assert f"{run}/checkpoints/step-00000006" in (Path(f"{run}-2") / "recipe.yaml").read_text()


def test_a_path_of_the_run_may_be_repeated(
    run: Path, world: World, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder has it as an absolute path."""
    source = Path(load(run / "recipe.yaml").data.train[0].source)
    monkeypatch.chdir(source.parent)
    assert cli("train", "--resume", run, f"data.train.0.source={source.name}", "max_steps=7").code == 0
    assert load(run / "recipe.yaml").data.train[0].source == str(source)
    (source.parent / "other.jsonl").write_text(source.read_text())
    refused = cli("train", "--resume", run, "data.train.0.source=other.jsonl")
    refused.refused(2, "may not change", "data.train.0.source")


def test_a_lora_run_as_a_model_is_refused_with_a_remedy(job: Job, cli: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", job(lora={"r": 2})).code == 0
    result = cli("train", job(output_dir=str(tmp_path / "next")), f"model.name={run}")
    result.refused(4, "trained adapters")
    for words in commands(result.err):
        assert cli(*(f"{tmp_path}/{word}" if word.isupper() else word for word in words)).code == 0
    next_run = [job(output_dir=str(tmp_path / "next"))]
    assert cli("train", *next_run, f"model.name={tmp_path}/MODEL").code == 0
    shutil.rmtree(tmp_path / "next")
    assert cli("train", *next_run, f"lora={{adapter: {tmp_path}/ADAPTER}}").code == 0
    for change in ("learning_rate=1e-4", "lora.r=4"):
        result = cli("train", "--resume", run, change)
        result.refused(2, "may not change", change.split("=")[0])
        for words in commands(result.err):
            assert cli(*words).code == 0
        shutil.rmtree(f"{run}-2")


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems hold no such names")
def test_a_data_file_whose_name_is_not_utf8(job: Job, cli: Call, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    name = os.fsdecode(b"\xff\xfe.txt")
    (texts / name).write_text("the cat sees a red house and a dog. " * 60)
    run = tmp_path / "run"
    assert cli("train", job(data_train=[str(texts)], output_dir=str(run))).code == 0
    result = cli("train", "--resume", run, "max_steps=3")
    assert result.code == 0, result.err
    (texts / name).rename(tmp_path / "elsewhere.txt")
    (texts / "other.txt").write_text("a dog. " * 60)
    result = cli("train", "--resume", run, "max_steps=4")
    assert result.code != 0
    assert "missing: \\udcff\\udcfe.txt" in result.err


def test_a_damaged_environment_json_does_not_prevent_the_report(run: Path, cli: Call) -> None:
    (run / "environment.json").write_text("{")
    (run / "report.html").unlink()
    result = cli("train", "--resume", run, "max_steps=7")
    assert result.code == 0, result.err
    assert "versions and machine are not shown" in " ".join(result.out.split())
    assert (run / "report.html").is_file()
    assert cli("report", run).code == 0


def test_a_damaged_recipe_is_named_with_its_folder(world: World, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    for damage in ("", "[]", "a: b: c", "unknown: 1"):
        (run / "recipe.yaml").write_text(damage)
        result = cli("train", "--resume", run)
        result.refused(2)
        assert damage == "unknown: 1" or str(run / "recipe.yaml") in result.err, result.err
