"""Runs a study for `trimtab bench`: the sweep with its progress, the report and its files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.facts.units import format_seconds

if TYPE_CHECKING:
    from trimtab.cli.study_progress import StudyProgress
    from trimtab.lab.study import Cell, Measurement
    from trimtab.lab.sweep import Sharing, TimeLimit
    from trimtab.report.document import Document

Out = Annotated[
    Path | None,
    typer.Option(help="Folder for records and report; lab/STUDY by default. Existing records are kept."),
]
Remeasure = Annotated[
    bool, typer.Option("--remeasure", help="Measure all cells, including those that have a record.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the measurements as JSON lines instead of the report.")
]
Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Stop after this many minutes: no cell starts that is expected to end later. Repeat the command to "
        "continue.",
    ),
]
ListCells = Annotated[
    bool,
    typer.Option("--list", help="List the cells with their records or estimated times; measure nothing."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Processes for what times nothing: compiling, memory, losses. Timed cells always run alone. On a GPU "
        "by its memory and the cores, 1 on a CPU.",
    ),
]
Commit = Annotated[
    str | None,
    typer.Option(metavar="HASH", help="Commit of the code, for the records of a machine without git."),
]
StudyDevice = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, or cuda:1 for the second GPU.")]

DEFAULT_FOLDER = Path("lab")


def study_device(requested: str) -> str:
    """Resolves `auto` and returns cpu or cuda[:N]; raises an error for a missing device."""
    from trimtab.run.device import detect

    found = detect(requested)
    return found.kind if found.index is None else f"{found.kind}:{found.index}"


def check_models(names: Sequence[str]) -> None:
    """Resolves models by name, without their weights; raises before a sweep in which every cell would fail.

    Raises:
        ModelError: a folder or file is no model.
        HubError: a hub id cannot be resolved.
    """
    from trimtab.run.locate import model_folder

    for name in names:
        model_folder(name, weights=False)


def run_study(
    name: str,
    cells: Sequence[Cell],
    *,
    device: str,
    out: Path | None,
    remeasure: bool,
    as_json: bool,
    minutes: float | None = None,
    listed: bool = False,
    command: str | None = None,
    title: str | None = None,
    cell_seconds: float | None = None,
    at_once: int | None = None,
    commit: str | None = None,
) -> None:
    """Measures the cells of a study, writes its report and prints it; exit code 1 if a cell failed.

    With a time limit the report is written once all cells have been measured: while pictures are drawn, the GPU waits.

    Args:
        name: name of the study and of its folder in `lab`.
        cells: cells of this study, or of several studies.
        device: cpu, cuda or cuda:N.
        out: the folder of records and report; lab/NAME by default.
        remeasure: whether to measure cells that already have a record.
        as_json: whether to print the measurements as JSON lines instead of the report.
        minutes: the time limit of this command; None for none.
        listed: whether to list the cells instead of measuring them.
        command: the command in the report's footer; `trimtab bench NAME` by default.
        title: title of the report; the study's title by default.
        cell_seconds: time limit of one cell; ten minutes by default.
        at_once: processes for what times nothing; by default what the device permits.
        commit: commit of the code, where git does not know it.

    Raises:
        RecipeError: `minutes` or `at_once` is not positive.
    """
    from trimtab.cli.interrupts import begin_work
    from trimtab.cli.study_list import list_cells
    from trimtab.cli.study_progress import StudyProgress, count_outcomes, has_failed
    from trimtab.lab.reporting import build_report, prepare_folder
    from trimtab.lab.sweep import CELL_SECONDS, run_sweep

    folder = out or DEFAULT_FOLDER / name
    limit = _time_limit(minutes, device)
    chosen = _at_once(at_once, device)
    if listed:
        list_cells(cells, folder, device=device, minutes=minutes, at_once=chosen, as_json=as_json)
        return
    prepare_folder(folder)
    begin_work()
    with StudyProgress(len(cells)) as progress:
        try:
            measurements = run_sweep(
                cells,
                folder,
                device=device,
                progress=progress,
                remeasure=remeasure,
                cell_seconds=cell_seconds or CELL_SECONDS,
                limit=limit,
                commit=commit,
                sharing=_sharing(chosen, device, progress),
            )
        except KeyboardInterrupt:
            same = "the same command without --remeasure" if remeasure else "the same command"
            message = f"stopped after {progress.done} of {len(cells)} cells; {same} continues with the next"
            raise KeyboardInterrupt(message) from None
    before = (
        f" ({progress.recorded} recorded before; --remeasure measures them again)"
        if progress.recorded
        else ""
    )
    print(count_outcomes(measurements) + before, file=sys.stderr)
    if len(measurements) < len(cells):
        same = "repeat it without --remeasure" if remeasure else "repeat the command"
        print(_unfinished(cells, measurements, limit, same, folder), file=sys.stderr)
        if as_json:
            print_records(measurements)
    else:
        document = build_report(measurements, command or f"trimtab bench {name}", title)
        show_report(document, measurements, folder, as_json=as_json)
    if has_failed(measurements):
        raise typer.Exit(1)


def _time_limit(minutes: float | None, device: str) -> TimeLimit | None:
    if minutes is None:
        return None
    from trimtab.facts.errors import RecipeError
    from trimtab.lab.cell_times import CellTimes, Speed
    from trimtab.lab.sweep import TimeLimit
    from trimtab.run.device import detect

    if not 0 < minutes < math.inf:
        raise RecipeError(f"--minutes {minutes:g} is not positive", "give a number above 0")
    return TimeLimit(60 * minutes, CellTimes(Speed.of(detect(device))))


def _at_once(requested: int | None, device: str) -> int:
    """The number of processes for shared work."""
    from trimtab.facts.errors import RecipeError
    from trimtab.lab.sharing import processes_at_once
    from trimtab.run.device import detect

    if requested is None:
        return processes_at_once(detect(device)) if device.startswith("cuda") else 1
    if requested < 1:
        raise RecipeError(f"--at-once {requested} is too small", "use at least 1")
    return requested


def _sharing(at_once: int, device: str, progress: StudyProgress) -> Sharing:
    from trimtab.lab.sharing import memory_budget
    from trimtab.lab.sweep import Sharing
    from trimtab.run.device import detect

    if at_once == 1:
        return Sharing()
    return Sharing(at_once, memory_budget(detect(device), at_once), progress.preparing)


def _unfinished(
    cells: Sequence[Cell],
    measurements: Sequence[Measurement],
    limit: TimeLimit | None,
    same: str,
    folder: Path,
) -> str:
    """What is left after the time limit, and how to continue."""
    assert limit is not None, "only a time limit leaves cells unmeasured"
    measured = {measurement.cell.key for measurement in measurements}
    left = [cell for cell in cells if cell.key not in measured]
    lines = [
        f"time limit reached with {len(left)} of {len(cells)} cells remaining, about "
        f"{format_seconds(limit.times.total(left))}; {same} to continue"
    ]
    lines += [f"stopped at the limit, not recorded: {cell.name}" for cell in limit.stopped]
    if limit.stopped and not limit.measured:
        lines.append("this cell alone takes longer than the limit: give more --minutes")
    if measurements:
        lines.append(f"a report of the cells so far: trimtab bench report {folder}")
    return "\n".join(lines)


def show_report(
    document: Document, measurements: Sequence[Measurement], folder: Path, *, as_json: bool
) -> None:
    """Writes the report, prints it or the measurements as JSON lines, and lists the written files."""
    from trimtab.lab.reporting import write_report
    from trimtab.report.document_console import print_document

    written = write_report(document, folder)
    if as_json:
        print_records(measurements)
    else:
        print_document(document)
    tell_written(written)


def tell_written(written: Sequence[Path]) -> None:
    """Lists a report's files on standard error, with the number of pictures or the reason why there are none."""
    from trimtab.report.document_markdown import PICTURES
    from trimtab.report.pictures import MISSING, can_draw
    from trimtab.report.plain import plain

    pictures = [path for path in written if path.parent.name == PICTURES]
    files = [str(path) for path in written if path not in pictures]
    if pictures:
        files.append(f"{len(pictures)} picture{'' if len(pictures) == 1 else 's'} in {pictures[0].parent}")
    print(plain(f"wrote {', '.join(files)}"), file=sys.stderr)
    if not can_draw():
        print(MISSING, file=sys.stderr)


def print_records(measurements: Sequence[Measurement]) -> None:
    """Prints one JSON line per measurement."""
    for measurement in measurements:
        print(json.dumps(measurement.to_dict(), ensure_ascii=False))
