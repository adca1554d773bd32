"""trimtab from Python: load, train, generate, save, in a few lines. The command line calls the same functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.api.model import Model, check_saving, load
    from trimtab.api.results import Evaluation, RunResult
    from trimtab.api.training import plan_run, resume, train

_HOMES = {
    "Evaluation": "results",
    "Model": "model",
    "RunResult": "results",
    "check_saving": "model",
    "load": "model",
    "plan_run": "training",
    "resume": "training",
    "train": "training",
}

__all__ = ["Evaluation", "Model", "RunResult", "check_saving", "load", "plan_run", "resume", "train"]

__getattr__ = lazily(__name__, _HOMES)
