"""`trimtab report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.interrupts import work_begins
from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; by default into the run folder.")
    ] = None,
) -> None:
    """Draw a run's report page again from its data: curves, memory, what was gained and what was lost.

        trimtab report runs/demo

    The page is one file without any reference to the outside; it can be mailed as it is.
    """
    from trimtab.report import read_run, write_page
    from trimtab.report.plain import plain

    target = out or run / "report.html"
    data = read_run(run)
    work_begins()
    write_page(data, target)
    for flaw in data.flaws():
        print(plain(f"{run}: {flaw}"))
    print(plain(f"written: {target}"))
