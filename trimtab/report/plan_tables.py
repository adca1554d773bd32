"""Terminal output of the planner's what-if lists, searches, tables of plans and calibration, from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes, format_rate, format_seconds
from trimtab.report.plain import as_text, plain

MAX_OPTIONS = 8
"""Maximum number of listed candidates of a search."""
AUTOMATIC = "(if memory is short)"
"""Shown instead of a recipe line for a technique that no recipe key sets: the planner uses it by itself."""


def what_if_view(effects: list[dict[str, Any]]) -> RenderableType:
    """Lists the memory and time of each technique: of using it, or of turning it off if it is in use."""
    useful = [effect for effect in effects if not effect["in_use"]]
    used = [effect for effect in effects if effect["in_use"]]
    parts: list[RenderableType] = []
    if useful:
        parts += [
            Text("Techniques that would save memory, sorted by time cost per saved GiB:"),
            _effects(useful, "saves"),
        ]
    if used:
        parts += [
            Text(""),
            Text("Techniques in use; the effect of turning each off:"),
            _effects(used, "memory"),
        ]
    if any(effect["seconds"] is None for effect in effects):
        parts.append(
            Text(
                "No times are shown: the device's speed is not known; name the GPU (--gpu rtx4090), or use --calibrate."
            )
        )
    if any(not effect["same_training"] for effect in effects):
        parts.append(Text("* trains other parameters, or in other dtypes", style="bright_black"))
    return Group(*parts)


def _effects(effects: list[dict[str, Any]], heading: str) -> Table:
    table = _table("technique", (heading, "right"), ("time per step", "right"), ("recipe", "left", True))
    for effect in effects:
        name = effect["technique"] + ("" if effect["same_training"] else " *")
        if effect["host"] > 0:
            name += f", {format_bytes(effect['host'])} on the host"
        saved = format_bytes(effect["saved"]) if heading == "saves" else _signed_bytes(-effect["saved"])
        lines = recipe_lines(effect["recipe"]) or [AUTOMATIC]
        table.add_row(as_text(name), saved, signed_seconds(effect["seconds"]), as_text("\n".join(lines)))
    return table


def answer_view(answer: dict[str, Any]) -> RenderableType:
    """Returns a search's answer: the sentence, the recipe lines to paste, and the candidates."""
    parts: list[RenderableType] = [Text(plain(answer["answer"]), style="bold")]
    if answer["recipe"]:
        parts += [Text(""), *(Text(f"  {line}") for line in recipe_lines(answer["recipe"]))]
    if answer["options"]:
        parts += [Text(""), _options(answer["options"])]
    return Group(*parts)


def _options(options: list[dict[str, Any]]) -> RenderableType:
    priced = any(option["dollars_per_million_tokens"] is not None for option in options)
    headings: list[Any] = [("", "left", True), ("needs", "right"), ("of", "right"), ("tokens/s", "right")]
    if priced:
        headings.append(("$ / 1 M tokens", "right"))
    table = _table(*headings, "recompute")
    for option in options[:MAX_OPTIONS]:
        rate = option["tokens_per_second"]
        cells: list[str | Text] = [
            as_text(option["name"]),
            format_bytes(option["needed"], up=True),
            format_bytes(option["available"]),
            format_rate(rate) if rate else "–",
        ]
        if priced:
            dollars = option["dollars_per_million_tokens"]
            cells.append("–" if dollars is None else f"{dollars:.3g}")
        table.add_row(*cells, as_text(option["recompute"]))
    more = len(options) - MAX_OPTIONS
    return Group(table, Text(f"and {more} more (--json lists all)", "bright_black")) if more > 0 else table


