"""The planned numbers of steps of a run: a resume may change the number; steps before it keep their schedule.

They are stored in choices.json. A run that resumes from a checkpoint before its extension therefore repeats the steps
in between with the same learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimtab import optim
from trimtab.facts.errors import RecipeError
from trimtab.recipe import Recipe
from trimtab.recipe.rules import FLAT_SCHEDULES
from trimtab.run.choices import PlannedSteps


def extend(planned_steps: Sequence[PlannedSteps], step: int, total: int) -> tuple[PlannedSteps, ...]:
    """Returns the planned numbers of steps of a run that is extended or shortened to `total` steps at `step`.

    Example:
        >>> extend([PlannedSteps(0, 20)], step=10, total=40)
        (PlannedSteps(step=0, total=20), PlannedSteps(step=10, total=40))
    """
    if planned_steps and planned_steps[-1].total == total:
        return tuple(planned_steps)
    return (
        *(length for length in planned_steps if length.step < step),
        PlannedSteps(step if planned_steps else 0, total),
    )


def check_planned_steps(recipe: Recipe, step: int, total: int) -> None:
    """Raises RecipeError if a resume requests fewer steps than were trained."""
    if total < step:
        key = "max_steps" if recipe.max_steps > 0 else "num_train_epochs"
        asked = recipe.max_steps if recipe.max_steps > 0 else f"{recipe.num_train_epochs:g} ({total} steps)"
        raise RecipeError(
            f"{key}: {asked} is less than the {step} steps that the run has already trained",
            f"leave it out, or set max_steps={step} or more",
        )


def learning_rate(recipe: Recipe, planned_steps: Sequence[PlannedSteps]) -> Callable[[int], float]:
    """Returns a function from step (from 0) to learning rate: each step uses the run length planned when it ran."""

    def rate(step: int) -> float:
        total = next(
            (length.total for length in reversed(planned_steps) if length.step <= step),
            planned_steps[0].total,
        )
        return optim.learning_rate(
            recipe.lr_scheduler_type,
            step,
            base=recipe.learning_rate,
            total_steps=total,
            warmup_steps=recipe.warmup_steps or round(recipe.warmup_ratio * total),
            min_ratio=recipe.min_lr_ratio,
        )

    return rate


def describe_change(
    recipe: Recipe, before: Sequence[PlannedSteps], after: Sequence[PlannedSteps]
) -> str | None:
    """Describes the effect of a new number of steps on the learning rate; None if the number is the same."""
    if tuple(before) == tuple(after):
        return None
    old, new = before[-1].total, after[-1]
    text = f"the run now ends at step {new.total} instead of {old}"
    if recipe.lr_scheduler_type in FLAT_SCHEDULES and not recipe.warmup_ratio:
        return f"{text}; the learning rate does not change"
    rate, was = learning_rate(recipe, after)(new.step), learning_rate(recipe, before)(new.step)
    return (
        f"{text}: from step {new.step + 1} on, lr_scheduler_type: {recipe.lr_scheduler_type} is computed for "
        f"{new.total} steps, as in Hugging Face's Trainer; that step has learning rate {rate:.3g} instead of {was:.3g}"
    )
