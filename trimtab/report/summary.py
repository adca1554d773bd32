"""What was gained and what was lost, in rows and sentences, from a run's records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.facts.units import format_bytes, format_count, format_seconds
from trimtab.report.buckets import Moment, total
from trimtab.report.rundata import RunData, section

LOSS_THRESHOLD = 0.01
"""Nats a token from which on a loss counts as changed."""
SHARE_THRESHOLD = 0.02
"""Share from which on answers and probe scores count as changed, however many there are."""


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, a true minus included.

    Example:
        >>> signed(-0.25), signed(0.5, 1)
        ('−0.250', '+0.5')
    """
    return f"{value:+.{digits}f}".replace("-", "−")


@dataclass(frozen=True)
class Change:
    """One measured quantity before and after."""

    name: str
    before: float
    after: float
    unit: str
    """`loss` (smaller is better) or `share` (larger is better)."""
    group: str = "loss"
    """loss, answers or probe."""
    steps: tuple[int, int] = (0, 0)
    """When it was measured; the first is 0 if it was measured before training."""
    items: int | None = None
    """Of shares: how many choices or problems they are shares of."""

    @property
    def better(self) -> bool:
        """Whether the change is an improvement."""
        return self.after < self.before if self.unit == "loss" else self.after > self.before

    @property
    def outcome(self) -> str:
        """`better`, `worse` or `unchanged` (within the threshold); not a number is worse than any number."""
        threshold = LOSS_THRESHOLD if self.unit == "loss" else max(SHARE_THRESHOLD, self._chance())
        # The last digits of 0.52 − 0.50 must not decide.
        if abs(self.after - self.before) < threshold - 1e-9:
            return "unchanged"
        return "better" if self.better else "worse"

    @property
    def label(self) -> str:
        """The outcome in words; a difference too small for its number of items is `within chance`."""
        near = math.isclose(self.before, self.after, abs_tol=SHARE_THRESHOLD)
        return "within chance" if self.items and self.outcome == "unchanged" and not near else self.outcome

    def _chance(self) -> float:
        """Twice the standard error of a share of so few items: one choice more of fourteen says nothing."""
        middle = (self.before + self.after) / 2
        if not self.items or not 0 < middle < 1:
            return 0.0
        return 2 * math.sqrt(middle * (1 - middle) / self.items)

    def shown(self) -> tuple[str, str, str]:
        """Before, after and difference, as people write them."""
        if self.unit == "share":
            return self._share(self.before), self._share(self.after), self._points()
        difference = signed(self.after - self.before) if math.isfinite(self.after - self.before) else "—"
        return f"{self.before:.3f}", f"{self.after:.3f}", difference

    def _share(self, share: float) -> str:
        if self.items is None or not math.isfinite(share):
            return f"{share:.0%}"
        return f"{round(share * self.items)} of {self.items}"

    def _points(self) -> str:
        if not math.isfinite(self.after - self.before):
            return "—"
        # Of the rounded shares, so that the row adds up to what it shows.
        points = round(self.after * 100) - round(self.before * 100)
        return f"{signed(points, 0) if points else '±0'} points"

    def text(self) -> str:
        """`2.000 → 1.500 (−0.500)`; `3 of 90 → 41 of 90 (+42 points)`."""
        before, after, difference = self.shown()
        return f"{before} → {after} ({difference})"


def changes(data: RunData) -> list[Change]:
    """Every quantity that was measured at two steps: losses by set, exact answers, probe scores."""
    rows = []
    for name in data.eval_names():
        pair = data.before_after("eval", name=name)
        if pair:
            rows.append(
                Change(f"{name} loss", pair[0]["loss"], pair[1]["loss"], "loss", "loss", _steps(pair))
            )
    pair = data.before_after("answers")
    if pair:
        shares = [r["exact"] / max(1, r["total"]) for r in pair]
        items = pair[0]["total"] if pair[0]["total"] == pair[1]["total"] else None
        rows.append(Change("exact answers", shares[0], shares[1], "share", "answers", _steps(pair), items))
    pair = data.before_after("probe")
    if pair:
        rows += _probe_changes(pair)
    return rows


def _probe_changes(pair: tuple[dict[str, Any], dict[str, Any]]) -> list[Change]:
    """All choices together first, then kind by kind."""
    before, after = (record["scores"] for record in pair)
    items = pair[1].get("items") or {}
    kinds = [kind for kind in after if kind in before]
    rows = [
        Change(f"probe: {kind}", before[kind], after[kind], "share", "probe", _steps(pair), items.get(kind))
        for kind in kinds
    ]
    number = sum(items.get(kind, 0) for kind in kinds)
    if len(kinds) > 1 and all(kind in items for kind in kinds) and number:
        first, last = (sum(s[kind] * items[kind] for kind in kinds) / number for s in (before, after))
        rows.insert(0, Change("probe: all", first, last, "share", "probe", _steps(pair), number))
    return rows