def table_view(cells: list[dict[str, Any]]) -> RenderableType:
    """Returns the table of many plans: models and methods as rows, GPUs as columns."""
    gpus = list(dict.fromkeys(cell["gpu"] for cell in cells))
    table = _table(("model", "left", True), ("method", "left", True), *((gpu, "right") for gpu in gpus))
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["model"], cell["method"]), {})[cell["gpu"]] = cell
    last = None
    for (model, method), found in rows.items():
        name = "" if model == last else model.rpartition("/")[2]
        last = model
        table.add_row(as_text(name), method, *(_cell(found[gpu]) for gpu in gpus))
    shown = "longest sequence" if any("longest" in cell for cell in cells) else "tokens/s"
    key = f"Peak memory and {shown}; ✗ is the minimum memory of a run that does not fit."
    return Group(table, Text(key, style="bright_black"), *(Text(plain(note)) for note in table_notes(cells)))


def table_notes(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns notes on the cells of a table: the errors of those without a plan, and models that cannot be trained."""
    untrained = dict.fromkeys(
        cell["model"] for cell in cells if cell.get("tokens_per_second") and not cell.get("validated", True)
    )
    notes = []
    if untrained:
        notes.append(f"trimtab cannot train {', '.join(untrained)} yet: tokens/s are not validated.")
    problems = dict.fromkeys(cell["problem"] for cell in cells if cell.get("problem"))
    return notes + [f"– {problem}" for problem in problems]


def _cell(cell: dict[str, Any]) -> Text:
    if cell.get("problem"):
        return Text("–", style="bright_black")
    needed = format_bytes(cell["needed"], up=True)
    if not cell["fits"]:
        return Text(f"✗ {needed}", style="red")
    if cell.get("longest") is not None:
        return Text(f"{needed}\n{cell['longest']:,}")
    rate = cell["tokens_per_second"]
    return Text(f"{needed}\n{format_rate(rate)}/s" if rate else needed)


def calibration_view(found: dict[str, Any], path: str) -> RenderableType:
    """Returns the measurements of `--calibrate` and the path where they are saved."""
    rows = [(f"matmul in {dtype}", f"{rate / 1e12:.3g} TFLOP/s") for dtype, rate in found["flops"].items()]
    rows.append(("copy", f"{found['copy'] / 1e9:.3g} GB/s"))
    rows.append(("launch overhead", f"{1e6 * found['launch_seconds']:.3g} µs"))
    named = {
        "to_host": "device to host",
        "from_host": "host to device",
        "disk_write": "disk write",
        "disk_read": "disk read",
    }
    rows += [(name, f"{found[key] / 1e9:.3g} GB/s") for key, name in named.items() if found.get(key)]
    table = _table("measured", ("", "right"))
    for name, value in rows:
        table.add_row(name, value)
    threads = f" with {found['threads']} threads" if found.get("threads") else ""
    head = f"{found['device']}{threads}: {len(found['samples'])} kernels measured, saved to {path}"
    return Group(
        as_text(head), Text(""), table, Text(""), Text("Plans for this device will use these measurements.")
    )


def signed_seconds(seconds: float | None) -> str:
    """Formats a difference of times; empty if it is unknown.

    Example:
        >>> signed_seconds(0.25), signed_seconds(-2.0), signed_seconds(0.0), signed_seconds(None)
        ('+ 250 ms', '− 2.0 s', '±0', '')
    """
    if seconds is None:
        return ""
    if abs(seconds) < 5e-5:
        return "±0"
    return f"{'+' if seconds > 0 else '−'} {format_seconds(abs(seconds))}"


def _signed_bytes(count: int) -> str:
    return f"{'−' if count < 0 else '+'} {format_bytes(abs(count))}"


def recipe_lines(keys: dict[str, Any]) -> list[str]:
    """Formats recipe keys as lines to paste.

    Example:
        >>> recipe_lines({"load_in_4bit": True, "lora": {"r": 16}})
        ['load_in_4bit: true', 'lora: {r: 16}']
    """
    return [f"{key}: {_value(value)}" for key, value in keys.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(inner)}" for key, inner in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _table(*headings: Any) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bright_black")
    for heading in headings:
        name, justify, *whole = heading if isinstance(heading, tuple) else (heading, "left")
        table.add_column(name, justify=justify, no_wrap=justify == "right" or bool(whole))
    return table
