"""The plan of a run in the terminal, shown before training."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes, format_count, format_rate, format_seconds
from trimtab.report.buckets import COLORS, Moment, bucket_bar, picture, shown_buckets, total
from trimtab.report.plain import as_text
from trimtab.report.rundata import section
from trimtab.report.summary import parameters

WIDEST = 100
"""Columns beyond which a panel does not grow: long lines are hard to read."""
KERNEL_ROWS = ("attention", "optimizer", "loss", "pointwise", "compile", "CUDA graphs", "memory")
"""Rows that the short view has in one line, or that its first line and its table say already."""
BARS_FROM = 96
"""Terminal width from which on phases have a bar next to their numbers."""


def verdict(plan: dict[str, Any]) -> str:
    """Whether a plan fits and by how much, in one sentence.

    Example:
        >>> verdict({"memory": {"needed": 3 * 2**30, "available": 8 * 2**30}, "device": {"name": "a GPU"}})
        'Fits: needs 3.00 GiB of the 8.00 GiB that a GPU has; 5.00 GiB are left.'
    """
    memory = section(plan, "memory")
    available = int(memory["available"])
    there, needed = min(int(memory.get("limit", available)), available), int(memory["needed"])
    name = section(plan, "device").get("name", "the device")
    has = f"{name} has" if there == available else "memory_limit allows"
    if needed > there:
        return (
            f"Does not fit: needs {format_bytes(needed, up=True)} and {has} {format_bytes(there)}; "
            f"{format_bytes(needed - there, up=True)} are missing."
        )
    if plan.get("fits") is False:
        return f"Does not fit: the host has too little memory to pin {format_bytes(memory['host'])}."
    return (
        f"Fits: needs {format_bytes(needed, up=True)} of the {format_bytes(there)} that {has}; "
        f"{format_bytes(there - needed)} are left."
    )


def plan_view(plan: dict[str, Any], width: int) -> RenderableType:
    """The answer of `trimtab plan`: the verdict first, then what is trained, time, memory by phase and part.

    Args:
        plan: what `trimtab.plan.detail.detailed` says.
        width: columns of the terminal.
    """
    style = "bold green" if plan.get("fits") else "bold red"
    parts: list[RenderableType] = [as_text(verdict(plan), style), Text(""), _grid(_short_rows(plan))]
    phases = section(plan, "phases")
    if phases.get("phases"):
        parts += [Text(""), _phase_table(phases["phases"], min(width, WIDEST))]
    held = activations(plan)
    if held:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
        parts += [Text(""), as_text(f"Activations at the peak: {listed}.")]
    return Constrain(Group(*parts), min(width, WIDEST))


def plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what is trained and how, time, memory and disk."""
    job = section(plan, "job")
    first = _rows(plan, full=False)
    if job:
        batch, accumulation = job["per_device_train_batch_size"], job["gradient_accumulation_steps"]
        tokens = batch * accumulation * job["max_seq_length"]
        packed = "packed" if job["packing"] else "not packed"
        step = (
            f"{batch} × {accumulation} sequences of {job['max_seq_length']} tokens, {packed}: "
            f"{format_count(tokens)} tokens"
        )
        first.insert(1, ("step", step))
    return first


def _short_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """`plan_rows` without what the verdict and the table of phases say, implementations in one line."""
    choices = section(plan, "choices")
    rows = [row for row in plan_rows(plan) if row[0] not in KERNEL_ROWS]
    used = [
        f"{name} {section(choices, key).get('whole') or section(choices, key)['impl']}"
        for name, key in (("attention", "attention"), ("loss", "loss"), ("norms and gates", "pointwise"))
        if section(choices, key).get("impl")
    ]
    optimizer = section(choices, "optimizer")
    if optimizer.get("name"):
        used.append(f"optimizer {optimizer['name']}")
    used += ["CUDA graphs"] if section(choices, "graphs").get("on") else []
    used += ["torch.compile"] if section(choices, "compile").get("on") else []
    at = next((i for i, row in enumerate(rows) if row[0] == "recompute"), len(rows))
    return [*rows[:at], ("kernels", ", ".join(used)), *rows[at:]] if used else rows


