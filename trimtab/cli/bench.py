"""`trimtab bench`: studies of where time and memory go, one command each."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.bench_attention import attention
from trimtab.cli.bench_claims import claims
from trimtab.cli.bench_compile import compile
from trimtab.cli.bench_concurrency import concurrency
from trimtab.cli.bench_kernels import kernels
from trimtab.cli.bench_memory import memory
from trimtab.cli.bench_report import report
from trimtab.cli.bench_sizes import sizes
from trimtab.cli.bench_step import step
from trimtab.cli.studying import Again, AsJson, Out, StudyDevice
from trimtab.cli.verb import new_app

app = new_app()


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="Measure a set of studies in one sweep: study or full.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Of --suite: begin no cell after so many minutes; the same command continues."),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure where time and memory go on this machine: studies with tables, charts and a page.

    `trimtab bench step` measures one study.

    `trimtab bench --suite study` measures all of them, with at most two seconds of timing per cell.

    `trimtab bench --suite study --minutes 9` measures a piece of it; repeat the command to continue.

    `trimtab bench report lab/study` draws the report again from its records.

    Each study keeps every measurement as a JSON line, so that a command that was stopped continues with the next cell.
    A cell that runs out of memory is a result, and the sweep continues in a fresh process. `full` measures every
    default of every study, which takes hours.
    """
    if context.invoked_subcommand is not None:
        return
    from trimtab.facts.errors import RecipeError

    if suite is None:
        raise RecipeError("no study is named", "name one, or --suite study; see `trimtab bench --help`")
    if minutes is not None and minutes <= 0:
        raise RecipeError(f"--minutes {minutes:g} leaves no time", "give a number above 0")
    from trimtab.cli.studying import run_study, study_device
    from trimtab.lab.suite import suite_cells
    from trimtab.run.device import detect

    used = study_device(device)
    run_study(
        suite,
        suite_cells(suite, device=used, memory_bytes=detect(device).memory_bytes),
        device=used,
        out=out,
        again=again,
        as_json=as_json,
        command=f"trimtab bench --suite {suite}",
        title="Where the time and the memory of training go",
        limit_seconds=None if minutes is None else 60 * minutes,
    )


for command in (sizes, step, kernels, memory, attention, compile, claims, concurrency, report):
    app.command()(command)
