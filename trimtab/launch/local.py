"""A run in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.recipe import Recipe
from trimtab.run import lifecycle
from trimtab.run.lifecycle import Finished, Given, View


def train(
    recipe: Recipe,
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    given: Given | None = None,
) -> Finished:
    """Train a recipe in a new run folder.

    Args:
        recipe: what to train.
        view: shown the plan, progress and records.
        after_step: called with each finished step.
        given: rows, callbacks and a model of the calling program.

    Example:
        >>> train(load("recipe.yaml"), LiveView())  # doctest: +SKIP
        Finished(folder=PosixPath('runs/train'), status='finished', step=100, signal=None)
    """
    return lifecycle.train(recipe, view, after_step=after_step, given=given)


def resume(
    path: Path,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    given: Given | None = None,
) -> Finished:
    """Continue a run folder from its last good checkpoint; the arguments are those of `train`."""
    return lifecycle.resume(path, overrides, view, after_step=after_step, given=given)
