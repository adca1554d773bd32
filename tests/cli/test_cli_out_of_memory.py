"""Out of memory in every phase of every verb: the message, the files left, and resuming."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import Call, CommandResult, World
from full_memory import SMALL, FullMemory

import trimtab
from trimtab.run import out_of_memory

Job = Callable[..., Path]

MOST_LINES = 15


def explained(result: CommandResult, *words: str) -> list[str]:
    """Checks an explained out-of-memory error; returns its lines."""
    result.refused(6, "out of memory", *words)
    lines = result.err.strip().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("error: "))
    assert len(lines) - start <= MOST_LINES, result.err
    return lines[start:]


def report_of(run: Path) -> dict[str, Any]:
    text = (run / "oom.txt").read_text()
    assert text.startswith("out of memory")
    return json.loads((run / "oom.json").read_text())


def resume_words(error: str) -> list[str]:
    """The arguments of the command that an error names."""
    found = re.search(r"`trimtab (train --resume [^`]*)`", error)
    assert found, error
    return shlex.split(found[1])


STEP: dict[str, Callable[[], FullMemory]] = {
    "forward": lambda: FullMemory("trainer/microstep.py", spared=400, backward=False),
    "loss": lambda: FullMemory("linear_cross_entropy/__init__.py", spared=3, backward=False),
    "backward": lambda: FullMemory("trainer/microstep.py", spared=400, backward=True),
    "optimizer_step": lambda: FullMemory("trainer/loop.py", "update", spared=40),
}


@pytest.mark.parametrize("phase", STEP)
def test_out_of_memory_in_a_step_is_explained_and_the_run_resumes(
    phase: str, job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Live tensors of earlier tests in this process are larger than those of this tiny model.
    monkeypatch.setattr(out_of_memory, "LISTED", 1_000_000)
    path = job(max_steps=4, recompute="none", per_device_train_batch_size=4)
    with STEP[phase]() as memory:
        result = cli("train", path)
    assert memory.failed
    lines = explained(result, "2.00 GiB more could not be allocated", "pid 4711", "saves")
    report = report_of(tmp_path / "run")
    assert report["phase"] == phase
    assert report["memory"]["allocated"] == 15 * 2**30
    assert report["memory"]["fragmented"] == 1.25 * 2**30
    assert report["predicted"]["phase"] > 0
    kinds = {tensor["kind"] for tensor in report["tensors"]}
    assert {"weights", "optimizer"} <= kinds
    assert phase == "optimizer_step" or "activations" in kinds
    text = "\n".join(lines)
    assert "trimtab/" in text
    assert "--explain-memory" in text
    assert cli(*resume_words(result.err)).code == 0


def test_a_run_without_a_step_starts_with_any_other_key(job: Job, cli: Call, tmp_path: Path) -> None:
    path = job(per_device_train_batch_size=4)
    with FullMemory("trainer/microstep.py", backward=True, message=SMALL):
        result = cli("train", path)
    explained(result, "backward pass of step 1", "nothing was trained yet")
    assert "may not be enough" not in result.err
    run = tmp_path / "run"
    assert {name.name for name in run.iterdir()} == {".lock", "recipe.yaml", "oom.json", "oom.txt"}
    words = resume_words(result.err)
    assert words[3:] == ["per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
    assert cli(*words).code == 0
    assert not (run / "oom.json").exists()
    assert "per_device_train_batch_size: 2" in (run / "recipe.yaml").read_text()


def test_a_run_that_ran_out_of_memory_can_be_restarted(job: Job, cli: Call) -> None:
    path = job()
    with FullMemory("trainer/microstep.py", backward=True):
        explained(cli("train", path))
    assert cli("train", path).code == 0


def test_trained_steps_are_saved_and_only_memory_settings_are_advised(
    job: Job, cli: Call, tmp_path: Path
) -> None:
    path = job(max_steps=12, recompute="none", per_device_train_batch_size=4)
    with FullMemory("trainer/microstep.py", spared=1000, backward=True):
        result = cli("train", path)
    explained(result, "saved         step", "may not be enough")
    words = resume_words(result.err)
    assert words[3:] == ["recompute=block"]
    again = cli(*words)
    assert again.code == 0
    assert "continuing from step" in again.out
    assert not (tmp_path / "run" / "oom.json").exists()  # from an earlier start


PHASES: dict[str, tuple[Callable[[], FullMemory], dict[str, Any]]] = {
    "evaluation": (
        lambda: FullMemory("evaluate/perplexity.py"),
        {"eval_on_start": True, "data_eval_share": 0.3},
    ),
    "generation": (lambda: FullMemory("generate/loop.py"), {"eval_on_start": True, "prompts": ["the cat"]}),
    "probe": (lambda: FullMemory("evaluate/likelihood.py"), {"eval_on_start": True, "probe": True}),
    "checkpoint": (lambda: FullMemory("checkpoint/tensors.py", "copy", host=True), {}),
    "load": (lambda: FullMemory("run/build.py", "build_training_model"), {}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_other_phases_of_a_run(phase: str, job: Job, cli: Call, tmp_path: Path) -> None:
    full, keys = PHASES[phase]
    with full() as memory:
        result = cli("train", job(**keys))
    assert memory.failed
    explained(result)
    assert report_of(tmp_path / "run")["phase"] == phase
    again = cli(*resume_words(result.err))
    assert again.code == 0, again.err


IN_A_PROCESS = """
import sys
from full_memory import FullMemory
from trimtab.cli.main import main
with FullMemory("trainer/microstep.py", spared=30, backward=True):
    code = main(sys.argv[1:])
