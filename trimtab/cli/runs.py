"""`trimtab runs`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.verb import new_app

if TYPE_CHECKING:
    from rich.table import Table

    from trimtab.run.listing import RunSummary

app = new_app()

STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped early": "green",
    "stopped": "yellow",
    "interrupted": "yellow",
    "failed": "red",
    "not begun": "bright_black",
    "damaged": "red",
}


@app.command()
def runs(
    folder: Annotated[
        Path, typer.Argument(help="A folder that contains run folders, or a run folder.")
    ] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per run, with all values.")
    ] = False,
) -> None:
    """List runs with their progress, last loss, state, size on disk and age.

    States: running (a process is training it), finished, stopped early (by early_stopping_patience), stopped (by a
    callback), interrupted (`trimtab train --resume RUN` continues it), failed (the loss was not finite), not begun
    (interrupted before the first step; `--resume` starts it), damaged (with the reason; a run with only damaged
    metrics keeps its state). The most recently trained run is first.

        trimtab runs
        trimtab runs /data/runs --json
    """
    from trimtab.facts.names import path_of
    from trimtab.report.console import new_console
    from trimtab.report.plain import plain
    from trimtab.run.listing import runs as list_runs

    folder = path_of(folder, "folder")
    found = list_runs(folder)
    if as_json:
        for run in found:
            print(json.dumps(run.to_dict()))
        return
    if not found:
        print(plain(f"no runs in {folder}"))
        return
    new_console().print(_table(found, folder, time.time()))


def _table(found: list[RunSummary], folder: Path, now: float) -> Table:
    from rich.table import Table
    from rich.text import Text

    from trimtab.facts.units import format_bytes, format_seconds
    from trimtab.report.plain import as_text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", show_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", overflow="fold")
    for column in ("step", "loss", "disk", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in found:
        state = run.state if run.problem is None else f"{run.state}: {run.problem}"
        inside = run.path.relative_to(folder) if run.path != folder else run.path
        table.add_row(
            as_text(str(inside)),
            Text(state, style=STYLES[run.state]),
            f"{run.step:,} / {'?' if run.total_steps is None else format(run.total_steps, ',')}",
            "" if run.loss is None else f"{run.loss:.4f}",
            format_bytes(run.size_bytes),
            format_seconds(max(1, round(now - run.updated))),
        )
    return table
