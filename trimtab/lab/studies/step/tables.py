"""Tables, charts and text of steps that share precision, mode and kernels. Imports no torch."""

from __future__ import annotations

from trimtab.facts.units import format_bytes, format_rate
from trimtab.lab.samples import Samples
from trimtab.lab.step_settings import Kernels, Loss, Mode, Precision, TimedPart
from trimtab.lab.studies import reference_figures as reference
from trimtab.lab.studies.step.entries import (
    NOTHING,
    Grid,
    Group,
    between,
    differ,
    digits_of,
    flops_rate,
    percent,
    shown_time,
)
from trimtab.lab.studies.step.result import StepResult
from trimtab.optim.spec import bytes_moved
from trimtab.report.document import Bar, BarChart, Block, LineChart, Section, Series, Table, Text

LOSS_NAMES = {Loss.LOGITS_SUM: "the sum of the logits", Loss.CROSS_ENTROPY: "the cross entropy"}


NOISY = 0.1
"""Standard deviation as a share of the mean, above which the report warns."""
UNDISTURBED = 0.9
"""Minimum CPU share of a process on an otherwise idle machine."""


def group_section(group: Group, grid: Grid) -> Section:
    """Times of one configuration, conclusions from them, and utilization of the device."""
    blocks: list[Block] = [_times(group, grid)]
    text = _times_text(grid)
    if is_reference(group) and any(reference.is_known(*row) for row in grid.rows):
        text = " ".join(filter(None, (text, reference.BACKWARD_TO_FORWARD)))
    if text:
        blocks.append(Text(text))
    blocks += _charts(group, grid)
    used = _utilization(grid)
    if used is not None:
        blocks += [Text(_ceiling_text(grid)), used]
    return Section(f"Step time: {group.name}", tuple(blocks))


def _times(group: Group, grid: Grid) -> Table:
    matches = is_reference(group) and any(reference.is_known(*row) for row in grid.rows)
    head = ["size", "context", *(_column_name(grid, part, loss) for part, loss in grid.columns)]
    if matches:
        head += [f"forward, {reference.LABEL}", f"forward + backward, {reference.LABEL}"]
    rows = []
    for size, context in grid.rows:
        cells = [shown_time(grid.find((size, context), part, loss)) for part, loss in grid.columns]
        if matches:
            cells += [
                reference.reference_forward(size, context),
                reference.reference_forward_backward(size, context),
            ]
        rows.append((size, str(context), *cells))
    return Table("Milliseconds", tuple(head), tuple(rows), _times_note(grid))


def is_reference(group: Group) -> bool:
    """Whether the reference study timed this configuration.

    Example:
        >>> is_reference(Group(Precision.FP32, Mode.EAGER, Kernels.REFERENCE, 4))
        True
    """
    plain = (Precision.FP32, Mode.EAGER, Kernels.REFERENCE, reference.BATCH)
    return (group.precision, group.mode, group.kernels, group.batch) == plain


def _column_name(grid: Grid, part: TimedPart, loss: Loss) -> str:
    other = "" if loss is grid.loss else f", {loss.label}"
    return part.label + other


def _times_note(grid: Grid) -> str:
    timed = [entry for entry in grid.entries if entry.samples is not None]
    note = f"Mean ± standard deviation by the host's clock. The loss is {LOSS_NAMES[grid.loss]}."
    if timed:
        steps = between([entry.samples.repetitions for entry in timed if entry.samples], "{:.0f}".format)
        warm = between(
            [len(entry.result.times.warm_up_ms) for entry in timed if entry.result], "{:.0f}".format
        )
        attention = ", ".join(dict.fromkeys(entry.result.attention for entry in timed if entry.result))
        note += f" {steps} steps after {warm} of warm-up. Attention: {attention}."
    reasons = grid.reasons()
    return f"{note} {reasons[:1].upper()}{reasons[1:]}." if reasons else note


