"""What a run will take, drawn before anything is trained."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes, format_count, format_seconds
from trimtab.report.buckets import Moment, picture, shown_buckets, total
from trimtab.report.plain import as_text
from trimtab.report.rundata import section
from trimtab.report.summary import parameters

WIDEST = 100
"""Columns beyond which a panel does not grow: long lines are hard to read."""


def plan_panel(plan: dict[str, Any], width: int, *, full: bool = True) -> Panel:
    """The plan as a panel of at most `width` columns.

    Args:
        plan: what plan.json holds.
        width: columns of the terminal.
        full: draw the memory of each bucket as bars and a table; otherwise one line lists the peak's buckets.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    memory = section(plan, "memory")
    moments = [Moment(w, "predicted", section(memory, w)) for w in ("before", "peak") if section(memory, w)]
    for label, value in [*_rows(plan, full=full), *([] if full else _buckets(section(memory, "peak")))]:
        grid.add_row(label, as_text(value))
    parts: list[RenderableType] = [grid]
    if moments and full:
        parts += [Text(""), picture(moments)]
    return Panel(
        Group(*parts),
        title=Text("what this run will take", style="bold"),
        title_align="left",
        border_style="bright_black",
        padding=(1, 2),
        width=min(width, WIDEST),
    )


def _buckets(peak: dict[str, Any]) -> list[tuple[str, str]]:
    """The tensors at the peak, by bucket, in one line."""
    if not peak:
        return []
    shown = [name for name in shown_buckets([Moment("peak", "predicted", peak)]) if peak.get(name)]
    listed = ", ".join(f"{name} {format_bytes(peak[name])}" for name in shown)
    return [("tensors", f"{format_bytes(total(peak))} at the peak: {listed}")]


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _rows(plan: dict[str, Any], *, full: bool) -> list[tuple[str, str]]:
    model, choices = section(plan, "model"), section(plan, "choices")
    rows = []
    if model:
        rows.append(("model", f"{model['name']} ({model['family']}, {parameters(model)})"))
    data = section(plan, "data")
    if data.get("windows"):
        amount = (
            f"{format_count(data['tokens'])} tokens in {data['windows']} windows, {data['fill']:.1%} full"
        )
        rows.append(("data", f"{amount}; {_steps(data['steps'])}"))
    elif data.get("steps"):
        rows.append(("data", _steps(data["steps"])))
    optimizer, attention = section(choices, "optimizer"), section(choices, "attention")
    if attention:
        impl = attention.get("whole", attention["impl"])
        rows.append(("attention", f"{impl}: {attention['reason']}"))
    if choices.get("precision"):
        rows.append(("precision", str(choices["precision"])))
    if optimizer:
        rows.append(("optimizer", _optimizer(optimizer)))
    kept = section(choices, "memory")
    rows += _kernels(section(choices, "loss"), section(choices, "pointwise"), kept.get("loss_memory"))
    if kept.get("sentence"):
        rows.append(("recompute", f"{kept['sentence']}: {kept['reason']}"))
    compiled = section(choices, "compile")
    if compiled and (full or compiled["on"]):
        rows.append(("compile", f"{'on' if compiled['on'] else 'off'}: {compiled['reason']}"))
    graphs = section(choices, "graphs")
    if graphs.get("on"):
        rows.append(("CUDA graphs", f"on: {graphs['reason']}"))
    return rows + _needs(plan)


def _kernels(loss: dict[str, Any], pointwise: dict[str, Any], held: int | None) -> list[tuple[str, str]]:
    """The training objective where it is more than cross-entropy; loss, norms and gates where they are other than
    torch's own operations."""
    rows = []
    terms = {"label smoothing": loss.get("label_smoothing"), "z-loss": loss.get("z_loss")}
    added = " and ".join(f"{name} {value:g}" for name, value in terms.items() if value)
    if added:
        rows.append(("objective", f"cross-entropy with {added}; evaluation measures plain cross-entropy"))
    if loss.get("impl") == "triton":
        amount = "few logits at a time" if held is None else f"{format_bytes(held)} of logits at a time"
        rows.append(("loss", f"triton, {amount}: {loss['reason']}"))
    if pointwise.get("impl") == "triton":
        rows.append(("pointwise", f"triton: {pointwise['reason']}"))
    return rows


def _optimizer(choice: dict[str, Any]) -> str:
    """The name, and where there was a choice of code, which and why."""
    chosen = choice.get("impl") not in (None, "torch")
    return f"{choice['name']}, {choice['impl']}: {choice['reason']}" if chosen else str(choice["name"])


def _needs(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Memory, disk and time: what the machine must have."""
    memory, disk, time = section(plan, "memory"), section(plan, "disk"), section(plan, "time")
    rows = []
    if memory.get("needed"):
        device = {"cpu": "CPU", "cuda": "GPU"}.get(str(section(plan, "choices").get("device")), "device")
        beside = f", {format_bytes(memory['outside'])} of it beside tensors" if memory.get("outside") else ""
        free = f"; {format_bytes(memory['available'])} are free" if memory.get("available") else ""
        if memory.get("limit", memory.get("available", 0)) < memory.get("available", 0):
            free = f"; memory_limit allows {format_bytes(memory['limit'])}"
        rows.append(("memory", f"{format_bytes(memory['needed'])} on the {device}{beside}{free}"))
    if memory.get("host"):
        rows.append(("host", f"{format_bytes(memory['host'])} of pinned memory for inputs of layers"))
    if disk.get("checkpoint_bytes"):
        one, all_ = format_bytes(disk["checkpoint_bytes"]), format_bytes(disk["total_bytes"])
        rows.append(("disk", f"{one} a checkpoint, {all_} in all"))
    if time.get("seconds"):
        rows.append(("time", f"about {format_seconds(time['seconds'])} ({time['basis']})"))
    elif time.get("floor_seconds"):
        rows.append(("time", f"at least {format_seconds(time['floor_seconds'])} ({time['basis']})"))
    return rows
