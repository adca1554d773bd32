"""The plan as an HTML page: memory of a step over time and by phase, time by operation, what-if table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.facts.units import format_bytes, format_rate, format_seconds
from trimtab.report.html import figure_script, page_environment, policy, read_templates, write_html
from trimtab.report.plan_panel import activations, highest_bytes, launch_bound, plan_rows, verdict
from trimtab.report.plan_tables import AUTOMATIC, recipe_lines, signed_seconds, table_notes
from trimtab.report.rundata import section
from trimtab.report.summary import parameters
from trimtab.report.timeline import draw_timeline

MAX_OPERATIONS = 16
"""Maximum number of listed operations; the remaining, shorter ones are summed."""
PHASES = ("forward", "backward", "recompute", "update")


def write_plan_page(plan: dict[str, Any], effects: list[dict[str, Any]], target: Path) -> None:
    """Writes the page of one plan.

    Args:
        plan: the result of `trimtab.plan.detail.detailed_dict`.
        effects: what-if rows from `trimtab.plan.what_if.Effect.to_dict`.
        target: the file to write; an existing one is replaced.
    """
    write_html(render_plan(plan, effects), target, option="--page")


def write_table_page(cells: list[dict[str, Any]], target: Path) -> None:
    """Writes a table of many plans, given as results of `trimtab.plan.table.Cell.to_dict`."""
    gpus = list(dict.fromkeys(cell["gpu"] for cell in cells))
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["model"], cell["method"]), {})[cell["gpu"]] = _shown_cell(cell)
    listed = [{"model": model, "method": method, "cells": found} for (model, method), found in rows.items()]
    page = _render(
        "plan_table.html",
        [],
        title="Plans",
        gpus=gpus,
        rows=listed,
        longest=any("longest" in cell for cell in cells),
        notes=table_notes(cells),
    )
    write_html(page, target, option="--page")


def render_plan(plan: dict[str, Any], effects: list[dict[str, Any]]) -> str:
    """Returns the HTML of one plan's page."""
    memory = section(plan, "memory")
    timeline = draw_timeline(
        plan.get("timeline") or [],
        int(memory.get("outside", 0)),
        memory.get("limit") or memory.get("available"),
    )
    scripts = []
    if timeline is not None:
        scripts = [figure_script({timeline.id: timeline.figure}, "hover.js", "stack.js")]
    model, job, device = section(plan, "model"), section(plan, "job"), section(plan, "device")
    facts = [
        str(model.get("family", "")),
        parameters(model),
        str(job.get("method", "")),
        str(device.get("name", "")),
    ]
    used = [effect for effect in effects if effect["in_use"]]
    step = section(section(plan, "time"), "step")
    return _render(
        "plan.html",
        scripts,
        title=str(model.get("name", "plan")),
        facts=[fact for fact in facts if fact],
        fits=bool(plan.get("fits")),
        verdict=verdict(plan),
        tiles=_tiles(plan),
        timeline=timeline,
        phases=_phases(section(plan, "phases").get("phases") or []),
        activations=_shares(activations(plan)),
        operations=_operations(plan.get("operations") or []),
        launches=format_seconds(step["seconds"]) if step and launch_bound(step) else "",
        useful=[_effect(effect) for effect in effects if not effect["in_use"]],
        used=[_effect(effect) for effect in used],
        rows=plan_rows(plan),
        notes=plan.get("notes") or [],
    )


def _render(template: str, scripts: list[str], **values: Any) -> str:
    styles = read_templates("page.css", "charts.css", "plan.css")
    return (
        page_environment()
        .get_template(template)
        .render(policy=policy(scripts, styles), scripts=scripts, styles=styles, **values)
    )


