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
from trimtab.cli.studying import AsJson, AtOnce, Commit, ListCells, Minutes, Out, Remeasure, StudyDevice
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
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --list: list the cells for this GPU, as in `trimtab plan --gpu`."
        ),
    ] = None,
    device: StudyDevice = "auto",
    at_once: AtOnce = None,
    commit: Commit = None,
    out: Out = None,
    remeasure: Remeasure = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory of training on this machine: studies with tables, charts and an HTML report.

    `trimtab bench step` runs one study.

    `trimtab bench --suite study` runs sizes, step, kernels, memory, compile and attention, with at most two seconds of
    timing per cell.

    `trimtab bench --suite study --list` lists its cells with an estimate of their time; with `--gpu h200` for a GPU
    that is not here.

    `trimtab bench --suite study --minutes 9` runs a part of the suite; repeat the command to continue.

    `trimtab bench report lab/study` rebuilds the report from the recorded measurements.

    On a GPU several processes first compile what the cells need, and measure memory; then cells are timed one by one.

    A cell is one configuration of a study. Each study writes every measurement as a JSON line, so an interrupted
    command continues with the next cell. Out of memory is recorded as a result, and the sweep continues in a new
    process. `full` runs the same studies with all their default cells, which takes hours.
    """
    from trimtab.facts.errors import RecipeError

    if context.invoked_subcommand is not None:
        check_no_options(context)
        return
    if suite is None:
        raise RecipeError("no study given", "name a study, or use --suite study; see `trimtab bench --help`")
    from trimtab.cli.studying import run_study, study_device
    from trimtab.lab.suite import suite_cells
    from trimtab.run.device import detect

    if gpu is not None:
        list_for_gpu(suite, gpu, minutes=minutes, listed=listed, at_once=at_once, as_json=as_json)
        return
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
        at_once=at_once,
        commit=commit,
        command=f"trimtab bench --suite {suite}",
        title="Where the time and the memory of training go",
    )


def list_for_gpu(
    suite: str, gpu: str, *, minutes: float | None, listed: bool, at_once: int | None, as_json: bool
) -> None:
    """Lists the cells of a suite on a GPU that need not be present.

    Raises:
        RecipeError: without `--list`; the GPU is unknown.
    """
    from trimtab.cli.study_list import print_cells
    from trimtab.facts.errors import RecipeError
    from trimtab.facts.gpus import find_gpu
    from trimtab.lab.cell_times import CellTimes, Speed
    from trimtab.lab.sharing import MOST_PROCESSES
    from trimtab.lab.suite import suite_cells

    if not listed:
        raise RecipeError(
            "--gpu is only for --list: a study measures this machine", "add --list, or remove --gpu"
        )
    planned = find_gpu(gpu)
    cells = suite_cells(suite, device="cuda", memory_bytes=planned.memory_bytes)
    print_cells(
        cells, {}, CellTimes(Speed.of(planned)), planned,
        minutes=minutes, at_once=at_once or MOST_PROCESSES, as_json=as_json,
    )  # fmt: skip


def check_no_options(context: typer.Context) -> None:
    """Raises RecipeError for options before the name of a study, which would have no effect.

    They belong to `--suite`; each study has options of the same names.
    """
    from trimtab.facts.errors import RecipeError

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if not given:
        return
    study = context.invoked_subcommand
    if "suite" in given:
        raise RecipeError(
            f"--suite measures several studies and is not followed by {study}",
            f"remove --suite, or remove {study}",
        )
    option = {"listed": "list", "as_json": "json", "at_once": "at-once"}.get(given[0], given[0])
    if given[0] in ("at_once", "commit") and study != "claims":
        raise RecipeError(
            f"--{option} before {study} belongs to --suite", f"{study} runs alone: remove --{option}"
        )
    raise RecipeError(
        f"--{option} before {study} belongs to --suite",
        f"write it after the study: trimtab bench {study} --{option} …",
    )


for command in (sizes, step, kernels, memory, attention, compile, claims, concurrency, report):
    app.command()(command)
