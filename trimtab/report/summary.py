"""Rows and sentences about completions, speed and memory of a run, from its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.facts.units import format_bytes, format_count, format_rate, format_seconds
from trimtab.report.buckets import BucketSizes, total
from trimtab.report.rundata import RunData, section


def signed(value: float, digits: int = 3) -> str:
    """Formats a number with its sign, using the minus character U+2212.

    Example:
        >>> signed(-0.25), signed(0.5, 1)
        ('−0.250', '+0.5')
    """
    return f"{value:+.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class SampleCompletion:
    """A prompt with its first and last completion; `after` is None if there is only one."""

    prompt: str
    before: str
    after: str | None
    steps: tuple[int, int]


def samples(data: RunData) -> list[SampleCompletion]:
    """Returns each prompt with its first and last completion."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in data.of("sample"):
        rows.setdefault(record["prompt"], []).append(record)
    return [
        SampleCompletion(
            prompt,
            asked[0]["completion"],
            asked[-1]["completion"] if asked[-1]["step"] != asked[0]["step"] else None,
            (asked[0]["step"], asked[-1]["step"]),
        )
        for prompt, asked in rows.items()
    ]


def parameters(model: dict[str, Any]) -> str:
    """Formats the number of total and trainable parameters; plans of older versions lack `trained` and train all.

    Example:
        >>> parameters({"parameters": 2_000_000, "trained": 10_000})
        '2.00 M frozen parameters, 10 K trainable (0.50%)'
    """
    whole = model.get("parameters")
    if not isinstance(whole, int) or whole <= 0:
        return ""
    count = model.get("trained", whole)
    if not isinstance(count, int) or count == whole:
        return f"{format_count(whole)} parameters, all trainable"
    share = count / whole
    return f"{format_count(whole)} frozen parameters, {format_count(count)} trainable ({share:.2%})"


def speed(data: RunData) -> dict[str, str]:
    """Returns steps, tokens, seconds and tokens per second, formatted."""
    train = data.of("train")
    if not train:
        return {}
    last = train[-1]
    rates = sorted(r["tokens_per_second"] for r in train)
    planned = section(data.plan, "data").get("steps")
    steps = f"{last['step']} of {planned}" if isinstance(planned, int) else f"{last['step']}"
    return {
        "steps": steps,
        "trained tokens": format_count(last["tokens"]),
        "time in steps": format_seconds(last["seconds"]),
        "tokens/s, median": format_rate(rates[len(rates) // 2]),
    }


def memory_rows(data: RunData) -> list[BucketSizes]:
    """Returns predicted and measured buckets before training, at the peak and after training."""
    rows = []
    planned = section(data.plan, "memory")
    for when in ("before", "peak", "after"):
        if section(planned, when):
            rows.append(BucketSizes(when, "predicted", section(planned, when)))
        measured = data.memory(when)
        if measured:
            rows.append(BucketSizes(when, "measured", measured))
    return rows


def memory_verdict(data: RunData) -> str | None:
    """Returns a sentence about the error of the predicted peak; None if prediction or measurement is missing."""
    peak = {row.source: total(row.buckets) for row in memory_rows(data) if row.when == "peak"}
    if len(peak) < 2:
        return None
    predicted, measured = peak["predicted"], peak["measured"]
    off = (measured - predicted) / max(1, predicted)
    close = "exactly as predicted" if off == 0 else "within 0.1% of the prediction"
    how = close if abs(off) < 0.0005 else f"{abs(off):.1%} {'above' if off > 0 else 'below'} the prediction"
    return f"Peak memory: {format_bytes(predicted)} predicted, {format_bytes(measured)} measured, {how}."


def memory_basis(data: RunData) -> str | None:
    """Explains how memory was measured, which differs between CPU and GPU."""
    if not data.of("memory"):
        return None
    resident = max((r["memory_bytes"] for r in data.of("train")), default=0)
    if data.device == "cpu":
        peak = f"; the process used up to {format_bytes(resident)}" if resident else ""
        return f"Measured on a CPU by tracking tensor allocations{peak}."
    if data.device == "cuda":
        peak = f"; the peak of the run was {format_bytes(resident)}" if resident else ""
        return f"Measured on a GPU as memory allocated by PyTorch's caching allocator{peak}."
    return None