def _tiles(plan: dict[str, Any]) -> dict[str, str]:
    """The key figures at the top of the page."""
    memory, time, disk = section(plan, "memory"), section(plan, "time"), section(plan, "disk")
    found = {"memory needed": format_bytes(highest_bytes(plan), up=True)}
    limit = min(memory.get("limit", memory["available"]), memory["available"])
    found["memory available"] = format_bytes(limit)
    if memory.get("host"):
        found["pinned host memory"] = format_bytes(memory["host"])
    if isinstance(time.get("step"), dict):
        found["optimizer step"] = format_seconds(time["step"]["seconds"])
    if time.get("tokens_per_second"):
        found["tokens per second"] = format_rate(time["tokens_per_second"])
    if time.get("seconds"):
        name = "remaining run time" if time.get("trained_steps") else "total run time"
        found[name] = format_seconds(time["seconds"])
    if disk.get("total_bytes"):
        found["disk"] = format_bytes(disk["total_bytes"])
    return found


def _phases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bars by phase as (class, start, width, formatted size), in per mille of the largest total."""
    scale = max([1, *(int(row["needed"]) for row in rows)])
    found = []
    for row in rows:
        start, bars = 0.0, []
        for name in ("weights", "optimizer", "gradients", "activations", "other"):
            width = 1000 * int(row.get(name, 0)) / scale
            bars.append((name, round(start, 2), round(width, 2), format_bytes(int(row.get(name, 0)))))
            start += width
        where = " (CPU)" if row["device"] == "cpu" and rows[0]["device"] != "cpu" else ""
        total = format_bytes(int(row["needed"]))
        found.append({"phase": f"{row['phase']}{where}", "note": row["note"], "bars": bars, "total": total})
    return found


def _shares(parts: dict[str, Any]) -> list[dict[str, Any]]:
    whole = max(sum(int(size) for size in parts.values()), 1)
    return [
        {
            "name": name,
            "size": format_bytes(int(size)),
            "share": f"{int(size) / whole:.0%}",
            "width": 1000 * int(size) / whole,
        }
        for name, size in parts.items()
    ]


def _operations(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Time of each operation by phase, in descending order."""
    if not rows:
        return None
    shown, rest = rows[:MAX_OPERATIONS], rows[MAX_OPERATIONS:]
    if rest:
        phases: dict[str, float] = {}
        for row in rest:
            for phase, seconds in row["phases"].items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        others = {
            "name": f"{len(rest)} others",
            "kind": "",
            "seconds": sum(phases.values()),
            "phases": phases,
        }
        shown = [*shown, others]
    whole = sum(row["seconds"] for row in rows) or 1.0
    longest = max(row["seconds"] for row in shown) or 1.0
    found = []
    for row in shown:
        start, bars = 0.0, []
        for phase in PHASES:
            width = 1000 * row["phases"].get(phase, 0.0) / longest
            bars.append(
                (phase, round(start, 2), round(width, 2), format_seconds(row["phases"].get(phase, 0.0)))
            )
            start += width
        found.append(
            {
                "name": row["name"],
                "kind": row["kind"],
                "bars": bars,
                "seconds": format_seconds(row["seconds"]),
                "share": f"{row['seconds'] / whole:.0%}",
            }
        )
    names = [phase for phase in PHASES if any(row["phases"].get(phase) for row in rows)]
    return {"rows": found, "phases": names}


def _effect(effect: dict[str, Any]) -> dict[str, Any]:
    saved = effect["saved"]
    sign = "−" if saved > 0 else "+"
    return {
        "name": effect["technique"],
        "memory": f"{sign} {format_bytes(abs(saved))}",
        "host": format_bytes(effect["host"]) if effect["host"] > 0 else "",
        "time": signed_seconds(effect["seconds"]) or "unknown",
        "lines": recipe_lines(effect["recipe"]) or [AUTOMATIC],
        "same": effect["same_training"],
    }


def _shown_cell(cell: dict[str, Any]) -> dict[str, Any]:
    if cell.get("problem"):
        return {"kind": "none", "text": "–", "more": ""}
    needed = format_bytes(cell["needed"], up=True)
    if not cell["fits"]:
        return {"kind": "no", "text": needed, "more": "minimum needed"}
    if cell.get("longest") is not None:
        return {"kind": "yes", "text": needed, "more": f"up to {cell['longest']:,} tokens"}
    rate = cell["tokens_per_second"]
    return {"kind": "yes", "text": needed, "more": f"{format_rate(rate)} tokens/s" if rate else ""}
