"""`--list`: the cells of a study, those that have a record, and the estimated time of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.facts.units import format_seconds

if TYPE_CHECKING:
    from trimtab.facts.devices import DeviceFacts
    from trimtab.lab.cell_times import CellTimes
    from trimtab.lab.study import Cell, Measurement


def list_cells(
    cells: Sequence[Cell], folder: Path, *, device: str, minutes: float | None, at_once: int, as_json: bool
) -> None:
    """Prints the cells in the order of measurement, with their records on this machine; measures nothing."""
    from trimtab.lab.cell_times import CellTimes, Speed
    from trimtab.lab.sweep import recorded_cells
    from trimtab.run.device import detect

    known = recorded_cells(cells, folder, device=device)
    facts = detect(device)
    times = CellTimes(Speed.of(facts))
    for measurement in known.values():
        times.observe(measurement)
    print_cells(cells, known, times, facts, minutes=minutes, at_once=at_once, as_json=as_json)


def print_cells(
    cells: Sequence[Cell],
    known: dict[str, Measurement],
    times: CellTimes,
    device: DeviceFacts,
    *,
    minutes: float | None,
    at_once: int,
    as_json: bool,
) -> None:
    """Prints cells with their records, by key, and the estimated time of the others."""
    from trimtab.lab.sharing import sweep_seconds

    if as_json:
        for cell in cells:
            print(json.dumps(_record(cell, known.get(cell.key), times), ensure_ascii=False))
        return
    for number, cell in enumerate(cells, start=1):
        print(f"{number:4}  {_state(cell, known.get(cell.key), times):24}  {cell.name}")
    print()
    left = [cell for cell in cells if cell.key not in known]
    seconds = sweep_seconds(left, times, device, at_once)
    print("\n".join(_summary(cells, known, times, seconds, minutes, at_once)))


def _record(cell: Cell, measurement: Measurement | None, times: CellTimes) -> dict[str, object]:
    return {
        "study": cell.study,
        "settings": dict(cell.settings),
        "outcome": None if measurement is None else measurement.outcome.value,
        "estimated_seconds": round(times.seconds(cell), 2) if measurement is None else None,
    }


def _state(cell: Cell, measurement: Measurement | None, times: CellTimes) -> str:
    """The recorded outcome, or the estimated time."""
    return (
        f"about {format_seconds(times.seconds(cell))}" if measurement is None else measurement.outcome.value
    )


def _summary(
    cells: Sequence[Cell],
    known: dict[str, Measurement],
    times: CellTimes,
    seconds: float,
    minutes: float | None,
    at_once: int,
) -> list[str]:
    """A line for each study and one for all of them together."""
    lines = []
    for study in dict.fromkeys(cell.study for cell in cells):
        same = [cell for cell in cells if cell.study == study]
        lines.append(f"{study}: {_amount(same, known, times)}")
    unfinished = any(cell.key not in known for cell in cells)
    if len(lines) > 1:
        lines.append(f"together: {_amount(cells, known, times)}")
    if at_once > 1 and unfinished:
        lines.append(
            f"about {format_seconds(seconds)} with {at_once} processes for what times nothing: compiling, memory, "
            "losses"
        )
    if minutes is not None and unfinished:
        pieces = max(1, math.ceil(seconds / (60 * minutes)))
        lines.append(f"about {pieces} command{'' if pieces == 1 else 's'} with --minutes {minutes:g}")
    lines.append(
        "Estimates from FLOPs, launches and compilation; expect them to be within a factor of three until cells of "
        "the same study are measured."
    )
    return lines


def _amount(cells: Sequence[Cell], known: dict[str, Measurement], times: CellTimes) -> str:
    left = [cell for cell in cells if cell.key not in known]
    recorded = len(cells) - len(left)
    total = f"{len(cells)} cell{'' if len(cells) == 1 else 's'}"
    if not left:
        return f"{total}, all recorded"
    done = f", {recorded} recorded" if recorded else ""
    return f"{total}{done}, about {format_seconds(times.total(left))} left"
