"""Faults during a run: full and read-only disks, a second process, disappearing data, non-finite losses."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_world import Call, World
from safetensors.torch import load_file, save_file
from tiny_model import write_texts, write_tiny_model

from trimtab.checkpoint import RunLock
from trimtab.trainer.setup import TrainingSetup

Job = Callable[..., Path]


def steps(run: Path) -> list[int]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == "train"]


def losses(run: Path) -> list[tuple[int, str]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], float(row["loss"]).hex()) for row in rows if row["kind"] == "train"]


def call_after_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Calls `act` with every finished step of runs that the command line starts."""
    real = TrainingSetup.__setattr__

    def hook(self: TrainingSetup, name: str, value: object) -> None:
        real(self, name, act if name == "after_step" else value)

    monkeypatch.setattr(TrainingSetup, "__setattr__", hook)


def test_a_used_run_folder_is_never_overwritten(world: World, cli: Call) -> None:
    before = {p: p.stat().st_mtime_ns for p in world.run.rglob("*") if p.name != ".lock"}
    cli("train", world.recipe).refused(5, "already contains a run", "--resume")
    assert before == {p: p.stat().st_mtime_ns for p in world.run.rglob("*") if p.name != ".lock"}


def test_a_folder_with_other_files_is_not_a_run_folder(job: Job, cli: Call, tmp_path: Path) -> None:
    """`output_dir: .` would write over the user's own recipe.yaml and model."""
    path = job(output_dir=str(tmp_path))
    before = path.read_bytes()
    cli("train", path).refused(5, "not empty")
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("x")
    cli("train", job(output_dir=str(tmp_path / "file"))).refused(5, "is a file")
    cli("train", job(output_dir=str(tmp_path / "file" / "run"))).refused(5)


def test_two_processes_on_one_run_folder(world: World, job: Job, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "copy")
    with RunLock(run):
        result = cli("train", "--resume", run)
        result.refused(5, "in use by process", "; wait for it to end, or stop it")
        assert "output_dir" not in result.err  # no other folder contains this run
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        cli("train", job()).refused(5, "in use by process", "or give another output_dir")
    assert cli("train", job()).code == 0  # the lock is released afterwards


def test_resume_of_folders_that_are_not_runs(cli: Call, world: World, tmp_path: Path) -> None:
    cli("train", "--resume", tmp_path / "absent").refused(5, "absent")
    cli("train", "--resume", tmp_path).refused(5, "no run was started")
    (tmp_path / "notes.txt").touch()
    cli("train", "--resume", tmp_path).refused(5, "not a run folder")
    run = shutil.copytree(world.run, tmp_path / "run")
    choices = json.loads((run / "choices.json").read_text())
    del choices["threads"]
    (run / "choices.json").write_text(json.dumps(choices))
    cli("train", "--resume", run).refused(5, "choices.json", "threads")
    (run / "choices.json").write_text("{")
    cli("train", "--resume", run).refused(5, "choices.json")


