"""`trimtab profile`: time and memory of one step of a recipe on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.studying import DEFAULT_FOLDER, StudyDevice, show_report
from trimtab.cli.verb import new_app

if TYPE_CHECKING:
    from trimtab.lab.profile_options import ProfileOptions
    from trimtab.lab.study import CellOutcome, Measurement
    from trimtab.recipe import Recipe

app = new_app()

QUIET = "6"
"""Log level of Kineto, torch's profiler, which otherwise prints a line at each start."""


@app.command()
def profile(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The recipe (YAML), or a model, which is profiled with the recipe defaults.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to time.")] = 5,
    warm_up: Annotated[int, typer.Option(help="Warm-up steps, which are not timed.")] = 2,
    document: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of each document in packed sequences; by default one document per sequence.",
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write a trace of one step for ui.perfetto.dev.")
    ] = False,
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx", help="Do not profile; only emit NVTX ranges named after modules, for nsys and ncu."
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write torch's snapshot of the CUDA allocator (a pickle) for pytorch.org/memory_viz.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; lab/profile-NAME by default.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON instead of the report.")
    ] = False,
) -> None:
    """Profile one training step of a recipe: its time and memory, and the changes that would help most.

    The model is built as in `trimtab train`, and steps run on random tokens: no training data is read, nothing is
    downloaded. The report compares the step time with the plan and shows time by kernel and by operation, memory over
    the step, the largest allocations with their source lines, MFU, and the three changes of the recipe with the largest
    predicted gain.

        trimtab profile recipe.yaml                            the full report
        trimtab profile recipe.yaml max_seq_length=2048        override a key
        trimtab profile recipe.yaml --trace                    and a trace for ui.perfetto.dev
        nsys profile trimtab profile recipe.yaml --nvtx        named regions in Nsight Systems

    Steps are timed as the recipe runs them. For the breakdown by operation, torch.compile and CUDA graphs are turned
    off, which the report mentions. If a step runs out of memory, the exit code is 6, and the error lists what used the
    memory.
    """
    from trimtab.cli.interrupts import begin_work
    from trimtab.run.device import require_torch
    from trimtab.run.target import named_recipe

    require_torch()
    words = [*(overrides or []), *([f"device={device}"] if device != "auto" else [])]
    loaded = named_recipe(recipe, words)
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)  # read when the profiler first runs
    from trimtab.lab.profile_options import ProfileOptions

    folder = out or DEFAULT_FOLDER / f"profile-{_name(recipe)}"
    options = ProfileOptions(steps, warm_up, document, folder, trace, nvtx, snapshot)
    begin_work()
    _run(_title(recipe, words), loaded, options, as_json=as_json)


def _run(title: str, recipe: Recipe, options: ProfileOptions, *, as_json: bool) -> None:
    """Profiles, appends the record, writes the report and prints it."""
    from trimtab.facts.errors import OutOfMemory
    from trimtab.lab.profile_report import profile_document
    from trimtab.lab.profiling import profile_recipe
    from trimtab.lab.records import append_record
    from trimtab.lab.reporting import prepare_folder
    from trimtab.lab.study import CellOutcome
    from trimtab.lab.sweep import RECORDS

    assert options.folder is not None
    prepare_folder(options.folder)
    start = time.perf_counter()
    try:
        with memory_limited(recipe.device):
            result = profile_recipe(recipe, options=options, progress=_tell)
    except OutOfMemory as error:
        ended = _measurement(title, recipe, options, CellOutcome.OUT_OF_MEMORY, {}, error.cause, start)
        append_record(options.folder / RECORDS, ended.to_dict())
        raise
    found = _measurement(title, recipe, options, CellOutcome.MEASURED, result.to_dict(), "", start)
    append_record(options.folder / RECORDS, found.to_dict())
    facts = (found.machine.name, f"commit {found.commit}", found.time[:10])
    show_report(profile_document(result, title, facts), [found], options.folder, as_json=as_json)


def _measurement(
    title: str,
    recipe: Recipe,
    options: ProfileOptions,
    outcome: CellOutcome,
    result: dict[str, Any],
    message: str,
    start: float,
) -> Measurement:
    """Returns the record of a profile; `start` is its start time by time.perf_counter."""
    from trimtab.lab.records import provenance
    from trimtab.lab.study import Cell, Machine, Measurement
    from trimtab.lab.sweep import PACKAGES
    from trimtab.run.device import detect

    device = detect(recipe.device).kind
    made = provenance(device, PACKAGES)
    settings = {
        "recipe": title,
        "device": device,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "document": options.document,
        "nvtx": options.nvtx,
    }
    return Measurement(
        Cell("profile", settings),
        outcome,
        result,
        message,
        time.perf_counter() - start,
        Machine(made["device"], made["versions"]),
        made["commit"],
        made["time"],
    )


@contextmanager
def memory_limited(device: str) -> Iterator[None]:
    """Limits the process to the free memory on a CPU, so that a step that needs more raises instead of swapping."""
    import resource

    from trimtab.lab.worker import limit_host_memory
    from trimtab.run.device import detect

    if detect(device).kind != "cpu":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_host_memory()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _tell(text: str) -> None:
    from trimtab.report.plain import plain

    print(plain(text), file=sys.stderr, flush=True)


def _title(recipe: str, words: list[str]) -> str:
    """The command's arguments, for the report's heading."""
    return " ".join([recipe, *words])


def _name(recipe: str) -> str:
    """Returns a recipe's name in a form that is valid in a folder name.

    Example:
        >>> _name("recipes/starter-chat.yaml"), _name("Qwen/Qwen3-0.6B")
        ('starter-chat', 'Qwen3-0.6B')
    """
    stem = Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")
    return re.sub(r"[^\w.-]+", "-", stem) or "recipe"
