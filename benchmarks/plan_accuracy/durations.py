"""Steps of a case, and how long it takes roughly. No torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan_accuracy.cases import CONFIGS, Case
from trimtab.model.families import shape_from_config

LARGE = 2.5e9
"""Above this number of parameters weights are read from a folder: initializing them takes a minute per run on a CPU."""
FLOPS = 3e14
"""Rough FLOP/s of a GPU; only determines how many steps are measured, and which cases are started."""
WARM_UP = 3
"""Least steps before the timed ones: the third step is captured as a CUDA graph."""


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a case."""

    together: int
    """Steps per group; a time is logged for each group."""
    warm_up: int
    """Groups before the timed ones."""
    timed: int

    @property
    def total(self) -> int:
        """Number of steps."""
        return self.together * (self.warm_up + self.timed)


def steps_of(case: Case) -> Steps:
    """The steps of a case. Steps that take seconds are timed one by one.

    Example:
        >>> steps_of(Case.parse("qwen3-0.6b full 4x1024"))
        Steps(together=12, warm_up=1, timed=3)
        >>> steps_of(Case.parse("llama-8b qlora 1x65536"))
        Steps(together=1, warm_up=3, timed=2)
    """
    if case.model.startswith("tiny-"):
        return Steps(3, 1, 1)  # they only test the code
    seconds = step_seconds(case)
    if seconds > 2:
        return Steps(1, WARM_UP, 2)
    return Steps(max(WARM_UP, min(12, round(1.5 / seconds))), 1, 3)


def step_seconds(case: Case) -> float:
    """Rough seconds of an optimizer step."""
    return 6.0 * num_parameters(case.model) * case.step_tokens / FLOPS


def start_seconds(case: Case, root: Path) -> float:
    """Rough seconds until a case's timed steps: imports, weights, compilation, warm-up.

    Example:
        >>> start_seconds(Case.parse("llama-8b qlora 2x2048"), Path("no-folder")) > 40
        True
    """
    parameters = num_parameters(case.model)
    loading = 2 * parameters / 1e9
    if parameters > LARGE and not (root / "models" / case.model).exists():
        loading += 2 * parameters / 4e8  # its folder is written first
    compiling = 60.0 if case.options.get("compile") == "true" else 0.0
    steps = steps_of(case)
    return 20.0 + loading + compiling + steps.together * steps.warm_up * _least(case)


def timed_seconds(case: Case) -> float:
    """Rough seconds of a case's timed steps.

    Example:
        >>> 1 < timed_seconds(Case.parse("qwen3-0.6b full 4x1024")) < 10
        True
    """
    steps = steps_of(case)
    return 1.0 + steps.together * steps.timed * _least(case)


def _least(case: Case) -> float:
    return max(1.5 * step_seconds(case), 0.05)


@functools.cache
def num_parameters(model: str) -> int:
    """Number of parameters of a model."""
    return shape_from_config(CONFIGS[model], model).num_parameters
