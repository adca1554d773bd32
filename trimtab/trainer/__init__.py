"""The training loop and its checks. It is independent of model families and kernels: callables are passed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.trainer.loop import train
    from trimtab.trainer.metrics_log import MetricsLog, NoLog
    from trimtab.trainer.setup import Cadence, Outcome, TrainingSetup, TrainState

_MODULES = {
    "Cadence": "setup",
    "TrainingSetup": "setup",
    "MetricsLog": "metrics_log",
    "NoLog": "metrics_log",
    "Outcome": "setup",
    "TrainState": "setup",
    "train": "loop",
}

__all__ = ["Cadence", "MetricsLog", "NoLog", "Outcome", "TrainState", "TrainingSetup", "train"]

__getattr__ = lazy_attributes(__name__, _MODULES)