def test_damaged_checkpoints(world: World, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    found = sorted((run / "checkpoints").glob("step-*"))
    assert len(found) >= 2
    file = next(found[-1].glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = cli("train", "--resume", run)
    assert result.code == 0, result.err
    assert found[-1].name in result.out  # the skipped checkpoint is named
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    for folder in (run / "checkpoints").glob("step-*"):
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")
    cli("train", "--resume", run).refused(5, "damaged")
    cli("generate", run, "the cat").refused(5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(job: Job, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    cli("train", job(output_dir=str(tmp_path / "locked" / "run"))).refused(5, "Permission denied")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which even root cannot write")
def test_unwritable_paths(job: Job, cli: Call, world: World, tmp_path: Path) -> None:
    cli("train", job(output_dir="/proc/run")).refused(5, "/proc/run", "output_dir")
    cli("train", job(data_cache_dir="/proc/cache")).refused(6, "/proc/cache")
    assert not (tmp_path / "run").exists()
    cli("export", "hf", world.run, "/proc/model").refused(6, "/proc")
    cli("report", world.run, "--out", "/proc/report.html").refused(6, "/proc/report.html")


@contextlib.contextmanager
def no_file_beyond(limit: int) -> Iterator[None]:
    """Simulates a nearly full disk: writing more than `limit` bytes to a file fails. (Python ignores SIGXFSZ.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_space_for_a_checkpoint_is_reported_and_loses_no_steps(
    job: Job, cli: Call, tmp_path: Path
) -> None:
    """Files are limited to 60 KB: the checkpoint does not fit, the small files of the run folder do."""
    path = job()
    with no_file_beyond(60_000):
        result = cli("train", path)
    result.refused(6, "checkpoint")
    assert [p for p in (tmp_path / "run" / "checkpoints").glob("*") if "tmp" in p.name] == []
    # With enough space, the same folder is continued.
    result = cli("train", "--resume", tmp_path / "run")
    assert result.code == 0, result.err
    assert steps(tmp_path / "run") == [1, 2]


def test_no_space_for_the_token_cache(job: Job, cli: Call, tmp_path: Path) -> None:
    path = job(data_train=[str(write_texts(tmp_path / "many.jsonl", 1, 400))])
    with no_file_beyond(4_000):
        result = cli("train", path)
    result.refused(6)
    assert not (tmp_path / "run").exists()
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size > 500] == []


def test_a_tracker_that_is_not_installed(job: Job, cli: Call, tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    cli("train", job(report_to=["wandb"])).refused(8, "pip install 'trimtab[wandb]'")
    assert not (tmp_path / "run").exists()


def test_a_disk_too_small_for_the_plan(
    job: Job, cli: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=10_000))
    cli("train", job()).refused(6, "the checkpoint takes", "output_dir")
    assert not (tmp_path / "run").exists()


def test_streamed_data_that_disappear_during_training(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(6):
        write_texts(folder / f"{i}.jsonl", i, 12)
    path = job(data_train=[str(folder)], data_streaming=True, max_steps=60)

    def vanish(step: int) -> None:
        if step == 2:
            for file in folder.iterdir():
                file.rename(tmp_path / f"kept-{file.name}")

    call_after_each_step(monkeypatch, vanish)
    cli("train", path).refused(3, ".jsonl")
    monkeypatch.undo()
    done = steps(tmp_path / "run")
    assert done[-1] >= 2
    assert (tmp_path / "run" / "checkpoints" / f"step-{done[-1]:08d}").is_dir()
    cli("train", "--resume", tmp_path / "run").refused(3)  # the data are still missing
    folder.mkdir(exist_ok=True)
    for file in tmp_path.glob("kept-*"):
        file.rename(folder / file.name.removeprefix("kept-"))
    result = cli("train", "--resume", tmp_path / "run")
    assert result.code == 0, result.err
    assert cli("train", path, f"output_dir={tmp_path / 'whole'}").code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 60


def test_changed_data_are_detected_on_resume(world: World, job: Job, cli: Call, tmp_path: Path) -> None:
    path = job(lr_scheduler_type="constant")
    assert cli("train", path).code == 0
    write_texts(tmp_path / "texts.jsonl", 99, 30)
    cli("train", "--resume", tmp_path / "run", "max_steps=4").refused(3, "texts.jsonl")
    write_texts(tmp_path / "texts.jsonl", 5, 30)
    assert cli("train", "--resume", tmp_path / "run", "max_steps=4").code == 0


def test_an_exploding_run_names_the_layer_and_leaves_a_good_checkpoint(
    job: Job, cli: Call, tmp_path: Path
) -> None:
    path = job(
        learning_rate=1e25, max_grad_norm=0, max_steps=9, logging_steps=5, lr_scheduler_type="constant"
    )
    result = cli("train", path)
    result.refused(7, "not finite at step", "model.", "texts.jsonl", "saved as step")
    run = tmp_path / "run"
    last = steps(run)[-1]
    assert (run / "checkpoints" / f"step-{last:08d}").is_dir()
    # The checkpoint is usable, and a resumed run ends in the same way.
    assert cli("export", "hf", run, tmp_path / "out", "--dtype", "fp32").code == 0
    assert cli("train", "--resume", run).code == 7
    assert steps(run)[-1] == last


def test_the_document_that_causes_a_nonfinite_loss_is_named(job: Job, cli: Call, tmp_path: Path) -> None:
    """One token's embedding is huge but finite; only the document that contains it makes the loss non-finite."""
    model = write_tiny_model(tmp_path / "poisoned", tie_embeddings=False)
    from trimtab import text

    token = text.load(model).encode("~")[0]
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.finfo(torch.float32).max
    save_file(weights, model / "model.safetensors")
    rows = ["the cat sees a dog under a small tree. " * 3] * 7 + ["a ~ dog"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    path = job(
        model=str(model),
        data_train=[str(tmp_path / "rows.jsonl")],
        packing=False,
        per_device_train_batch_size=1,
        max_steps=8,
    )
    cli("train", path).refused(7, "rows.jsonl:8")


def test_a_first_step_that_fails_does_not_block_the_next_start(job: Job, cli: Call, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "poisoned")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = torch.finfo(torch.float32).max
    save_file(weights, model / "model.safetensors")
    cli("train", job(model=str(model))).refused(7, "not finite at step 1")
    assert not (tmp_path / "run").exists()
    assert cli("train", job()).code == 0


def test_escapes_and_markup_never_reach_the_terminal(
    job: Job, cli: Call, tmp_path: Path, model_copy: Path
) -> None:
    evil = tmp_path / "a\x1b[31m[b][red]‮b.jsonl"
    write_texts(evil, 5, 30)
    result = cli(
        "train", job(data_train=[str(evil)], prompts=["the \x1b]0;owned\x07[/b] cat"], eval_on_start=True)
    )
    assert result.code == 0, result.err
    assert "\x1b" not in result.out + result.err
    assert "‮" not in result.out + result.err
    assert "[/b]" in result.out
    cli("train", job(output_dir=str(tmp_path / "other"), data_train=["no\x1b[31m[b].txt"])).refused(
        3, "\\x1b"
    )
    result = cli("eval", tmp_path / "run", evil, "--no-probe")
    assert result.code == 0
    assert "\x1b" not in result.out
    named = model_copy.rename(tmp_path / "m\x1b[1m[x]")
    assert "\x1b" not in cli("plan", job(model=str(named))).out
    result = cli("generate", named, "x", "--max-new-tokens", 60, "--temperature", 5.0)  # bytes of all kinds
    assert result.code == 0
    assert all(c.isprintable() or c == "\n" for c in result.out)
    assert "\x1b" not in cli("export", "hf", named, tmp_path / "e\x1b[1m").out
    assert "\x1b" not in cli("report", tmp_path / "run", "--out", tmp_path / "r\x1b.html").out


def test_closed_output_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m trimtab schema | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_allocation_failures_are_reported_as_out_of_memory(
    cli: Call, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: tried"
        )

    monkeypatch.setattr("trimtab.run.models.build_model", fail)
    run = shutil.copytree(world.run, tmp_path / "copy")
    cli("generate", run, "the cat").refused(6, "out of memory while loading the model", "--dtype bf16")


def test_bugs_keep_their_traceback(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.cli.main import main

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("trimtab.run.models.build_model", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate", str(world.run), "the cat"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_prints_how_to_continue(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = job(max_steps=5, output_dir=str(tmp_path / "run [bold]"))
    call_after_each_step(monkeypatch, lambda step: os.kill(os.getpid(), number) if step == 2 else None)
    result = cli("train", path)
    monkeypatch.undo()
    assert result.code == 128 + number
    assert "--resume" in result.out
    assert "run [bold]" in result.out
    run = tmp_path / "run [bold]"
    assert steps(run) == [1, 2]
    assert cli("train", "--resume", run).code == 0
    assert cli("train", path, f"output_dir={tmp_path / 'whole'}").code == 0
    assert losses(run) == losses(tmp_path / "whole")


def test_a_second_signal_exits_immediately_and_prints_how_to_continue(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = job(max_steps=3, save_steps=1), tmp_path / "run"

    def twice(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    for words in (("train", path), ("train", "--resume", run)):
        with monkeypatch.context() as patch:
            call_after_each_step(patch, twice)
            result = cli(*words)
        result.refused(130, "error: stopped; continue from the last checkpoint with: trimtab train --resume")
        shutil.rmtree(run / "checkpoints" / "step-00000002", ignore_errors=True)
    command = result.err.partition("with: trimtab ")[2]
    assert cli(*shlex.split(command)).code == 0
    assert steps(run) == [1, 2, 3]


def test_a_start_that_was_killed_before_its_first_step_does_not_block(
    job: Job, cli: Call, tmp_path: Path
) -> None:
    """kill -9 leaves the files written so far; nothing was trained, so the next start may use the folder."""
    run = tmp_path / "run"
    assert cli("train", job()).code == 0
    shutil.rmtree(run / "checkpoints")
    (run / "report.html").unlink()
    shutil.rmtree(run / "receipts")
    (run / "metrics.jsonl").write_text('{"kind": "memory", "step": 0, "when": "before"}\n')
    (run / ".plan.json.tmp-123").write_text("{")
    assert cli("train", job()).code == 0
    assert steps(run) == [1, 2]
    assert not (run / ".plan.json.tmp-123").exists()


def test_a_run_is_resumed_from_anywhere_even_without_its_base_model(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local paths are stored as absolute paths, and config, tokenizer and weights are in the run folder."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli("train", job(model="./model", lr_scheduler_type="constant")).code == 0
    monkeypatch.chdir(tmp_path / "sub")
    assert cli("train", "--resume", "../run", "max_steps=3").code == 0
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert cli("train", "--resume", "../run", "max_steps=4").code == 0


def test_the_hub_is_not_queried_for_a_local_model(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tmp_path / "model")
    assert cli("train", job(model="models/tiny", lr_scheduler_type="constant")).code == 0

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("trimtab.hub.models.resolve_model", asked)
    (tmp_path / "models" / "tiny").unlink()
    assert cli("train", "--resume", "run", "max_steps=3").code == 0
