"""Launches a run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.recipe import Recipe
from trimtab.run import lifecycle
from trimtab.run.lifecycle import FinishedRun, RunInputs, View


def train(
    recipe: Recipe,
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    inputs: RunInputs | None = None,
) -> FinishedRun:
    """Train a recipe in a new run folder.

    Args:
        recipe: the recipe.
        view: shows the plan, progress and records.
        after_step: called after each optimizer step with its number.
        inputs: rows, callbacks and a model from the calling program.

    Example:
        >>> train(load("recipe.yaml"), LiveView())  # doctest: +SKIP
        FinishedRun(folder=PosixPath('runs/train'), status='finished', step=100, signal=None)
    """
    return lifecycle.train(recipe, view, after_step=after_step, inputs=inputs)


def resume(
    path: Path,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    inputs: RunInputs | None = None,
) -> FinishedRun:
    """Resume a run folder from its last good checkpoint; the other arguments are those of `train`."""
    return lifecycle.resume(path, overrides, view, after_step=after_step, inputs=inputs)
