"""`trimtab profile`: what takes the time and the memory of a recipe's step here."""

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
    from trimtab.lab.study import Measurement, Outcome
    from trimtab.recipe import Recipe

app = new_app()

QUIET = "6"
"""Of Kineto, torch's profiler, which else prints a line at each start."""


@app.command()
def profile(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="The recipe (YAML), or a model by name with the recipe's defaults."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set from here."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to time.")] = 5,
    warm_up: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    document: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="Of packed sequences: the length of each document; else one per sequence."
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write a trace of one step, which ui.perfetto.dev opens.")
    ] = False,
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx", help="Only run steps, with NVTX ranges of the modules' names, for nsys and ncu."
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write torch's own snapshot of the CUDA allocator (a pickle) for pytorch.org/memory_viz.",
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
    """Measure one training step of a recipe: its time, where that goes, its memory, and what would help.

    The model is built as `trimtab train` builds it, and steps run over random tokens: no training data is read, nothing
    is downloaded. The report has the step's time next to the plan's, time by kernel and by operation, memory over the
    step with the largest allocations and their lines, MFU, and the three changes of the recipe that would help most,
    with their predicted gain.

        trimtab profile recipe.yaml                            the whole report
        trimtab profile recipe.yaml max_seq_length=2048        with another key
        trimtab profile recipe.yaml --trace                    and a trace for ui.perfetto.dev
        nsys profile trimtab profile recipe.yaml --nvtx        named regions in Nsight Systems

    Whole steps are timed as the recipe runs them; torch.compile and CUDA graphs are off where single operations are
    looked at, and the report says so. A step that runs out of memory ends with exit code 6 and says what filled it.
    """
    from trimtab.cli.interrupts import work_begins
    from trimtab.run.device import need_torch
    from trimtab.run.target import named_recipe

    need_torch()
    words = [*(overrides or []), *([f"device={device}"] if device != "auto" else [])]
    loaded = named_recipe(recipe, words)
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)  # read when the profiler first runs
    from trimtab.lab.profile_options import ProfileOptions

    folder = out or DEFAULT_FOLDER / f"profile-{_name(recipe)}"
    options = ProfileOptions(steps, warm_up, document, folder, trace, nvtx, snapshot)
    work_begins()
    _run(_title(recipe, words), loaded, options, as_json=as_json)


def _run(title: str, recipe: Recipe, options: ProfileOptions, *, as_json: bool) -> None:
    """Profiles, keeps the record, writes the report and prints it."""
    from trimtab.facts.errors import OutOfMemory
    from trimtab.lab.profile_report import profile_document
    from trimtab.lab.profiling import profile_recipe
    from trimtab.lab.records import append_record
    from trimtab.lab.reporting import prepare_folder
    from trimtab.lab.study import Outcome
    from trimtab.lab.sweep import RECORDS

    assert options.folder is not None
    prepare_folder(options.folder)
    start = time.perf_counter()
    try:
        with memory_limited(recipe.device):
            result = profile_recipe(recipe, options=options, progress=_tell)
    except OutOfMemory as error:
        ended = _measurement(title, recipe, options, Outcome.OUT_OF_MEMORY, {}, error.cause, start)
        append_record(options.folder / RECORDS, ended.to_dict())
        raise
    found = _measurement(title, recipe, options, Outcome.MEASURED, result.to_dict(), "", start)
    append_record(options.folder / RECORDS, found.to_dict())
    facts = (found.machine.name, f"commit {found.commit}", found.time[:10])
    show_report(profile_document(result, title, facts), [found], options.folder, as_json=as_json)


def _measurement(
    title: str,
    recipe: Recipe,
    options: ProfileOptions,
    outcome: Outcome,
    result: dict[str, Any],
    message: str,
    start: float,
) -> Measurement:
    """The record of a profile; `start` is when it began, by the clock of time.perf_counter."""
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
    """On a CPU, no more memory than is free: a step that needs more then raises, and the machine stays usable."""
    import resource

    from trimtab.lab.worker import limit_memory
    from trimtab.run.device import detect

    if detect(device).kind != "cpu":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _tell(text: str) -> None:
    from trimtab.report.plain import plain

    print(plain(text), file=sys.stderr, flush=True)


def _title(recipe: str, words: list[str]) -> str:
    """The command's own words, for the report's head."""
    return " ".join([recipe, *words])


def _name(recipe: str) -> str:
    """A recipe's name as a part of a folder's.

    Example:
        >>> _name("recipes/starter-chat.yaml"), _name("Qwen/Qwen3-0.6B")
        ('starter-chat', 'Qwen3-0.6B')
    """
    stem = Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")
    return re.sub(r"[^\w.-]+", "-", stem) or "recipe"
