"""Code shared by `train` and `demo`: the live view, the HTML report and the final lines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trimtab.cli.interrupts import begin_work
from trimtab.run.device import require_torch

if TYPE_CHECKING:
    from trimtab.report.live import Detail


def train_and_report(
    recipe: Path | None,
    overrides: list[str],
    resume: Path | None,
    *,
    quiet: bool = False,
    explain_memory: bool = False,
) -> int:
    """Train, write the report, print the final lines; return the exit code."""
    require_torch()
    from trimtab import launch
    from trimtab.recipe import load
    from trimtab.report import LiveView
    from trimtab.report.console import new_console

    console = new_console()
    detail: Detail = "quiet" if quiet else "short"
    loaded = load(recipe, overrides) if recipe is not None else None
    from trimtab.run.lifecycle import (
        RunInputs,  # importing torch takes seconds; until work begins, Ctrl-C ends the process immediately
    )

    inputs = RunInputs(explain_memory=explain_memory)
    begin_work()
    with LiveView(console=console, detail=detail) as view:
        if loaded is not None:
            with resume_advised(Path(loaded.output_dir), new=True):
                finished = launch.train(loaded, view, inputs=inputs)
        else:
            assert resume is not None
            with resume_advised(resume):
                finished = launch.resume(resume, overrides, view, inputs=inputs)
    return conclude(finished, console, detail)


@contextmanager
def resume_advised(folder: Path, *, new: bool = False) -> Iterator[None]:
    """Adds the command that resumes the run to a KeyboardInterrupt, which a second Ctrl-C raises.

    Args:
        folder: the run folder.
        new: whether a new run is started; then nothing is added if the folder already contained a run.
    """
    from trimtab.run.folder import RunFolder

    path = folder.expanduser()
    earlier = new and RunFolder.is_run(path)
    try:
        yield
    except KeyboardInterrupt as error:
        if earlier or not RunFolder.is_run(path):
            raise
        raise KeyboardInterrupt(
            "stopped; continue from the last checkpoint with: trimtab train --resume "
            + shlex.quote(str(folder))
        ) from error


def conclude(finished: Any, console: Console, detail: Detail) -> int:
    """Write the report and print the final lines of a run; return its exit code."""
    from trimtab.report import read_run, write_page
    from trimtab.report.closing import closing_summary
    from trimtab.report.plain import as_text

    data = read_run(finished.folder)
    write_page(data, finished.folder / "report.html")
    console.print(closing_summary(data, detail))
    if finished.status == "interrupted":
        folder = shlex.quote(str(finished.folder))
        advice = f"stopped by a signal, a checkpoint is saved; continue with: trimtab train --resume {folder}"
        console.print(as_text(advice), soft_wrap=True)
        return 128 + int(finished.signal or 2)
    sys.stdout.flush()
    return 0
