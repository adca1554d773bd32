"""From windows to steps: how long a run is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.recipe.keys import Recipe


@dataclass(frozen=True)
class DataFacts:
    """What is known of the packed training data of one epoch."""

    windows: int | None
    """Windows of an epoch, over all devices; None while streaming."""
    tokens: int | None
    """Tokens in them, padding not counted."""
    fill: float | None
    """Share of the windows' places that tokens fill."""


def steps_per_epoch(windows: int, recipe: Recipe, num_devices: int = 1) -> int:
    """Updates of the weights in an epoch; the last may hold fewer windows.

    Example:
        >>> from trimtab.recipe import loads
        >>> steps_per_epoch(100, loads("model: a\\ndata: {train: x}"))  # 4 × 4 windows a step
        7
    """
    return math.ceil(windows / windows_per_step(recipe, num_devices))


def windows_per_step(recipe: Recipe, num_devices: int = 1) -> int:
    """The global batch."""
    return recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * num_devices


def total_steps(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> int | None:
    """Updates of the whole run; None while the data is unknown and the recipe counts in epochs.

    Example:
        >>> from trimtab.recipe import loads
        >>> recipe = loads("model: a\\ndata: {train: x}\\nnum_train_epochs: 1.5")
        >>> total_steps(recipe, DataFacts(windows=100, tokens=None, fill=None))
        11
    """
    if recipe.max_steps > 0:
        return recipe.max_steps
    if data is None or data.windows is None:
        return None
    assert recipe.num_train_epochs is not None
    # 2 × 7 steps are 14 also where 2.0 × 7 comes out a hair above in floating point.
    steps = recipe.num_train_epochs * steps_per_epoch(data.windows, recipe, num_devices)
    return max(math.ceil(steps - 1e-9), 1)


def describe(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> dict[str, Any]:
    """The plan's `data`: windows, tokens and fill of an epoch, steps and tokens of the run."""
    steps = total_steps(recipe, data, num_devices)
    known = data or DataFacts(None, None, None)
    trained = None
    if steps is not None and known.windows and known.tokens is not None:
        trained = round(processed_windows(recipe, data, num_devices) / known.windows * known.tokens)
    return {
        "windows": known.windows,
        "tokens": known.tokens,
        "fill": known.fill,
        "steps": steps,
        "trained_tokens": trained,
    }


def mean_length(recipe: Recipe, data: DataFacts | None) -> float:
    """Tokens of a window that pass through the model, padding included.

    Example:
        >>> from trimtab.recipe import loads
        >>> text = "model: a\\ndata: {train: x}\\npacking: false\\ngroup_by_length: true"
        >>> mean_length(loads(text), DataFacts(windows=100, tokens=9000, fill=0.9))
        100.0
    """
    if not recipe.group_by_length or data is None or not (data.windows and data.tokens and data.fill):
        return float(recipe.max_seq_length)
    return data.tokens / data.fill / data.windows


def processed_windows(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> float:
    """Windows that pass through the model in the whole run; needs a known number of steps."""
    steps = total_steps(recipe, data, num_devices)
    assert steps is not None
    if data is None or data.windows is None:
        return float(steps * windows_per_step(recipe, num_devices))
    # The short last step of each epoch makes fewer windows than steps × batch.
    return steps / steps_per_epoch(data.windows, recipe, num_devices) * data.windows
