"""Counts of sequences, tokens, optimizer steps and evaluations of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.recipe.keys import Recipe
from trimtab.recipe.rules import has_domain_set


@dataclass(frozen=True)
class DataFacts:
    """Known facts about the training sequences of one epoch, packed or not."""

    sequences: int | None
    """Sequences per epoch, over all devices; None for streamed data."""
    tokens: int | None
    """Tokens per epoch without padding."""
    fill: float | None
    """Share of the sequences' positions that are not padding."""
    attended_share: float | None = None
    """Share of the query–key pairs of causal sequences that are within one document; None if unknown."""


def steps_per_epoch(sequences: int, recipe: Recipe, num_devices: int = 1) -> int:
    """Returns the optimizer steps per epoch; the last step may have fewer sequences.

    Example:
        >>> from trimtab.recipe import loads
        >>> steps_per_epoch(100, loads("model: a\\ndata: {train: x}"))  # 4 × 4 sequences in each step
        7
    """
    return math.ceil(sequences / sequences_per_step(recipe, num_devices))


def sequences_per_step(recipe: Recipe, num_devices: int = 1) -> int:
    """Returns the global batch size."""
    return recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * num_devices


def total_steps(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> int | None:
    """Returns the optimizer steps of the run; None if the recipe counts epochs and the data is unknown.

    Example:
        >>> from trimtab.recipe import loads
        >>> recipe = loads("model: a\\ndata: {train: x}\\nnum_train_epochs: 1.5")
        >>> total_steps(recipe, DataFacts(sequences=100, tokens=None, fill=None))
        11
    """
    if recipe.max_steps > 0:
        return recipe.max_steps
    if data is None or data.sequences is None:
        return None
    assert recipe.num_train_epochs is not None
    # The tolerance keeps 2 × 7 steps at 14 even if the floating-point product is slightly above.
    steps = recipe.num_train_epochs * steps_per_epoch(data.sequences, recipe, num_devices)
    return max(math.ceil(steps - 1e-9), 1)


def describe(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> dict[str, Any]:
    """Returns the plan's `data`: sequences, tokens and fill of an epoch, steps and tokens of the run."""
    steps = total_steps(recipe, data, num_devices)
    facts = data or DataFacts(None, None, None)
    trained = None
    if steps is not None and facts.sequences and facts.tokens is not None:
        trained = round(processed_sequences(recipe, data, num_devices) / facts.sequences * facts.tokens)
    return {
        "windows": facts.sequences,
        "tokens": facts.tokens,
        "fill": facts.fill,
        "steps": steps,
        "trained_tokens": trained,
    }


def evaluations(recipe: Recipe, steps: int | None) -> int:
    """Returns the number of evaluations: before the first step, every `eval_steps`, and after the last step.

    Example:
        >>> from trimtab.recipe import loads
        >>> evaluations(loads("model: a\\ndata: {train: x, eval: {general: y}}\\neval_steps: 10"), 25)
        4
    """
    if steps is None or not _num_sets(recipe):
        return 0
    between = 0 if recipe.eval_steps is None else (steps - 1) // recipe.eval_steps
    return 2 + between


def evaluation_tokens(recipe: Recipe) -> int:
    """Returns the maximum tokens of one evaluation: `data.eval_sequences` sequences of each set."""
    return _num_sets(recipe) * recipe.data.eval_sequences * recipe.max_seq_length


def _num_sets(recipe: Recipe) -> int:
    return int(has_domain_set(recipe)) + int(bool(recipe.data.eval.general))


def mean_length(recipe: Recipe, data: DataFacts | None) -> float:
    """Returns the mean tokens per sequence in the forward pass, padding included.

    Example:
        >>> from trimtab.recipe import loads
        >>> text = "model: a\\ndata: {train: x}\\npacking: false\\ngroup_by_length: true"
        >>> mean_length(loads(text), DataFacts(sequences=100, tokens=9000, fill=0.9))
        100.0
    """
    if not recipe.group_by_length or data is None or not (data.sequences and data.tokens and data.fill):
        return float(recipe.max_seq_length)
    return data.tokens / data.fill / data.sequences


def processed_sequences(recipe: Recipe, data: DataFacts | None, num_devices: int = 1) -> float:
    """Returns the sequences processed in the run; requires a known number of steps."""
    steps = total_steps(recipe, data, num_devices)
    assert steps is not None
    if data is None or data.sequences is None:
        return float(steps * sequences_per_step(recipe, num_devices))
    # The last step of each epoch may be smaller, so there are fewer sequences than steps × batch.
    return steps / steps_per_epoch(data.sequences, recipe, num_devices) * data.sequences
