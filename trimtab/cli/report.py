"""`trimtab report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.interrupts import begin_work
from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; report.html in the run folder by default.")
    ] = None,
) -> None:
    """Rebuild a run's HTML report from its metrics: curves, memory, results before and after training.

        trimtab report runs/demo

    The page is one self-contained file without external references.
    """
    from trimtab.report import read_run, write_page
    from trimtab.report.plain import plain

    target = out or run / "report.html"
    data = read_run(run)
    begin_work()
    write_page(data, target)
    for problem in data.problems():
        print(plain(f"{run}: {problem}"))
    print(plain(f"written: {target}"))
