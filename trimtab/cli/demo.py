"""`trimtab demo`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from trimtab.cli.interrupts import begin_work
from trimtab.cli.verb import new_app
from trimtab.report.console import new_console
from trimtab.report.plain import as_text

app = new_app()

DEMO_MARK = ".demo"
"""Marks a folder as written by a demo, so that the next demo may replace it."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="The run folder; an earlier demo in it is replaced.")] = Path(
        "runs/demo"
    ),
    kill: Annotated[
        bool,
        typer.Option(
            "--kill", help="Kill the run with kill -9 halfway, resume it, and compare every loss bitwise."
        ),
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=4, help="Number of optimizer steps; one epoch by default.")
    ] = None,
    die_at: Annotated[int | None, typer.Option(hidden=True)] = None,
    bare: Annotated[bool, typer.Option(hidden=True)] = False,
) -> int:
    """Train the bundled model on mathematics.

    A base model of 4.7 million parameters and a generated mathematics corpus ship with the package. The demo shows the
    plan with its memory, live progress, loss on mathematics and on general text before and after training, exact
    answers to held-out problems, completions before and after, and the four memory buckets, predicted next to
    measured. It takes about two minutes on two CPU cores; nothing is downloaded.

    With `--kill` the model is trained twice: once without interruption, and once killed by `kill -9` halfway and
    resumed. The losses of both runs must be bitwise identical.
    """
    from trimtab.cli.training import conclude, resume_advised
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab import launch
    from trimtab.recipe import load
    from trimtab.report import LiveView
    from trimtab.starter import recipe_file

    overrides = [f"output_dir={folder}"]
    if steps is not None:
        overrides += ["num_train_epochs=null", f"max_steps={steps}", f"save_steps={max(1, steps // 4)}"]
    if bare:  # the evaluations of --kill runs are not shown
        overrides += ["answers=0", "probe=false", "prompts=[]", "data.eval_sequences=4"]
    console = new_console()
    if kill:
        return _kill(folder, steps or 40, console)
    import trimtab.run.lifecycle  # noqa: F401  torch takes seconds; until work begins, Ctrl-C ends the process at once

    begin_work()
    _replace_older(folder)

    def after_step(step: int) -> None:
        if step == 1:
            (folder / DEMO_MARK).touch()
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with LiveView(console=console, detail="full") as view, resume_advised(folder, new=True):
        finished = launch.train(load(recipe_file("demo"), overrides), view, after_step=after_step)
    code = conclude(finished, console, "full")
    if code == 0:
        console.print("\nnow train on your own text, a folder of .txt, .md, .jsonl, .csv or .parquet files:")
        console.print(as_text(f"  {_program()} train own-text data.train=./my-texts"), soft_wrap=True)
    return code


def _program() -> str:
    """How the user calls trimtab: by name if it is on PATH, by a relative path otherwise."""
    if shutil.which("trimtab") is not None:
        return "trimtab"
    script = Path(sys.argv[0])
    if script.name != "trimtab":
        return f"{sys.executable} -m trimtab"
    return os.path.relpath(script)


def _replace_older(folder: Path) -> None:
    """Empties the folder of an earlier demo; refuses any other folder and a demo that is still running."""
    from trimtab.checkpoint.lock import RunLock, is_locked
    from trimtab.facts.errors import CheckpointError
    from trimtab.run.folder import RunFolder

    run = RunFolder(folder)
    if not run.began():
        run.check_new("--folder")
        if is_locked(folder / RunLock.NAME):  # by a demo that has just started
            with run.lock("--folder"):
                pass
        return
    with run.lock("--folder"):
        if not (folder / DEMO_MARK).is_file():
            raise CheckpointError(
                f"{folder} contains a run that is not a demo", "give another --folder, or remove it yourself"
            )
        foreign = run.foreign()
        if foreign:
            raise CheckpointError(
                f"{folder} contains {foreign[0]} in addition to an earlier demo",
                "move it away, or give another --folder",
            )
        run.clear()


def _kill(folder: Path, steps: int, console: Console) -> int:
    """Runs an uninterrupted, a killed and a resumed run in separate processes, then compares every loss."""
    whole, killed = folder.with_name(f"{folder.name}-whole"), folder.with_name(f"{folder.name}-killed")
    base = [sys.executable, "-m", "trimtab"]
    demo = [*base, "demo", "--bare", "--steps", str(steps), "--folder"]
    die_at = steps * 5 // 8
    console.print(as_text(f"1. uninterrupted run: {steps} steps in {whole}"))
    _check(subprocess.run([*demo, str(whole)], stdout=subprocess.DEVNULL))
    console.print(f"2. the same run, which kills itself with kill -9 after step {die_at}")
    died = subprocess.run([*demo, str(killed), "--die-at", str(die_at)], stdout=subprocess.DEVNULL)
    console.print(
        f"   it ended with signal {-died.returncode}" if died.returncode < 0 else "   it was not killed"
    )
    resumed = subprocess.run(
        [*base, "train", "--resume", str(killed)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    _check(resumed)
    step = re.search(r"continuing from step (\d+)", resumed.stdout)
    if step is None:
        console.print("[red]3. it restarted at step 0: there was no checkpoint to resume from[/red]")
        return 1
    console.print(f"3. resumed from its last checkpoint, step {step[1]}")
    return _compare(whole, killed, console)


def _check(done: subprocess.CompletedProcess[Any]) -> None:
    if done.returncode:
        raise SystemExit(done.returncode)


def _compare(whole: Path, killed: Path, console: Console) -> int:
    from trimtab.report import read_run

    first, second = ({r["step"]: r["loss"] for r in read_run(f).of("train")} for f in (whole, killed))
    different = [step for step in first if first[step] != second.get(step)]
    for step in list(first)[-5:]:
        console.print(f"   step {step:>4}  {float(first[step]).hex():>22}  {float(second[step]).hex():>22}")
    if different or len(first) != len(second):
        console.print(
            f"[red]{len(different)} of {len(first)} losses differ, the first at step {different[:1]}[/red]"
        )
        return 1
    console.print(f"[green]all {len(first)} losses are bitwise identical[/green]")
    return 0
