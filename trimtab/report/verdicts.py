"""Changes of every quantity evaluated before and after training, with paired tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from trimtab.report.paired import (
    ALPHA,
    MIN_DOCUMENTS,
    PairedItemTest,
    PairedMeanTest,
    compare_items,
    compare_losses,
    holm,
)
from trimtab.report.rundata import RunData
from trimtab.report.summary import signed

LABELS = {
    "better": "better",
    "worse": "worse",
    "unchanged": "no measurable change",
    "untested": "not tested",
}
PLURALS = {
    "document": "documents",
    "piece": "pieces of documents",
    "group of documents": "groups of documents",
}
NO_ITEMS = "metrics.jsonl contains no results by item; older versions did not write them"
OTHER_ITEMS = "different items were measured before and after"


@dataclass(frozen=True)
class MeasuredChange:
    """One measured quantity before and after, and the paired test of the difference."""

    name: str
    before: float
    after: float
    unit: str
    """`loss` (smaller is better) or `share` (larger is better)."""
    group: str = "loss"
    """loss, answers or probe."""
    steps: tuple[int, int] = (0, 0)
    """Steps of the two measurements; the first is 0 if it was before training."""
    items: int | None = None
    """For shares: the number of items."""
    test: PairedItemTest | PairedMeanTest | None = None
    """None if before and after cannot be compared item by item, for the reason in `untested`."""
    sampled: str = "document"
    """For losses: the unit of the test: a document, a piece or a group of documents."""
    comparisons: int = 1
    """Number of tests in the report."""
    adjusted: float = 1.0
    """The test's p-value after Holm's correction for all comparisons."""
    untested: str = NO_ITEMS

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `unchanged` or `untested`; a loss that became non-finite is worse without a test."""
        if math.isfinite(self.before) and not math.isfinite(self.after):
            return "worse"
        if self.test is None:
            return "untested"
        if isinstance(self.test, PairedMeanTest):
            if self.test.p > ALPHA / self.comparisons:
                return "unchanged"
            return "better" if self.test.difference < 0 else "worse"
        if self.adjusted > ALPHA:
            return "unchanged"
        return "better" if self.test.gained > self.test.lost else "worse"

    @property
    def label(self) -> str:
        """The outcome in words."""
        return LABELS[self.outcome]

    def evidence(self) -> str:
        """Formats the evidence: the confidence interval of a loss, or the items that changed and the p-value.

        Example:
            >>> MeasuredChange("x", 12 / 14, 1.0, "share", items=14, test=PairedItemTest(2, 0, 14)).evidence()
            '+2 −0, p = 1'
        """
        if isinstance(self.test, PairedItemTest):
            return f"+{self.test.gained} −{self.test.lost}, {format_p(self.adjusted)}"
        if isinstance(self.test, PairedMeanTest):
            low, high = self.interval()
            reach = (high - low) / 2
            units = f"{self.test.num_units} {PLURALS.get(self.sampled, self.sampled)}"
            return f"± {reach:.{_digits(reach)}f}, {units}"
        return ""

    def interval(self) -> tuple[float, float]:
        """Returns the confidence interval of a loss difference, corrected for all comparisons of the report."""
        assert isinstance(self.test, PairedMeanTest)
        return self.test.interval(ALPHA / self.comparisons)

    def shown(self) -> tuple[str, str, str]:
        """Formats before, after and difference."""
        if self.unit == "share":
            return self._share(self.before), self._share(self.after), self._points()
        difference = self.after - self.before
        written = signed(difference, _digits(difference)) if math.isfinite(difference) else "—"
        return f"{self.before:.3f}", f"{self.after:.3f}", written

    def _share(self, share: float) -> str:
        if self.items is None or not math.isfinite(share):
            return f"{share:.0%}"
        return f"{round(share * self.items)} of {self.items}"

    def _points(self) -> str:
        if not math.isfinite(self.after - self.before):
            return "—"
        if self.items is None:  # difference of the rounded shares, so that the row is consistent
            points: float = round(self.after * 100) - round(self.before * 100)
        else:
            points = round(100 * (self.after - self.before), 1)
        digits = 0 if points == round(points) else 1
        return f"{signed(points, digits) if points else '±0'} points"

    def text(self) -> str:
        """`2.000 → 1.500 (−0.500)`; `3 of 90 → 41 of 90 (+42.2 points)`."""
        before, after, difference = self.shown()
        return f"{before} → {after} ({difference})"