def _times_text(grid: Grid) -> str:
    """Conclusions from the times: backward against forward, the optimizer's share, the other loss, growth."""
    ratios, shares, losses = [], [], []
    other = next((loss for _, loss in grid.columns if loss is not grid.loss), None)
    for row in grid.rows:
        forward, backward = grid.samples(row, TimedPart.FORWARD), grid.samples(row, TimedPart.BACKWARD)
        both, full = grid.samples(row, TimedPart.FORWARD_BACKWARD), grid.samples(row, TimedPart.FULL)
        if forward and backward:
            ratios.append(backward.mean_ms / forward.mean_ms)
        optimizer_ms = _optimizer_ms(both, full)
        if full and optimizer_ms:
            shares.append(optimizer_ms / full.mean_ms)
        real = grid.samples(row, TimedPart.FORWARD_BACKWARD, other) if other else None
        if both and real and differ(both, real):
            losses.append(real.mean_ms / both.mean_ms - 1)
    sentences = []
    if ratios:
        sentences.append(
            f"The backward pass takes {between(ratios, '{:.1f}'.format)} times as long as the forward pass."
        )
    if shares:
        sentences.append(f"The optimizer takes {between(shares, percent)} of a full step.")
    if losses and other:
        sentences.append(
            f"With {LOSS_NAMES[other]} instead of {LOSS_NAMES[grid.loss]}, the time of forward + backward changes by "
            f"{between(losses, lambda x: f'{100 * x:+.1f} %')}."
        )
    return " ".join([*sentences, *_growth(grid), *_doubts(grid)])


def _doubts(grid: Grid) -> list[str]:
    """Warnings about noisy times."""
    results = [entry.result for entry in grid.entries if entry.result]
    sentences = []
    spread = max((result.times.host.std_ms / result.times.host.mean_ms for result in results), default=0.0)
    if spread > NOISY:
        sentences.append(
            f"These times are noisy: standard deviations reach {percent(spread)} of the mean, and smaller "
            "differences mean nothing. Measure on an idle machine, with more steps."
        )
    shares = [result.cpu_share for result in results if result.cpu_share is not None]
    if shares and min(shares) < UNDISTURBED:
        sentences.append(
            f"Other programs used the processor: this process ran {between(shares, percent)} of the time."
        )
    if any(result.ceiling_share > 1 for result in results):
        sentences.append(
            "A share of the measured matmul rate above 100 % means that other programs disturbed its measurement."
        )
    return sentences


def _growth(grid: Grid) -> list[str]:
    """How time grows with context, for the size with the widest range of contexts."""
    part = _widest_part(grid)
    ranges = {}
    for size in dict.fromkeys(size for size, _ in grid.rows):
        timed = {context: samples for name, context in grid.rows
                 if name == size and (samples := grid.samples((name, context), part))}  # fmt: skip
        if len(timed) > 1:
            ranges[size] = timed
    if not ranges:
        return []
    size = max(ranges, key=lambda name: max(ranges[name]) / min(ranges[name]))
    short, long = min(ranges[size]), max(ranges[size])
    times = ranges[size][long].mean_ms / ranges[size][short].mean_ms
    return [
        f"From {short} to {long} tokens, {long / short:.3g} times as many, {part.label} of {size} takes "
        f"{times:.1f} times as long."
    ]


def _widest_part(grid: Grid) -> TimedPart:
    """The part that charts show: forward + backward if it was timed."""
    parts = [part for part, _ in grid.columns]
    return TimedPart.FORWARD_BACKWARD if TimedPart.FORWARD_BACKWARD in parts else parts[0]


def _charts(group: Group, grid: Grid) -> list[Block]:
    part = _widest_part(grid)
    blocks: list[Block] = []
    sizes = list(dict.fromkeys(size for size, _ in grid.rows))
    contexts = sorted({context for _, context in grid.rows})
    if len(contexts) > 1:
        series = []
        for size in sizes:
            times = [(context, grid.samples((size, context), part)) for context in contexts]
            points = tuple((float(c), None if s is None else s.mean_ms) for c, s in times)
            if any(y is not None for _, y in points):
                series.append(Series(size, points))
        if series:
            title = f"{part.label.capitalize()} over context length: {group.name}"
            chart = LineChart(
                f"step-contexts-{group.id}", title, "context length, tokens", "ms", tuple(series), True, True
            )
            blocks.append(chart)
    bars = [bar for row in grid.rows if row[1] == contexts[0] and (bar := _bar(grid, row))]
    if bars:
        title = f"Parts of a step at {contexts[0]} tokens: {group.name}"
        blocks.append(BarChart(f"step-parts-{group.id}", title, "ms", tuple(bars)))
    return blocks


