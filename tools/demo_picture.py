"""Renders the terminal output of a run as SVG for the README: plan, progress and final report.

python tools/demo_picture.py runs/demo docs/demo.svg --width 92
"""

from __future__ import annotations

import argparse
import inspect
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from trimtab.report import LiveView, read_run
from trimtab.report.closing import closing_summary
from trimtab.report.progress import Training
from trimtab.report.rundata import RunData

# rich's template loads a web font; without it the viewer's own font is used.
RICHS_FRAME = inspect.signature(Console.export_svg).parameters["code_format"].default
FRAME = re.sub(r"@font-face \{\{.*?\}\}\n?", "", RICHS_FRAME, flags=re.DOTALL)


def draw(data: RunData, width: int, command: str) -> str:
    """Returns the SVG of a run's terminal output."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(Text.assemble(("$ ", "bold green"), command))
    view = LiveView(total_steps=data.of("train")[-1]["step"] if data.of("train") else 0, console=console)
    view.plan(data.plan)
    measured = [*data.of("eval"), *data.of("answers")]
    last = max((r["step"] for r in measured), default=0)
    for step in sorted({0, last}):
        for record in measured:
            if record["step"] == step:
                view.record(record)
    if data.of("train"):
        training = Training(total=data.of("train")[-1]["step"])
        for record in data.of("train"):
            training.update(record)
        console.print(training)
    console.print(closing_summary(data))
    return console.export_svg(title=command, theme=DIMMED_MONOKAI, code_format=FRAME, unique_id="trimtab")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--width", type=int, default=92, help="columns of the terminal")
    parser.add_argument("--command", default="make demo", help="the command shown in the first line")
    given = parser.parse_args()
    given.out.write_text(draw(read_run(given.run), given.width, given.command), encoding="utf-8")
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
