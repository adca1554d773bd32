"""The training loop and what guards it. Knows no model family, no kernel, no layout: it is handed callables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.trainer.job import Cadence, Job, Outcome, TrainState
    from trimtab.trainer.loop import train
    from trimtab.trainer.metrics_log import MetricsLog, NoLog

_HOMES = {
    "Cadence": "job",
    "Job": "job",
    "MetricsLog": "metrics_log",
    "NoLog": "metrics_log",
    "Outcome": "job",
    "TrainState": "job",
    "train": "loop",
}

__all__ = ["Cadence", "Job", "MetricsLog", "NoLog", "Outcome", "TrainState", "train"]

__getattr__ = lazily(__name__, _HOMES)