def _bar(grid: Grid, row: tuple[str, int]) -> Bar | None:
    forward, backward = grid.samples(row, TimedPart.FORWARD), grid.samples(row, TimedPart.BACKWARD)
    both, full = grid.samples(row, TimedPart.FORWARD_BACKWARD), grid.samples(row, TimedPart.FULL)
    if forward is None or backward is None:
        return None
    parts = [("forward", forward.mean_ms), ("backward", backward.mean_ms)]
    optimizer_ms = _optimizer_ms(both, full)
    if optimizer_ms:
        parts.append(("optimizer", optimizer_ms))
    total = sum(value for _, value in parts)
    return Bar(row[0], tuple(parts), f"{total:.{digits_of(total)}f} ms")


def _utilization(grid: Grid) -> Table | None:
    """Rates and shares of ceilings."""
    sheet = any(entry.result and entry.result.sheet_flops for entry in grid.entries)
    head = ("size", "context", "tokens/s", "FLOP/s, forward", "FLOP/s, forward + backward", "of measured matmul",
            *(("MFU",) if sheet else ()), "backward / forward", "AdamW, of measured copy", "median, ms")  # fmt: skip
    rows = []
    for row in grid.rows:
        forward, both = grid.result(row, TimedPart.FORWARD), grid.result(row, TimedPart.FORWARD_BACKWARD)
        whole = grid.result(row, TimedPart.FULL) or both
        cells = [
            NOTHING if whole is None else format_rate(whole.tokens_per_s),
            NOTHING if forward is None else flops_rate(forward.flops_per_s),
            NOTHING if both is None else flops_rate(both.flops_per_s),
            NOTHING if both is None else percent(both.ceiling_share),
        ]
        if sheet:
            cells.append(NOTHING if both is None or both.mfu is None else percent(both.mfu))
        median = None if both is None else both.times.host.median_ms
        cells += [
            _ratio(forward, grid.result(row, TimedPart.BACKWARD)),
            _optimizer_share(both, grid.result(row, TimedPart.FULL)),
            NOTHING if median is None else f"{median:.{digits_of(median)}f}",
        ]
        rows.append((row[0], str(row[1]), *cells))
    if not any(cell != NOTHING for row in rows for cell in row[2:]):
        return None
    note = (
        "tokens/s of the most complete step that was timed. FLOPs are the model's: products and causal attention, "
        "backward counted as twice the forward pass. Shares, MFU and median are of forward + backward. AdamW's time is "
        "the difference of two means, shown where it exceeds the noise; it reads and writes weights and moments, and "
        "reads gradients."
    )
    return Table("Use of the device", head, tuple(rows), note)


def _ratio(forward: StepResult | None, backward: StepResult | None) -> str:
    if forward is None or backward is None:
        return NOTHING
    return f"{backward.times.host.mean_ms / forward.times.host.mean_ms:.2f}"


def _optimizer_ms(both: Samples | None, full: Samples | None) -> float | None:
    """The optimizer's time: the difference of two means; None if it is not positive or within noise."""
    if both is None or full is None or full.mean_ms <= both.mean_ms or not differ(both, full):
        return None
    return full.mean_ms - both.mean_ms


def _optimizer_share(both: StepResult | None, full: StepResult | None) -> str:
    """Bytes per second that AdamW moves, as a share of a copy's."""
    if both is None or full is None:
        return NOTHING
    milliseconds = _optimizer_ms(both.times.host, full.times.host)
    if milliseconds is None:
        return NOTHING
    moved = bytes_moved("adamw_torch", (full.parameters,), "fp32", "fp32")
    return percent(1e3 * moved / milliseconds / full.copy_bytes)


def _ceiling_text(grid: Grid) -> str:
    results = [entry.result for entry in grid.entries if entry.result]
    flops, copies = [result.ceiling_flops for result in results], [result.copy_bytes for result in results]
    dtypes = ", ".join(dict.fromkeys(result.ceiling_dtype for result in results))
    text = (
        f"This device reaches {between(flops, flops_rate)} in a large {dtypes} matrix product (matmul), and "
        f"{between(copies, format_bytes)} per second in a large copy."
    )
    sheets = {result.sheet_flops for result in results if result.sheet_flops}
    if sheets:
        text += f" Its data sheet gives {between(sorted(sheets), flops_rate)}; MFU is the share of that."
        return text
    threads = between([result.threads for result in results], "{:.0f}".format)
    return f"{text} Threads of the host: {threads}."