def _steps(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, int]:
    return pair[0]["step"], pair[1]["step"]


def first_label(data: RunData) -> str:
    """What the first measurements are called: `before`, or their step where none was made before training."""
    first = min((c.steps[0] for c in changes(data)), default=0)
    return "before" if first == 0 else f"step {first}"


@dataclass(frozen=True)
class Verdict:
    """Changes by outcome."""

    gained: list[Change]
    lost: list[Change]
    unchanged: list[Change]

    def sentences(self) -> list[str]:
        """A sentence each on what was gained, lost and kept; none if nothing was measured twice."""
        if not (self.gained or self.lost or self.unchanged):
            return []
        lines = []
        if self.gained:
            lines.append("Gained: " + "; ".join(f"{c.name} {c.text()}" for c in self.gained) + ".")
        lost = "; ".join(f"{c.name} {c.text()}" for c in self.lost)
        lines.append(f"Lost: {lost or 'nothing that was measured'}.")
        if self.unchanged:
            lines.append("Unchanged, or within chance: " + ", ".join(c.name for c in self.unchanged) + ".")
        return lines


def verdict(data: RunData) -> Verdict:
    """What was gained, lost and kept, beyond the thresholds above."""
    sorted_out: dict[str, list[Change]] = {"better": [], "worse": [], "unchanged": []}
    for change in changes(data):
        sorted_out[change.outcome].append(change)
    return Verdict(sorted_out["better"], sorted_out["worse"], sorted_out["unchanged"])


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it first and last; `after` is None where it was asked once."""

    prompt: str
    before: str
    after: str | None
    steps: tuple[int, int]


def samples(data: RunData) -> list[Sample]:
    """Each prompt with its first and last completion."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in data.of("sample"):
        rows.setdefault(record["prompt"], []).append(record)
    return [
        Sample(
            prompt,
            asked[0]["completion"],
            asked[-1]["completion"] if asked[-1]["step"] != asked[0]["step"] else None,
            (asked[0]["step"], asked[-1]["step"]),
        )
        for prompt, asked in rows.items()
    ]


def parameters(model: dict[str, Any]) -> str:
    """How many a plan's model has and which are trained; plans of older versions say nothing, and train all.

    Example:
        >>> parameters({"parameters": 2_000_000, "trained": 10_000})
        '2.00 M parameters, frozen; 10 K are trained on top, 0.50% as many'
    """
    whole = model.get("parameters")
    if not isinstance(whole, int) or whole <= 0:
        return ""
    count = model.get("trained", whole)
    if not isinstance(count, int) or count == whole:
        return f"{format_count(whole)} parameters, all trained"
    share = count / whole
    return f"{format_count(whole)} parameters, frozen; {format_count(count)} are trained on top, {share:.2%} as many"


def speed(data: RunData) -> dict[str, str]:
    """Steps, tokens, seconds and tokens a second, for people."""
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
        "tokens/s, median": format_count(rates[len(rates) // 2]),
    }


def memory_rows(data: RunData) -> list[Moment]:
    """Predicted and measured buckets before, at the peak and after, for the picture of the four buckets."""
    rows = []
    planned = section(data.plan, "memory")
    for when in ("before", "peak", "after"):
        if section(planned, when):
            rows.append(Moment(when, "predicted", section(planned, when)))
        measured = data.memory(when)
        if measured:
            rows.append(Moment(when, "measured", measured))
    return rows


def memory_verdict(data: RunData) -> str | None:
    """How far the prediction of the peak was off, in a sentence; None where one of the two is missing."""
    peak = {row.source: total(row.buckets) for row in memory_rows(data) if row.when == "peak"}
    if len(peak) < 2:
        return None
    predicted, measured = peak["predicted"], peak["measured"]
    off = (predicted - measured) / max(1, measured)
    how = "exactly right" if off == 0 else f"{abs(off):.1%} too {'high' if off > 0 else 'low'}"
    return (
        f"At the peak {format_bytes(predicted)} were predicted and {format_bytes(measured)} measured: "
        f"the prediction was {how}."
    )


def memory_basis(data: RunData) -> str | None:
    """What the measured bytes count, which differs between a CPU and a GPU."""
    if not data.of("memory"):
        return None
    resident = max((r["memory_bytes"] for r in data.of("train")), default=0)
    if data.device == "cpu":
        whole = f"; the whole process held up to {format_bytes(resident)}" if resident else ""
        return f"Measured on a CPU: bytes of tensors, seen as they come and go{whole}."
    if data.device == "cuda":
        whole = f"; its highest mark in the whole run was {format_bytes(resident)}" if resident else ""
        return f"Measured on a GPU: bytes that PyTorch's allocator handed out{whole}."
    return None