def format_p(p: float) -> str:
    """Formats a p-value with two significant digits.

    Example:
        >>> format_p(0.0312), format_p(2e-9), format_p(1.0)
        ('p = 0.031', 'p < 0.001', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _digits(value: float) -> int:
    """Returns the number of decimals that show a nonzero difference: at least three.

    Example:
        >>> _digits(0.5), _digits(0.00042), _digits(0.0)
        (3, 4, 3)
    """
    if value == 0 or not math.isfinite(value):
        return 3
    return max(3, min(9, -math.floor(math.log10(abs(value)))))


def changes(data: RunData) -> list[MeasuredChange]:
    """Returns every quantity measured at two steps, tested if possible: losses, exact answers, probe scores.

    All tests of a report are corrected together.
    """
    rows = [*_loss_changes(data), *_answer_changes(data), *_probe_changes(data)]
    tested = [row.test.p for row in rows if row.test is not None]
    adjusted = iter(holm(tested))
    return [
        row if row.test is None else replace(row, comparisons=len(tested), adjusted=next(adjusted))
        for row in rows
    ]


def _loss_changes(data: RunData) -> list[MeasuredChange]:
    rows = []
    for name in data.eval_names():
        pair = data.before_after("eval", name=name)
        if pair is None:
            continue
        row = MeasuredChange(f"{name} loss", pair[0]["loss"], pair[1]["loss"], "loss", "loss", _steps(pair))
        before, after = (record.get("units") for record in pair)
        if before and after:
            same = (before["unit"], before["tokens"]) == (after["unit"], after["tokens"])
            test = compare_losses(before["losses"], after["losses"], before["tokens"]) if same else None
            few = f"fewer than {MIN_DOCUMENTS} {PLURALS.get(before['unit'], before['unit'])}"
            row = replace(row, test=test, sampled=before["unit"], untested=few if same else OTHER_ITEMS)
        rows.append(row)
    return rows


def _answer_changes(data: RunData) -> list[MeasuredChange]:
    pair = data.before_after("answers")
    if pair is None:
        return []
    shares = [record["exact"] / max(1, record["total"]) for record in pair]
    items = pair[0]["total"] if pair[0]["total"] == pair[1]["total"] else None
    row = MeasuredChange("exact answers", shares[0], shares[1], "share", "answers", _steps(pair), items)
    before, after = (record.get("right") for record in pair)
    return [_tested(row, before, after, same=_same_items(pair))]


def _probe_changes(data: RunData) -> list[MeasuredChange]:
    """Changes of the probe over all items, then by kind."""
    pair = data.before_after("probe")
    if pair is None:
        return []
    before, after = (record["scores"] for record in pair)
    items = pair[1].get("items") or {}
    results = [record.get("right") or {} for record in pair]
    same = _same_items(pair)
    kinds = [kind for kind in after if kind in before]
    rows = []
    number = sum(items.get(kind, 0) for kind in kinds)
    if len(kinds) > 1 and all(kind in items for kind in kinds) and number:
        first, last = (sum(s[kind] * items[kind] for kind in kinds) / number for s in (before, after))
        row = MeasuredChange("probe: all", first, last, "share", "probe", _steps(pair), number)
        whole = ["".join(r[kind] for kind in kinds) if set(kinds) <= set(r) else None for r in results]
        rows.append(_tested(row, *whole, same=same))
    for kind in kinds:
        row = MeasuredChange(
            f"probe: {kind}", before[kind], after[kind], "share", "probe", _steps(pair), items.get(kind)
        )
        rows.append(_tested(row, *(r.get(kind) for r in results), same=same))
    return rows


def _tested(row: MeasuredChange, before: str | None, after: str | None, *, same: bool) -> MeasuredChange:
    """Adds the test of the results by item (one digit each), unless they are missing or of different items."""
    if before is None or after is None:
        return row
    if not same or len(before) != len(after):
        return replace(row, untested=OTHER_ITEMS)
    return replace(row, test=compare_items([item == "1" for item in before], [item == "1" for item in after]))


def _same_items(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    return pair[0].get("digest") == pair[1].get("digest")


def _steps(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, int]:
    return pair[0]["step"], pair[1]["step"]


def first_label(rows: list[MeasuredChange]) -> str:
    """Returns the label of the first measurements: `before`, or their step if none was made before training."""
    first = min((row.steps[0] for row in rows), default=0)
    return "before" if first == 0 else f"step {first}"


@dataclass(frozen=True)
class RunVerdict:
    """Changes grouped by outcome."""

    gained: list[MeasuredChange]
    lost: list[MeasuredChange]
    unchanged: list[MeasuredChange]
    untested: list[MeasuredChange]

    def explanation(self) -> str:
        """Explains the statistical tests in a few sentences; empty if nothing was measured twice."""
        tested = [row for row in (*self.gained, *self.lost, *self.unchanged) if row.test is not None]
        sentences = []
        if tested:
            comparisons = f"{len(tested)} comparison{'s' if len(tested) > 1 else ''}"
            sentences.append(
                "Before and after are compared on the same items. Shares: items that became right (+) and wrong (−), "
                f"and p of McNemar's exact test with Holm's correction for {comparisons}. "
                "Losses: confidence interval of the difference (±) over documents, corrected likewise. "
                f"If nothing had changed, at most {ALPHA:.0%} of reports would claim any change."
            )
        if self.untested:
            reasons: dict[str, list[str]] = {}
            for row in self.untested:
                reasons.setdefault(row.untested, []).append(row.name)
            applies_to_all = not tested and len(reasons) == 1
            why = "; ".join(
                reason if applies_to_all else f"{', '.join(names)} ({reason})"
                for reason, names in reasons.items()
            )
            sentences.append(f"Not tested, so no change is claimed: {why}.")
        return " ".join(sentences)


def verdict(rows: list[MeasuredChange]) -> RunVerdict:
    """Groups changes by outcome.

    Example:
        >>> verdict(changes(read_run(Path("runs/demo")))).lost  # doctest: +SKIP
        []
    """
    by_outcome: dict[str, list[MeasuredChange]] = {outcome: [] for outcome in LABELS}
    for row in rows:
        by_outcome[row.outcome].append(row)
    return RunVerdict(*by_outcome.values())
