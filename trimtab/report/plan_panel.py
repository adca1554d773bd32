"""Shows the plan of a run in the terminal, before training and in `trimtab plan`."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes, format_count, format_rate, format_seconds
from trimtab.report.attention_kinds import attention_kinds
from trimtab.report.buckets import COLORS, BucketSizes, bucket_bar, buckets_view, shown_buckets, total
from trimtab.report.plain import as_text
from trimtab.report.rundata import section
from trimtab.report.summary import parameters

MAX_WIDTH = 100
"""Maximum width of a panel in columns: long lines are hard to read."""
KERNEL_ROWS = ("attention", "optimizer", "loss", "pointwise", "compile", "CUDA graphs", "memory")
"""Rows that the short view merges into one line, or that its first line and its table already contain."""
MIN_BARS_WIDTH = 96
"""Minimum terminal width for bars in the table of phases."""


def verdict(plan: dict[str, Any]) -> str:
    """Returns one sentence about whether a plan fits, and by how much.

    Example:
        >>> verdict({"memory": {"needed": 3 * 2**30, "available": 8 * 2**30}, "device": {"name": "a GPU"}})
        'Fits: needs 3.00 GiB of the 8.00 GiB that a GPU has; 5.00 GiB remain free.'
    """
    memory = section(plan, "memory")
    available = int(memory["available"])
    limit, needed = min(int(memory.get("limit", available)), available), int(memory["needed"])
    name = section(plan, "device").get("name", "the device")
    has = f"{name} has" if limit == available else "memory_limit allows"
    if needed > limit:
        return (
            f"Does not fit: needs {format_bytes(needed, up=True)}, but {has} {format_bytes(limit)}; "
            f"{format_bytes(needed - limit, up=True)} are missing."
        )
    highest = highest_bytes(plan)
    if highest > limit:
        phase, size = section(plan, "phases")["peak"], format_bytes(highest, up=True)
        return f"Does not fit: the phase {phase} needs {size}, but {has} {format_bytes(limit)}."
    if plan.get("missing_for_graphs"):
        size = format_bytes(limit + int(plan["missing_for_graphs"]), up=True)
        return f"Does not fit: cuda_graphs: true needs {size}, but {has} {format_bytes(limit)}."
    if plan.get("fits") is False:
        return f"Does not fit: the host has too little memory to pin {format_bytes(memory['host'])}."
    return (
        f"Fits: needs {format_bytes(highest, up=True)} of the {format_bytes(limit)} that {has}; "
        f"{format_bytes(limit - highest)} remain free."
    )


def highest_bytes(plan: dict[str, Any]) -> int:
    """Returns the memory of the phase that needs the most, merge and export excluded.

    Example:
        >>> phases = {"peak": "checkpoint", "phases": [{"phase": "checkpoint", "needed": 5}]}
        >>> highest_bytes({"memory": {"needed": 3}, "phases": phases})
        5
    """
    phases = section(plan, "phases")
    peak = [
        int(phase["needed"]) for phase in phases.get("phases", []) if phase["phase"] == phases.get("peak")
    ]
    return max([int(section(plan, "memory")["needed"]), *peak])


def plan_view(plan: dict[str, Any], width: int) -> RenderableType:
    """Returns the output of `trimtab plan`: verdict, model and data, time, memory by phase and part.

    Args:
        plan: the result of `trimtab.plan.detail.detailed_dict`.
        width: width of the terminal in columns.
    """
    style = "bold green" if plan.get("fits") else "bold red"
    parts: list[RenderableType] = [as_text(verdict(plan), style), Text(""), _grid(_short_rows(plan))]
    phases = section(plan, "phases")
    if phases.get("phases"):
        parts += [Text(""), _phase_table(phases["phases"], min(width, MAX_WIDTH))]
    by_part = activations(plan)
    if by_part:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_part.items())
        parts += [Text(""), as_text(f"Activations at the peak: {listed}.")]
    return Constrain(Group(*parts), min(width, MAX_WIDTH))


def plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) rows of model, data, implementations, time, memory and disk."""
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
    """Returns `plan_rows` without values in the verdict or the table of phases; implementations are in one row."""
    choices = section(plan, "choices")
    rows = [row for row in plan_rows(plan) if row[0] not in KERNEL_ROWS]
    backends = dict.fromkeys(kind.impl for kind in attention_kinds(section(choices, "attention")))
    used = [f"attention {', '.join(backends)}"] if backends else []
    used += [
        f"{name} {section(choices, key)['impl']}"
        for name, key in (("loss", "loss"), ("norms and gates", "pointwise"))
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
    """Returns the activations at the peak by part, in descending order.

    Parameter gradients that are not allocated yet at the peak are negative in the plan; they are omitted here.
    """
    parts = section(section(plan, "phases"), "activations")
    return {name: size for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size > 0}


def _phase_table(phases: list[dict[str, Any]], width: int) -> Table:
    """Returns the peak memory of each phase by bucket; with bars if the terminal is wide enough."""
    scale = max(int(row["needed"]) for row in phases)
    shown = [name for name in COLORS if any(row.get(name) for row in phases)]
    unit, size = ("GiB", 2**30) if scale >= 2**30 else ("MiB", 2**20)
    bars = width >= MIN_BARS_WIDTH
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
    """Returns the plan as a panel of at most `width` columns.

    Args:
        plan: the contents of plan.json.
        width: width of the terminal in columns.
        full: whether to show the memory of each bucket as bars and a table instead of one line.
    """
    memory = section(plan, "memory")
    moments = [
        BucketSizes(w, "predicted", section(memory, w)) for w in ("before", "peak") if section(memory, w)
    ]
    rows = [*_rows(plan, full=full), *([] if full else _buckets(section(memory, "peak")))]
    parts: list[RenderableType] = [_grid(rows)]
    if moments and full:
        parts += [Text(""), buckets_view(moments)]
    return Panel(
        Group(*parts),
        title=Text("plan of this run", style="bold"),
        title_align="left",
        border_style="bright_black",
        padding=(1, 2),
        width=min(width, MAX_WIDTH),
    )


def _buckets(peak: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns a row with the tensors at the peak by bucket."""
    if not peak:
        return []
    shown = [name for name in shown_buckets([BucketSizes("peak", "predicted", peak)]) if peak.get(name)]
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
            f"{format_count(data['tokens'])} tokens in {data['windows']} sequences, {data['fill']:.1%} full"
        )
        rows.append(("data", f"{amount}; {_steps(data['steps'])}"))
    elif data.get("steps"):
        rows.append(("data", _steps(data["steps"])))
    optimizer, attention = section(choices, "optimizer"), section(choices, "attention")
    for kind in attention_kinds(attention):
        where = f" in {kind.layers}" if kind.layers else ""
        rows.append(("attention", f"{kind.impl}{where}: {kind.reason}"))
    if choices.get("precision"):
        rows.append(("precision", str(choices["precision"])))
    if optimizer:
        rows.append(("optimizer", _optimizer(optimizer)))
    memory = section(choices, "memory")
    rows += _kernels(section(choices, "loss"), section(choices, "pointwise"), memory.get("loss_memory"))
    if memory.get("sentence"):
        rows.append(("recompute", f"{memory['sentence']}: {memory['reason']}"))
    compiled = section(choices, "compile")
    if compiled and (full or compiled["on"]):
        rows.append(("compile", f"{'on' if compiled['on'] else 'off'}: {compiled['reason']}"))
    graphs = section(choices, "graphs")
    if graphs.get("on") or (graphs and full and choices.get("device") != "cpu"):
        rows.append(("CUDA graphs", f"{'on' if graphs['on'] else 'off'}: {graphs['reason']}"))
    return rows + _needs(plan)


def _kernels(
    loss: dict[str, Any], pointwise: dict[str, Any], logits_bytes: int | None
) -> list[tuple[str, str]]:
    """Rows of an objective other than plain cross-entropy, and of Triton kernels for loss, norms and gates."""
    rows = []
    terms = {"label smoothing": loss.get("label_smoothing"), "z-loss": loss.get("z_loss")}
    added = " and ".join(f"{name} {value:g}" for name, value in terms.items() if value)
    if added:
        rows.append(("objective", f"cross-entropy with {added}; evaluation measures plain cross-entropy"))
    if loss.get("impl") == "triton":
        amount = (
            "few logits at a time"
            if logits_bytes is None
            else f"{format_bytes(logits_bytes)} of logits at a time"
        )
        rows.append(("loss", f"triton, {amount}: {loss['reason']}"))
    if pointwise.get("impl") == "triton":
        rows.append(("pointwise", f"triton: {pointwise['reason']}"))
    return rows


def _optimizer(choice: dict[str, Any]) -> str:
    """Returns the optimizer's name, with implementation and reason if it is not torch's."""
    chosen = choice.get("impl") not in (None, "torch")
    return f"{choice['name']}, {choice['impl']}: {choice['reason']}" if chosen else str(choice["name"])


def _needs(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the memory, disk space and time that the run needs."""
    memory, disk, time = section(plan, "memory"), section(plan, "disk"), section(plan, "time")
    rows = []
    if memory.get("needed"):
        device = {"cpu": "CPU", "cuda": "GPU"}.get(str(section(plan, "choices").get("device")), "device")
        outside = (
            f", of which {format_bytes(memory['outside'])} are not tensors" if memory.get("outside") else ""
        )
        free = f"; {format_bytes(memory['available'])} are free" if memory.get("available") else ""
        if memory.get("limit", memory.get("available", 0)) < memory.get("available", 0):
            free = f"; memory_limit allows {format_bytes(memory['limit'])}"
        rows.append(("memory", f"{format_bytes(memory['needed'])} on the {device}{outside}{free}"))
    host = section(plan, "phases").get("host")
    pinned = f"{format_bytes(memory['host'])} pinned for offloaded activations" if memory.get("host") else ""
    if host and section(plan, "choices").get("device") != "cpu":
        rows.append(("host", f"up to {format_bytes(host)}" + (f", including {pinned}" if pinned else "")))
    elif pinned:
        rows.append(("host", pinned))
    reserved = section(plan, "reserved")
    if reserved:
        amounts = (
            f"{format_bytes(reserved['reserved'])} by torch's allocator, {format_bytes(reserved['process'])}"
        )
        rows.append(("reserved", f"{amounts} by the whole process while training"))
    if disk.get("checkpoint_bytes"):
        each, total_size = format_bytes(disk["checkpoint_bytes"]), format_bytes(disk["total_bytes"])
        rows.append(("disk", f"{each} per checkpoint, {total_size} in total"))
    return rows + _times(time)


def launch_bound(step: dict[str, Any]) -> bool:
    """Returns whether a step takes as long as the host needs to launch its kernels, which is longer than they run.

    Example:
        >>> launch_bound({"seconds": 0.9, "host_seconds": 0.9}), launch_bound({"seconds": 0.9, "host_seconds": 0.0})
        (True, False)
    """
    return bool(step["host_seconds"]) and step["host_seconds"] >= 0.999 * step["seconds"]


def _times(time: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the time of a step and of the run, and the basis of the estimates."""
    rows, step = [], section(time, "step")
    if step:
        between = f"{format_seconds(step['low_seconds'])} to {format_seconds(step['high_seconds'])}"
        rate = (
            f", {format_rate(time['tokens_per_second'])} tokens per second"
            if time.get("tokens_per_second")
            else ""
        )
        limited = ", limited by kernel launches" if launch_bound(step) else ""
        rows.append(("time", f"about {format_seconds(step['seconds'])} per step ({between}){limited}{rate}"))
    if time.get("seconds"):
        parts = [
            f"{format_seconds(time[key])} for {name}"
            for key, name in (("evaluation_seconds", "evaluation"), ("checkpoint_seconds", "checkpoints"))
            if time.get(key)
        ]
        rows.append(
            (
                "rest of run" if time.get("trained_steps") else "run",
                f"about {format_seconds(time['seconds'])}"
                + (f", including {' and '.join(parts)}" if parts else ""),
            )
        )
    elif time.get("floor_seconds") and not step:
        rows.append(("time", f"at least {format_seconds(time['floor_seconds'])}"))
    if time.get("basis"):
        rows.append(
            ("time basis" if rows else "time", str(time["basis"]) if rows else f"unknown: {time['basis']}")
        )
    return rows
