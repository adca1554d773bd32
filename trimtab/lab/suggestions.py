"""The changes of a recipe that would help most, by the planner's predictions. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.plan.make import Plan
from trimtab.plan.solve import Planner, solve_fastest
from trimtab.plan.what_if import Effect, list_effects

COUNT = 3
TIGHT = 0.85
"""Used share of the memory limit above which saving memory comes before saving time."""
WORTH = 0.01
"""Minimum effect of a suggestion, as a share of a step's time or of the memory it needs."""


class Goal(enum.Enum):
    """The purpose of a suggestion."""

    TIME = "time"
    MEMORY = "memory"


@dataclass(frozen=True)
class Suggestion:
    """A change of the recipe with its predicted effect."""

    name: str
    lines: tuple[str, ...]
    """Lines of the recipe, to paste."""
    goal: Goal
    same_training: bool
    """Whether the same updates are computed, up to rounding."""
    seconds: float | None
    """Change of the time of an optimizer step, for the same tokens; None if the device's rates are unknown."""
    saved: int
    """Bytes by which the peak falls; negative if it rises."""
    needed: int
    """Device memory in bytes that the run then needs."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "goal": self.goal.value}


def suggest(plan: Plan, planner: Planner, count: int = COUNT) -> tuple[Suggestion, ...]:
    """The changes that would help most, each applied alone.

    If memory is free, or the planner chooses the recompute policy, changes that save time come first; if the recipe
    fixes the policy and memory is tight, those that save memory. Changes that compute the same updates come before
    those that change training. Of several values of one key only the best is suggested.

    Args:
        plan: the plan of the recipe on its device.
        planner: plans another recipe for the same model (`trimtab.run.target.PlanTarget.plan_for`).
        count: the maximum number of suggestions.

    Example:
        >>> suggest(target.plan, target.plan_for)[0].lines                           # doctest: +SKIP
        ('recompute: none',)
    """
    limit, recipe = min(plan.limit, plan.device.available_bytes), plan.recipe
    suggestions = [_suggestion(effect) for effect in list_effects(plan) if effect.change.keys]
    suggestions = [
        change for change in [*suggestions, *_fastest_batch(plan, planner)] if change.needed <= limit
    ]
    by_time, by_memory = _by_time(plan, suggestions), _by_memory(plan, suggestions)
    is_fixed = recipe.recompute != "auto" or recipe.gradient_checkpointing is not None
    if is_fixed and plan.memory.needed > TIGHT * limit:
        largest = sorted(by_memory, key=lambda change: (not change.same_training, -change.saved))
        return tuple(_one_per_key([*largest, *by_time]))[:count]
    return tuple(_one_per_key([*by_time, *by_memory]))[:count]


def _suggestion(effect: Effect) -> Suggestion:
    change = effect.change
    name = f"without {change.name}" if change.in_use else change.name
    goal = Goal.TIME if effect.seconds is not None and effect.seconds < 0 else Goal.MEMORY
    return Suggestion(
        name, change.lines, goal, change.same_training, effect.seconds, effect.saved, effect.needed
    )


def _fastest_batch(plan: Plan, planner: Planner) -> Iterator[Suggestion]:
    """The per-device batch with the most tokens per second for the same global batch, with memory keys chosen anew."""
    now = plan.time.tokens_per_second
    if now is None:
        return
    best = solve_fastest(plan, planner)
    then = None if best.plan is None else best.plan.time.tokens_per_second
    if best.plan is None or then is None or best.plan.job.batch == plan.job.batch:
        return
    tokens = plan.job.batch * plan.job.tokens * plan.job.accumulation
    needed = best.plan.memory.needed
    yield Suggestion(
        "another microbatch",
        best.lines,
        Goal.TIME,
        same_training=True,
        seconds=tokens / then - tokens / now,
        saved=plan.memory.needed - needed,
        needed=needed,
    )


def _by_time(plan: Plan, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """Suggestions that make a step faster, the fastest first."""
    least = -WORTH * (plan.time.step_seconds or 0.0)
    faster = [
        (suggestion.seconds, suggestion)
        for suggestion in suggestions
        if suggestion.seconds is not None and suggestion.seconds < least
    ]
    return [
        suggestion for _, suggestion in sorted(faster, key=lambda pair: (not pair[1].same_training, pair[0]))
    ]


def _by_memory(plan: Plan, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """Suggestions that save memory, those with the fewest seconds per byte first; without times, the largest first."""
    saving = [suggestion for suggestion in suggestions if suggestion.saved > WORTH * plan.memory.needed]

    def price(suggestion: Suggestion) -> float:
        return (
            -suggestion.saved
            if suggestion.seconds is None
            else max(suggestion.seconds, 0.0) / suggestion.saved
        )

    return sorted(saving, key=lambda suggestion: (not suggestion.same_training, price(suggestion)))


def _one_per_key(suggestions: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """The first suggestion of each recipe key."""
    seen: set[str] = set()
    for suggestion in suggestions:
        key = suggestion.lines[0].partition(":")[0]
        if key not in seen:
            seen.add(key)
            yield suggestion
