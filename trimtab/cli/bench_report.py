"""`trimtab bench report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.studying import DEFAULT_FOLDER, AsJson, show_report


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="Study folders, or files such as records.jsonl."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; by default the folder of the records, or lab/report for several."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the report of studies from their records, from one or several machines. Nothing is measured.

        trimtab bench report lab/step

        trimtab bench report lab --out everything

        trimtab bench report laptop/records.jsonl server/records.jsonl --out both

    Each machine gets its own sections: times from two machines, or from two versions of torch, never share a table. If
    a cell was measured several times, the latest measurement is used.
    """
    from trimtab.cli.interrupts import begin_work
    from trimtab.cli.study_progress import count_outcomes
    from trimtab.lab.reporting import read_report

    document, measurements, damaged = read_report(paths, "trimtab bench report")
    begin_work()
    if damaged:
        print(f"{damaged} damaged line{'' if damaged == 1 else 's'} left out", file=sys.stderr)
    print(count_outcomes(measurements), file=sys.stderr)
    show_report(document, measurements, out or _default_folder(paths), as_json=as_json)


def _default_folder(paths: list[Path]) -> Path:
    if len(paths) > 1:
        return DEFAULT_FOLDER / "report"
    return paths[0] if paths[0].is_dir() else paths[0].parent