def _grid(rows: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column()
    for label, value in rows:
        grid.add_row(label, as_text(value))
    return grid


def activations(plan: dict[str, Any]) -> dict[str, int]:
    """The activations of the peak by part, the largest first.

    Gradients of parameters that are not allocated yet at the peak are negative in the plan, and are left out here.
    """
    parts = section(section(plan, "phases"), "activations")
    return {name: size for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size > 0}


def _phase_table(phases: list[dict[str, Any]], width: int) -> Table:
    """Peak memory of each phase by bucket; with a bar where there is room for one."""
    scale = max(int(row["needed"]) for row in phases)
    shown = [name for name in COLORS if any(row.get(name) for row in phases)]
    unit, size = ("GiB", 2**30) if scale >= 2**30 else ("MiB", 2**20)
    bars = width >= BARS_FROM
    space = (0, 2, 0, 0) if bars else (0, 1, 0, 0)
    table = Table(box=None, padding=space, show_edge=False, expand=bars, header_style="bright_black")
    table.add_column(f"peak memory, {unit}", no_wrap=True)
    if bars:
        table.add_column("", ratio=1)
    for name in shown:
        table.add_column(Text(name, style=COLORS[name]), justify="right", no_wrap=True)
    table.add_column("needs", justify="right", no_wrap=True)
    for row in phases:
        sizes = (f"{row[name] / size:.2f}" if row.get(name) else "–" for name in shown)
        where = " (CPU)" if row["device"] == "cpu" and phases[0]["device"] != "cpu" else ""
        bar = [bucket_bar(row, scale)] if bars else []
        table.add_row(f"{row['phase']}{where}", *bar, *sizes, Text(f"{row['needed'] / size:.2f}", "bold"))
    return table


def plan_panel(plan: dict[str, Any], width: int, *, full: bool = True) -> Panel:
    """The plan as a panel of at most `width` columns.

    Args:
        plan: what plan.json holds.
        width: columns of the terminal.
        full: draw the memory of each bucket as bars and a table; otherwise one line lists the peak's buckets.
    """
    memory = section(plan, "memory")
    moments = [Moment(w, "predicted", section(memory, w)) for w in ("before", "peak") if section(memory, w)]
    rows = [*_rows(plan, full=full), *([] if full else _buckets(section(memory, "peak")))]
    parts: list[RenderableType] = [_grid(rows)]
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
        active, whole = model.get("active"), model.get("parameters")
        some = f"; {format_count(active)} active per token" if active and whole and active < whole else ""
        rows.append(("model", f"{model['name']} ({model['family']}, {parameters(model)}{some})"))
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
    """The name and, if there were several implementations, which one was chosen and why."""
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
    host = section(plan, "phases").get("host")
    pinned = f"{format_bytes(memory['host'])} pinned for offloaded activations" if memory.get("host") else ""
    if host and section(plan, "choices").get("device") != "cpu":
        rows.append(("host", f"{format_bytes(host)} at most" + (f", with {pinned}" if pinned else "")))
    elif pinned:
        rows.append(("host", pinned))
    if disk.get("checkpoint_bytes"):
        one, all_ = format_bytes(disk["checkpoint_bytes"]), format_bytes(disk["total_bytes"])
        rows.append(("disk", f"{one} a checkpoint, {all_} in all"))
    return rows + _times(time)


def _times(time: dict[str, Any]) -> list[tuple[str, str]]:
    """The time of a step and of the run, and what the estimates are based on."""
    rows, step = [], section(time, "step")
    if step:
        between = f"{format_seconds(step['low_seconds'])} to {format_seconds(step['high_seconds'])}"
        rate = (
            f", {format_rate(time['tokens_per_second'])} tokens per second"
            if time.get("tokens_per_second")
            else ""
        )
        rows.append(("time", f"about {format_seconds(step['seconds'])} per step ({between}){rate}"))
    if time.get("seconds"):
        parts = [
            f"{format_seconds(time[key])} of {name}"
            for key, name in (("evaluation_seconds", "evaluation"), ("checkpoint_seconds", "checkpoints"))
            if time.get(key)
        ]
        rows.append(
            (
                "run",
                f"about {format_seconds(time['seconds'])}"
                + (f", with {' and '.join(parts)}" if parts else ""),
            )
        )
    elif time.get("floor_seconds") and not step:
        rows.append(("time", f"at least {format_seconds(time['floor_seconds'])}"))
    if time.get("basis"):
        rows.append(
            ("time from" if rows else "time", str(time["basis"]) if rows else f"not known: {time['basis']}")
        )
    return rows
