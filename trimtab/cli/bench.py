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
from trimtab.cli.studying import AsJson, ListCells, Minutes, Out, Remeasure, StudyDevice
from trimtab.cli.verb import new_app

app = new_app()


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="Measure a set of studies in one sweep: study or full.")
    ] = None,
    minutes: Minutes = None,
    listed: ListCells = False,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory of training on this machine: studies with tables, charts and an HTML report.

    `trimtab bench step` runs one study.

    `trimtab bench --suite study` runs sizes, step, kernels, memory, compile and attention, with at most two seconds of
    timing per cell.

    `trimtab bench --suite study --list` lists its cells with an estimate of their time.

    `trimtab bench --suite study --minutes 9` runs a part of the suite; repeat the command to continue.

    `trimtab bench report lab/study` rebuilds the report from the recorded measurements.

    A cell is one configuration of a study. Each study writes every measurement as a JSON line, so an interrupted
    command continues with the next cell. Out of memory is recorded as a result, and the sweep continues in a new
    process. `full` runs the same studies with all their default cells, which takes hours.
    """
    if context.invoked_subcommand is not None:
        return
    from trimtab.facts.errors import RecipeError

    if suite is None:
        raise RecipeError("no study given", "name a study, or use --suite study; see `trimtab bench --help`")
    from trimtab.cli.studying import run_study, study_device
    from trimtab.lab.suite import suite_cells
    from trimtab.run.device import detect

    used = study_device(device)
    run_study(
        suite,
        suite_cells(suite, device=used, memory_bytes=detect(device).memory_bytes),
        device=used,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
        command=f"trimtab bench --suite {suite}",
        title="Where the time and the memory of training go",
    )


for command in (sizes, step, kernels, memory, attention, compile, claims, concurrency, report):
    app.command()(command)
