"""Validates the options of the step study and returns its cells. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from typing import Any

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.lab.choices import check_counts, check_seconds, choose_members
from trimtab.lab.step_settings import Kernels, Loss, Mode, Precision, TimedPart
from trimtab.lab.study import FRESH, Cell
from trimtab.lab.study_models import STUDY_MODELS, model_settings, named_shape
from trimtab.model.families import FAMILIES

BATCH, WARM_UP, STEPS = 4, 5, 10
"""Values of the reference study."""
GPU_CONTEXTS = (128, 256, 512, 1024)
CPU_SIZES, CPU_CONTEXTS = ("small",), (128, 256)
"""Defaults on a CPU: minutes instead of hours."""
WARM_UP_SIZES, WARM_UP_CONTEXTS = ("small",), (128,)
"""Defaults of the warm-up study, as in the reference."""


def cells(
    *,
    device: str,
    sizes: Sequence[str] = (),
    contexts: Sequence[int] = (),
    precisions: Sequence[str] = (),
    modes: Sequence[str] = (),
    kernels: Sequence[str] = (),
    losses: Sequence[str] = (),
    parts: Sequence[str] = (),
    batch: int = BATCH,
    warm_up: Sequence[int] = (),
    steps: int = STEPS,
    budget_s: float | None = None,
) -> list[Cell]:
    """One cell per combination and part.

    Args:
        device: cpu, cuda or cuda:N; determines the defaults of empty lists.
        sizes: study models, recipes, or any model that `trimtab plan` accepts.
        contexts: tokens per sequence.
        precisions: fp32, tf32, bf16, fp16.
        modes: eager, compiled, graphs.
        kernels: reference, fast.
        losses: logits_sum, cross_entropy; of several, all but the first are timed only for forward + backward.
        parts: forward, backward, both, full.
        batch: sequences per step.
        warm_up: steps before the timed ones, 5 by default. Several numbers, or 0, make a warm-up study: each cell in
            a fresh process, by default only forward + backward.
        steps: timed steps.
        budget_s: see `trimtab.lab.step_timing.time_steps`.

    Raises:
        RecipeError: an unknown word, with the nearest one; a number too small; a context beyond the model's positions.
        ModelError: trimtab can plan the model but not build it.

    Example:
        >>> [cell.settings["part"] for cell in cells(device="cpu", sizes=["tiny"], contexts=[16])]
        ['forward', 'backward', 'both', 'full', 'both']
        >>> [cell.fresh for cell in cells(device="cpu", sizes=["tiny"], contexts=[16], warm_up=[0, 1])]
        [True, True]
    """
    kind = device.split(":")[0]
    warm_ups = check_counts(warm_up or (WARM_UP,), "--warm-up", least=0)
    fresh = len(warm_ups) > 1 or 0 in warm_ups
    check_counts([batch], "--batch")
    check_counts([steps], "--steps")
    if budget_s is not None:
        check_seconds(budget_s, "--budget")
    names = list(dict.fromkeys(sizes or _default_sizes(kind, fresh)))
    lengths = check_counts(contexts or _default_contexts(kind, fresh), "--contexts")
    for name in names:
        check_model(name, max(lengths))
    common = {"batch": batch, "steps": steps, "budget_s": budget_s, "device": kind} | (
        {FRESH: True} if fresh else {}
    )
    axes: list[Sequence[dict[str, Any]]] = [
        [model_settings(name) for name in names],
        _axis("precision", choose_members(Precision, precisions or ("fp32",), "--precisions")),
        _axis("mode", choose_members(Mode, modes or ("eager",), "--modes")),
        _axis("kernels", choose_members(Kernels, kernels or ("reference",), "--kernels")),
        [{"context": context} for context in lengths],
        _timed(parts or _default_parts(fresh), losses or _default_losses(fresh)),
        [{"warm_up": warm} for warm in warm_ups],
    ]
    return [
        Cell("step", {key: value for settings in (*chosen, common) for key, value in settings.items()})
        for chosen in itertools.product(*axes)
    ]


def check_model(name: str, context: int) -> None:
    """Raises ModelError or RecipeError for a model that cannot be timed at a context length."""
    shape = named_shape(name)
    if shape.family not in FAMILIES:
        raise ModelError(
            f"{name} is a {shape.family} model, which trimtab cannot build yet",
            f"time a model of {', '.join(FAMILIES)}; `trimtab bench sizes` counts any",
        )
    if context > shape.max_positions:
        raise RecipeError(
            f"--contexts {context} is longer than the {shape.max_positions} positions of {name}",
            f"use at most {shape.max_positions}",
        )


def _axis(name: str, members: Sequence[Enum]) -> list[dict[str, Any]]:
    return [{name: member.value} for member in members]


def _timed(parts: Sequence[str], losses: Sequence[str]) -> list[dict[str, Any]]:
    """All parts with the first loss; other losses only for forward + backward, or the last part without it."""
    chosen = choose_members(TimedPart, parts, "--parts")
    first, *others = choose_members(Loss, losses, "--loss")
    compared = TimedPart.FORWARD_BACKWARD if TimedPart.FORWARD_BACKWARD in chosen else chosen[-1]
    pairs = [(part, first) for part in chosen] + [(compared, loss) for loss in others]
    return [{"part": part.value, "loss": loss.value} for part, loss in pairs]


def _default_parts(fresh: bool) -> list[str]:
    return [TimedPart.FORWARD_BACKWARD.value] if fresh else [part.value for part in TimedPart]


def _default_losses(fresh: bool) -> list[str]:
    return [Loss.LOGITS_SUM.value] if fresh else [loss.value for loss in Loss]


def _default_sizes(kind: str, fresh: bool) -> Sequence[str]:
    if fresh:
        return WARM_UP_SIZES
    return tuple(STUDY_MODELS) if kind == "cuda" else CPU_SIZES


def _default_contexts(kind: str, fresh: bool) -> Sequence[int]:
    if fresh:
        return WARM_UP_CONTEXTS
    return GPU_CONTEXTS if kind == "cuda" else CPU_CONTEXTS
