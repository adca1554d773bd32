"""Compares two recordings and describes the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.sameness.case import Case
from tools.sameness.store import Recording

TAKEN_OVER = "handover/"
"""Before the name of a case: the parent's stopped run folder, resumed by the head."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a case."""

    case: str
    steps: int
    different: bool
    text: str


def difference(before: Recording | None, after: Recording | None) -> str | None:
    """Describe the first difference between two recordings; None if they are identical.

    Example:
        >>> difference(Recording("x", "a", {"step 1 loss": "0x1p0"}), Recording("x", "b", {"step 1 loss": "0x1p1"}))
        'step 1 loss: 0x1p0 → 0x1p1'
    """
    if before is None or after is None:
        return f"missing in the {'parent' if before is None else 'head'}"
    if before.error != after.error:
        if before.error is None:
            return f"fails now: {after.error}"
        return f"failed before: {before.error}" + (f", fails now: {after.error}" if after.error else "")
    for name, value in before.values.items():
        if name not in after.values:
            added = [other for other in after.values if other not in before.values]
            return f"{name} is gone" + (f"; new: {added[0]}" if added else "")
        if after.values[name] != value:
            return f"{name}: {_shown(value, after.values[name])}"
    added = [name for name in after.values if name not in before.values]
    return f"{added[0]} is new" if added else None


def _shown(before: str, after: str, most: int = 60) -> str:
    """Both values, from a few characters before the first difference."""
    if len(before) <= most and len(after) <= most:
        return f"{before} → {after}"
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    begin = max(at - 20, 0)
    return f"…{before[begin : begin + most]}… → …{after[begin : begin + most]}…"


def compare(
    cases: Sequence[Case],
    parent: dict[str, Recording],
    head: dict[str, Recording],
    taken_over: dict[str, Recording],
) -> list[Verdict]:
    """One verdict per case, and one more per stopped run that the head took over from the parent."""
    found = []
    for case in cases:
        before, after = parent.get(case.name), head.get(case.name)
        found.append(_verdict(case.name, before, after, difference(before, after)))
        if case.same_as is None:
            continue
        whole = head.get(case.same_as)
        if after is not None and after.error is None and whole is not None:
            wrong = difference(whole, after)
            if wrong is not None:
                found.append(Verdict(f"{case.name} = {case.same_as}", after.steps, True, wrong))
        name, unstopped = f"{TAKEN_OVER}{case.name}", parent.get(case.same_as)
        resumed = taken_over.get(name)
        if before is not None and before.error is not None:
            continue  # the parent could not stop there: nothing to take over
        found.append(_verdict(name, unstopped, resumed, difference(unstopped, resumed)))
    return found


def _verdict(name: str, before: Recording | None, after: Recording | None, wrong: str | None) -> Verdict:
    steps = max(one.steps if one else 0 for one in (before, after))
    if wrong is not None:
        return Verdict(name, steps, True, wrong)
    error = after.error if after else None
    return Verdict(
        name, steps, False, "equal" if error is None else f"FAILS IN BOTH, proves nothing: {error}"
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as text: case, optimizer steps, equal or what first differs."""
    width = max([len(one.case) for one in verdicts], default=4)
    return "\n".join(f"{one.case:{width}}  {one.steps:2} steps  {one.text}" for one in verdicts)
