"""The Python API of trimtab: load, train, generate, save. The command line calls the same functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.api.model import Model, check_saving, load
    from trimtab.api.planning import plan_run, plan_table, solve, what_if
    from trimtab.api.results import Evaluation, RunResult
    from trimtab.api.training import resume, train

_MODULES = {
    "Evaluation": "results",
    "Model": "model",
    "RunResult": "results",
    "check_saving": "model",
    "load": "model",
    "plan_run": "planning",
    "plan_table": "planning",
    "resume": "training",
    "solve": "planning",
    "train": "training",
    "what_if": "planning",
}

__all__ = [
    "Evaluation",
    "Model",
    "RunResult",
    "check_saving",
    "load",
    "plan_run",
    "plan_table",
    "resume",
    "solve",
    "train",
    "what_if",
]

__getattr__ = lazy_attributes(__name__, _MODULES)
