"""Draws the errors of a list of cases: the share of cases within each error.

python -m benchmarks.plan_accuracy.picture results/plan-accuracy-held-out-nvidia-h200.jsonl docs/plan-accuracy.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.plan_accuracy import table
from trimtab.facts.files import write_atomic
from trimtab.report.document import LineChart, Series
from trimtab.report.pictures import draw_picture

DRAWN = ("allocated", "process", "step_seconds")
LEAST = 0.01
"""Percent at which errors that are smaller are drawn."""


def chart(records: table.Records, title: str) -> LineChart:
    """The chart of a list's errors; errors are absolute values in percent, on a logarithmic axis.

    Example:
        >>> found = {"a": {"predicted": {"allocated": 102}, "measured": {"allocated": 100}}}
        >>> chart(found, "one case").series[0].points
        ((2.0, 100.0),)
    """
    series = []
    for quantity in DRAWN:
        errors = [table.error(record, quantity) for record in records.values() if "failed" not in record]
        known = sorted(max(100 * abs(error), LEAST) for error in errors if error is not None)
        points = tuple((error, 100 * (i + 1) / len(known)) for i, error in enumerate(known))
        if points:
            series.append(Series(table.QUANTITIES[quantity], points))
    return LineChart(
        "plan-accuracy", title, "error of the plan, %", "runs within that error, %", tuple(series), log_x=True
    )


def main() -> int:
    """Writes the picture; 1 if the file has no case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_accuracy.picture")
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="Errors of the plan")
    parser.add_argument("--commit")
    options = parser.parse_args()
    data = draw_picture(
        chart(table.read(options.file, options.commit), options.title), options.picture.suffix[1:]
    )
    if data is None:
        print(f"error: {options.file} has no case with predictions", file=sys.stderr)
        return 1
    write_atomic(options.picture, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
