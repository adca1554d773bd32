"""What the commands of studies have in common: the sweep with its progress, the report and its files."""

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
    typer.Option(
        help="Folder for records and report; lab/STUDY by default. Records that are there are kept."
    ),
]
Again = Annotated[bool, typer.Option("--again", help="Measure cells that are recorded already as well.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON lines, not the report.")]
StudyDevice = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, or cuda:1 for the second GPU.")]

DEFAULT_FOLDER = Path("lab")


def study_device(requested: str) -> str:
    """cpu or cuda[:N]: `auto` decided, and a clear error for a device that is not there."""
    from trimtab.run.device import detect

    found = detect(requested)
    return found.kind if found.index is None else f"{found.kind}:{found.index}"


def listed(text: str | None) -> tuple[str, ...]:
    """The words of an option that takes several, separated by commas.

    Example:
        >>> listed("small, medium"), listed(None)
        (('small', 'medium'), ())
    """
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def listed_numbers(text: str | None, option: str) -> tuple[int, ...]:
    """The same of an option that takes whole numbers; RecipeError for anything else.

    Example:
        >>> listed_numbers("128,256", "--contexts")
        (128, 256)
    """
    from trimtab.facts.errors import RecipeError

    words = listed(text)
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise RecipeError(f"{option} {wrong} is no whole number", f"write it like {option} 128,256")
    return tuple(int(word) for word in words)


def run_study(
    name: str,
    cells: Sequence[Cell],
    *,
    device: str,
    out: Path | None,
    again: bool,
    as_json: bool,
    command: str | None = None,
    title: str | None = None,
    cell_seconds: float | None = None,
    limit_seconds: float | None = None,
) -> None:
    """Measures the cells of a study, writes its report and prints it; exit code 1 where a cell failed.

    Args:
        name: of the study, and of its folder in `lab`.
        cells: of this study, or of several.
        device: cpu, cuda or cuda:N.
        out: the folder of records and report; lab/NAME by default.
        again: measure cells that have a record as well.
        as_json: print measurements as JSON lines in place of the report.
        command: for the report's footer; `trimtab bench NAME` by default.
        title: of the report; the study's own by default.
        cell_seconds: the longest time for one cell; ten minutes by default.
        limit_seconds: no cell begins after this time; the report then has the cells that were measured.
    """
    from trimtab.cli.interrupts import work_begins
    from trimtab.cli.study_progress import StudyProgress, count_outcomes, has_failed
    from trimtab.lab.reporting import prepare_folder, study_document
    from trimtab.lab.sweep import CELL_SECONDS, run_sweep

    folder = out or DEFAULT_FOLDER / name
    prepare_folder(folder)
    work_begins()
    with StudyProgress(len(cells)) as progress:
        try:
            measurements = run_sweep(
                cells,
                folder,
                device=device,
                progress=progress,
                again=again,
                cell_seconds=cell_seconds or CELL_SECONDS,
                limit_seconds=limit_seconds,
            )
        except KeyboardInterrupt:
            same = "the same command without --again" if again else "the same command"
            told = f"stopped after {progress.done} of {len(cells)} cells; {same} continues with the next one"
            raise KeyboardInterrupt(told) from None
    before = (
        f" ({progress.recorded} recorded before; --again measures them again)" if progress.recorded else ""
    )
    print(count_outcomes(measurements) + before, file=sys.stderr)
    if len(measurements) < len(cells):
        left = len(cells) - len(measurements)
        print(
            f"the time is over with {left} of {len(cells)} cells left; the same command continues",
            file=sys.stderr,
        )
    if not measurements:
        return
    document = study_document(measurements, command or f"trimtab bench {name}", title)
    show_report(document, measurements, folder, as_json=as_json)
    if has_failed(measurements):
        raise typer.Exit(1)


def show_report(
    document: Document, measurements: Sequence[Measurement], folder: Path, *, as_json: bool
) -> None:
    """Writes the report's files and prints it, or the measurements as JSON lines; says what was written."""
    from trimtab.lab.reporting import write_report
    from trimtab.report.document_console import print_document

    written = write_report(document, folder)
    if as_json:
        print_records(measurements)
    else:
        print_document(document)
    tell_written(written)


def tell_written(written: Sequence[Path]) -> None:
    """Says on standard error which files a report has, pictures by their number, and why there are none."""
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
    """One JSON line for each measurement."""
    for one in measurements:
        print(json.dumps(one.to_dict(), ensure_ascii=False))