sys.exit(code)
"""


def test_allocating_lines_are_named_when_recorded(job: Job, tmp_path: Path) -> None:
    # In a separate process: autograd keeps the graphs of backward passes that failed in other tests.
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, "train", str(job(recompute="none")), "--explain-memory"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    result = CommandResult(done.returncode, done.stdout, done.stderr)
    assert "recording where tensors are allocated" in result.out
    assert "--explain-memory" not in "".join(explained(result))
    report = report_of(tmp_path / "run")
    assert report["recorded"]
    assert report["asked"]["module"].startswith("backward of model.")
    saved = [tensor["origin"] for tensor in report["tensors"] if tensor["kind"] == "activations"]
    in_layers = [origin for origin in saved if re.match(r"model\.layers\.\d", origin["module"] or "")]
    assert len(in_layers) >= 10
    assert all((origin["line"] or "").startswith("trimtab/") for origin in in_layers), in_layers


@pytest.mark.parametrize(
    ("words", "file", "phase", "remedy"),
    [
        (["eval", "RUN", "TEXT"], "evaluate/perplexity.py", "evaluation", "--batch-size"),
        (["eval", "RUN", "--no-probe", "--answers", "2"], "generate/loop.py", "generation", "--answers"),
        (["generate", "RUN", "the cat"], "generate/loop.py", "generation", "--max-new-tokens"),
        (["generate", "RUN", "the cat"], "run/models.py", "load", "--dtype bf16"),
        (["export", "hf", "RUN", "OUT"], "export/hf.py", "export", "exporting needs the model"),
        (["export", "hf", "RUN", "OUT"], "run/models.py", "load", "exporting needs the model"),
    ],
)
def test_verbs_that_train_nothing(
    words: list[str],
    file: str,
    phase: str,
    remedy: str,
    world: World,
    cli: Call,
    tmp_path: Path,
) -> None:
    run = shutil.copytree(world.run, tmp_path / "copy")
    places = {"RUN": run, "OUT": tmp_path / "out", "TEXT": world.folder / "domain.jsonl"}
    with FullMemory(file) as memory:
        result = cli(*(places.get(word, word) for word in words))
    assert memory.failed
    lines = explained(result, remedy)
    assert report_of(run)["phase"] == phase
    assert any("full report" in line for line in lines)
    # The memory of loading depends on the files, which may be quantized: only later phases are predicted.
    assert any("predicted" in line for line in lines) is (words[0] == "export" or phase != "load")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "file", "phase"),
    [
        (["merge", "RUN", "OUT"], "export/merged.py", "merge"),
        (["merge", "RUN", "OUT"], "run/models.py", "load"),
        (["export", "peft", "RUN", "OUT"], "export/peft.py", "export"),
    ],
)
def test_verbs_on_a_run_with_an_adapter(
    words: list[str], file: str, phase: str, job: Job, cli: Call, tmp_path: Path
) -> None:
    assert cli("train", job(lora={"r": 2})).code == 0
    places = {"RUN": tmp_path / "run", "OUT": tmp_path / "out"}
    with FullMemory(file, host=True) as memory:
        result = cli(*(places.get(word, word) for word in words))
    assert memory.failed
    lines = explained(result, "4.00 KiB more could not be allocated on the host", "needs the model in fp32")
    report = report_of(tmp_path / "run")
    assert report["phase"] == phase
    planned = words[0] == "merge"  # an adapter's files are small: exporting them is not planned
    assert any(line.startswith("  predicted") for line in lines) is planned
    assert (report["predicted"] is not None) is planned
    assert not (tmp_path / "out").exists()
    assert cli(*(places.get(word, word) for word in words)).code == 0


def test_other_errors_keep_their_message(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("trimtab.trainer.loop._Loop.update", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli("train", job())
    assert not (tmp_path / "run" / "oom.json").exists()


def test_python_records_lines_too(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trimtab.train(str(job()), explain_memory=True)
    assert "recording where tensors are allocated" in capsys.readouterr().out
    again = trimtab.resume(run.folder, explain_memory=True)
    assert again.status == "finished"
