"""Loss curves as SVG: one chart per job, one line per contestant; equal losses coincide in one line."""

from __future__ import annotations

from typing import Any

from benchmarks.curves import chart
from benchmarks.end_to_end.table import Records, by_job

COLOURS = {
    "hf": "#868e96",
    "hf recompute": "#adb5bd",
    "liger": "#2b8a3e",
    "unsloth": "#9c36b5",
    "unsloth recompute": "#cc5de8",
    "trimtab nearest": "#f59f00",
    "trimtab eager": "#74c0fc",
    "trimtab tight": "#339af0",
    "trimtab": "#1864ab",
}
FEWEST = 5
"""A chart needs at least two contestants with this many steps."""
COLUMNS, WIDTH, HEIGHT = 2, 430, 300


def losses(records: Records) -> str:
    """SVG of all jobs with enough steps, in the order of the tables."""
    jobs = {
        job.name: {name: of_job[name]["losses"] for name in COLOURS if name in of_job}
        for job, of_job in by_job(records).items()
    }
    jobs = {name: lines for name, lines in jobs.items() if _has_enough_steps(lines)}
    rows = -(-len(jobs) // COLUMNS)
    size = f"{COLUMNS * WIDTH} {rows * HEIGHT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, (name, lines) in enumerate(jobs.items()):
        parts.append(f'<g transform="translate({i % COLUMNS * WIDTH}, {i // COLUMNS * HEIGHT})">')
        parts += [*_chart(name, lines), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _has_enough_steps(lines: dict[str, list[float]]) -> bool:
    return sum(len(found) >= FEWEST for found in lines.values()) > 1


def _chart(title: str, lines: dict[str, list[float]]) -> list[str]:
    points: list[tuple[str, list[Any]]] = [
        (COLOURS[name], [[step + 1, loss] for step, loss in enumerate(found)])
        for name, found in lines.items()
    ]
    legend = [
        f'<text x="60" y="{236 - 15 * i}" fill="{COLOURS[name]}" font-size="11">{name}</text>'
        for i, name in enumerate(lines)
    ]
    return [*chart(50, title, points, from_zero=False), *legend]
