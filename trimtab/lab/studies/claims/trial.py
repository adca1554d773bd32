"""One run of a claim: its settings, its recipe and its result, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.lab.studies.claims.claim import Claim, Metric
from trimtab.lab.studies.claims.declared import CLAIMS
from trimtab.lab.training_runs import STARTER

GRAMMAR = ("agreement", "determiner", "pronoun", "verb form", "word order", "transitivity", "plural")
"""Kinds of probe items that test grammar."""
KINDS: dict[Metric, tuple[str, ...]] = {
    Metric.GRAMMAR: GRAMMAR,
    Metric.TRANSITIVITY: ("transitivity",),
    Metric.ARITHMETIC: ("arithmetic",),
}
EVALUATIONS = 2
"""Number of evaluations during a run, the last one at its end; there is another one before it."""
TRAINED_ON, REPLAYED = "starter:math", "replay"
HELD_OUT, GENERAL_TEXT = "starter:math-heldout", "starter:general"


@dataclass(frozen=True)
class Trial:
    """The settings that identify a run.

    Example:
        >>> Trial("replay", "0.1", 1, "starter", 100, "cpu").settings()["variant"]
        '0.1'
    """

    claim: str
    variant: str
    seed: int
    model: str
    """`starter`, `smollm2`, a folder, a GGUF file or a hub id."""
    steps: int
    device: str

    def settings(self) -> dict[str, Any]:
        """The settings of a cell."""
        return asdict(self)

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Trial:
        """The trial of a cell's settings."""
        return Trial(**settings)

    @property
    def declared(self) -> Claim:
        """The claim that it belongs to."""
        return CLAIMS[self.claim]

    @property
    def learning_rate(self) -> float:
        """The peak of its schedule."""
        rates, keys = self.declared.rates, self.declared.variant(self.variant).keys
        return float(keys.get("learning_rate", rates.starter if self.model == STARTER else rates.other))


@dataclass(frozen=True)
class Size:
    """Sequences and documents of a run: a CPU trains its size in a minute, the other fills a GPU."""

    tokens: int
    sequences: int
    eval_sequences: int
    documents: int


FP32 = {"dtype": "fp32"}
MIXED = {"dtype": "bf16", "weights_dtype": "fp32"}
"""On a GPU, unless the claim is about dtypes: full fp32 products take ten times as long there."""
ON_CPU = Size(tokens=128, sequences=2, eval_sequences=24, documents=4000)
ON_CUDA = Size(tokens=256, sequences=8, eval_sequences=64, documents=12_000)


def recipe(trial: Trial, model: str, folder: str, replayed: str) -> dict[str, Any]:
    """The recipe of a run.

    Args:
        trial: the run.
        model: the model's name or path in the recipe.
        folder: the run folder.
        replayed: the file of general text for replay.

    Example:
        >>> recipe(Trial("replay", "0.25", 1, "starter", 9, "cpu"), "starter", "run", "r.jsonl")["data"]["replay"]
        {'share': 0.25, 'sources': ['r.jsonl']}
    """
    on_cuda = trial.device.startswith("cuda")
    claim, size = trial.declared, ON_CUDA if on_cuda else ON_CPU
    variant = claim.variant(trial.variant)
    per_step = claim.documents_per_step
    documents = size.documents if per_step is None else per_step * trial.steps
    data: dict[str, Any] = {
        "train": [{"source": TRAINED_ON, "first": documents}],
        "eval": {"domain": [HELD_OUT], "general": [GENERAL_TEXT]},
        "eval_sequences": size.eval_sequences,
        "num_proc": 1,
    }
    if variant.replay:
        data["replay"] = {"share": variant.replay, "sources": [replayed]}
    length = {"max_steps": trial.steps} if per_step is None else {"num_train_epochs": 1.0}
    return {
        "model": model,
        "data": data,
        **length,
        "max_seq_length": size.tokens,
        "per_device_train_batch_size": size.sequences,
        "gradient_accumulation_steps": 1,
        "learning_rate": trial.learning_rate,
        "lr_scheduler_type": "linear",
        # a recipe whose warm-up is as long as the run is rejected
        "warmup_steps": min(trial.steps - 1, math.ceil(trial.steps / 20)),
        "adam_beta2": 0.95,
        **(MIXED if on_cuda and "dtype" not in claim.keys else FP32),
        "device": trial.device,
        "seed": trial.seed,
        "eval_steps": max(1, trial.steps // EVALUATIONS),
        "save_steps": None,
        "output_dir": folder,
        **claim.keys_on(trial.device),
        **variant.keys,
    }


@dataclass(frozen=True)
class Scores:
    """One evaluation."""

    step: int
    mathematics: float
    general: float
    probe: Mapping[str, tuple[int, int]]
    """(correct items, items) by kind; empty if the probe is off."""

    def of(self, metric: Metric) -> float | None:
        """The value of a metric, shares in percent; None if it was not measured."""
        if metric is Metric.MATHEMATICS:
            return self.mathematics
        if metric is Metric.GENERAL:
            return self.general
        right, items = self._counts(metric)
        return 100 * right / items if items else None

    def resolution(self, metric: Metric) -> float:
        """The smallest step of a metric: one item, in points, for a share; 0 for a loss."""
        items = self._counts(metric)[1]
        return 100 / items if items else 0.0

    def _counts(self, metric: Metric) -> tuple[int, int]:
        counts = [self.probe[kind] for kind in KINDS.get(metric, ()) if kind in self.probe]
        return sum(right for right, _ in counts), sum(items for _, items in counts)


@dataclass(frozen=True)
class Result:
    """The result of a run; a run that diverged has no evaluation at its end."""

    evaluations: tuple[Scores, ...]
    diverged: str
    """Why training stopped before its end; empty if it did not."""
    losses: tuple[tuple[int, float], ...]
    """(step, training loss), each averaged over a twentieth of the run."""
    steps: int
    tokens: int
    """Trained tokens."""
    rate: float
    """Trained tokens per second over the second half of the steps, without evaluations, from the run's log."""
    decay_sum: float
    """Σ learning rate × weight decay over the steps."""

    @property
    def shrinkage(self) -> float:
        """The share by which decay alone shrinks a weight over the run.

        Example:
            >>> round(Result((), "", (), 500, 0, 0.0, 2e-5 * 0.1 * 500).shrinkage, 6)
            0.001
        """
        return 1 - math.exp(-self.decay_sum)

    def before(self, metric: Metric) -> float | None:
        """A metric before training."""
        return self.evaluations[0].of(metric) if self.evaluations else None

    def after(self, metric: Metric) -> float | None:
        """A metric after training: infinitely bad if training diverged; None if it was not measured."""
        if metric is Metric.SPEED:
            return self.rate
        if self.diverged:
            return math.inf if metric.scale == "loss" else -math.inf
        return self.evaluations[-1].of(metric) if self.evaluations else None

    def resolution(self, metric: Metric) -> float:
        """The smallest step of a metric."""
        return self.evaluations[0].resolution(metric) if self.evaluations else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Result:
        """Inverse of `to_dict`, also after a JSON round trip."""
        rows: Sequence[Mapping[str, Any]] = plain["evaluations"]
        evaluations = tuple(
            Scores(
                row["step"],
                row["mathematics"],
                row["general"],
                {kind: (right, items) for kind, (right, items) in row["probe"].items()},
            )
            for row in rows
        )
        losses = tuple((step, loss) for step, loss in plain["losses"])
        return Result(**{**plain, "evaluations": evaluations, "losses": losses})
