"""Runs a study for `trimtab bench`: the sweep with its progress, the report and its files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.lab.study import Cell, Measurement
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
StudyDevice = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, or cuda:1 for the second GPU.")]

DEFAULT_FOLDER = Path("lab")


def study_device(requested: str) -> str:
    """Resolves `auto` and returns cpu or cuda[:N]; raises an error for a missing device."""
    from trimtab.run.device import detect

    found = detect(requested)
    return found.kind if found.index is None else f"{found.kind}:{found.index}"


def run_study(
    name: str,
    cells: Sequence[Cell],
    *,
    device: str,
    out: Path | None,
    remeasure: bool,
    as_json: bool,
    command: str | None = None,
    title: str | None = None,
    cell_seconds: float | None = None,
    limit_seconds: float | None = None,
) -> None:
    """Measures the cells of a study, writes its report and prints it; exit code 1 if a cell failed.

    Args:
        name: name of the study and of its folder in `lab`.
        cells: cells of this study, or of several studies.
        device: cpu, cuda or cuda:N.
        out: the folder of records and report; lab/NAME by default.
        remeasure: whether to measure cells that already have a record.
        as_json: whether to print the measurements as JSON lines instead of the report.
        command: the command in the report's footer; `trimtab bench NAME` by default.
        title: title of the report; the study's title by default.
        cell_seconds: time limit of one cell; ten minutes by default.
        limit_seconds: no cell starts after this time; the report then has the cells measured so far.
    """
    from trimtab.cli.interrupts import begin_work
    from trimtab.cli.study_progress import StudyProgress, count_outcomes, has_failed
    from trimtab.lab.reporting import build_report, prepare_folder
    from trimtab.lab.sweep import CELL_SECONDS, run_sweep

    folder = out or DEFAULT_FOLDER / name
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
                limit_seconds=limit_seconds,
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
        remaining = len(cells) - len(measurements)
        print(
            f"time limit reached with {remaining} of {len(cells)} cells remaining; repeat the command to continue",
            file=sys.stderr,
        )
    if not measurements:
        return
    document = build_report(measurements, command or f"trimtab bench {name}", title)
    show_report(document, measurements, folder, as_json=as_json)
    if has_failed(measurements):
        raise typer.Exit(1)


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
