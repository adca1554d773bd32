"""A claim: variants of one training run, and hypotheses about the difference between two of them.

Everything that decides a verdict is declared before anything is measured: the metric, the direction, the smallest
effect of interest. Variants differ only in the settings that the claim is about.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Metric(enum.Enum):
    """A metric, measured after training."""

    MATHEMATICS = "mathematics loss"
    """On held-out problems like those of training: measures learning."""
    GENERAL = "general text loss"
    """On held-out general text: measures forgetting."""
    GRAMMAR = "grammar"
    """On the probe's minimal pairs about grammar, transitivity included."""
    TRANSITIVITY = "transitivity"
    ARITHMETIC = "arithmetic"
    SPEED = "trained tokens per second"

    @property
    def unit(self) -> str:
        """Unit of differences: nats per token, percentage points of the items, or percent of the baseline."""
        return {"share": "points", "loss": "nats", "rate": "%"}[self.scale]

    @property
    def scale(self) -> str:
        """`loss` (lower is better), `share` of items in percent or `rate` (higher is better)."""
        if self in (Metric.MATHEMATICS, Metric.GENERAL):
            return "loss"
        return "rate" if self is Metric.SPEED else "share"

    def difference(self, variant: float, baseline: float) -> float:
        """Variant minus baseline; for a rate, in percent of the baseline.

        Example:
            >>> Metric.GENERAL.difference(2.5, 2.25), Metric.SPEED.difference(300.0, 200.0)
            (0.25, 50.0)
        """
        if self is Metric.SPEED:
            return 100 * (variant / baseline - 1)
        return variant - baseline


class Direction(enum.Enum):
    """The range of variant − baseline that a hypothesis states; δ is the smallest effect of interest."""

    HIGHER = "higher"
    """Above +δ."""
    LOWER = "lower"
    """Below −δ."""
    EQUAL = "equal"
    """Between −δ and +δ."""


@dataclass(frozen=True)
class Hypothesis:
    """One sentence that a difference between two variants can confirm or refute.

    Args:
        text: the sentence, true or false.
        variant, baseline: names of variants of the claim.
        smallest: the smallest effect of interest, in the metric's unit: smaller differences do not matter in practice.

    Example:
        >>> Hypothesis("Decay 1.0 destroys.", "1.0", "0.01", Metric.GENERAL, Direction.HIGHER, 0.1).metric.unit
        'nats'
    """

    text: str
    variant: str
    baseline: str
    metric: Metric
    direction: Direction
    smallest: float

    def __post_init__(self) -> None:
        assert self.smallest > 0, "a smallest effect of interest is above zero"
        assert self.variant != self.baseline, self.text


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Args:
        name: the name in tables: "0.01", "adamw_8bit".
        keys: recipe keys that it sets.
        replay: share of the sequences that are general text.
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    replay: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Peak learning rates of the starter (4.7 million parameters), and of other models."""

    starter: float
    other: float


@dataclass(frozen=True)
class Steps:
    """Default optimizer steps of a run: about a minute on a laptop's CPU."""

    cpu: int
    cuda: int
    """The starter on a GPU."""
    large: int
    """Other models on a GPU."""

    def of(self, device: str, *, starter: bool) -> int:
        """The steps of a run.

        Example:
            >>> Steps(cpu=100, cuda=300, large=150).of("cuda:1", starter=False)
            150
        """
        if not device.startswith("cuda"):
            return self.cpu
        return self.cuda if starter else self.large


@dataclass(frozen=True)
class Claim:
    """A claim with everything that decides its verdicts.

    Args:
        name: name on the command line.
        title: title of its section.
        background: why the claim is plausible, and what the variants are; a few sentences for the report.
        variants: variants in the order of the table; hypotheses name two of them.
        baseline: the variant with which the table compares the others.
        hypotheses: the hypotheses to test.
        keys: recipe keys of all variants.
        cpu_keys: further ones on a CPU.
        seeds: default number of seeds.
        rates: peak learning rates, unless a variant sets its own.
        steps: default steps by device.
        metrics: columns of its table.
        documents_per_step: if set, runs last one epoch over steps × this many documents, so that all variants see the
            same documents; otherwise `steps` optimizer steps.
        least_shrink: for claims about weight decay: the minimum difference between two variants in the share by which
            decay shrinks the weights; below it no effect could show.
    """

    name: str
    title: str
    background: str
    variants: tuple[Variant, ...]
    baseline: str
    hypotheses: tuple[Hypothesis, ...]
    rates: Rates
    steps: Steps
    keys: Mapping[str, Any] = field(default_factory=dict)
    cpu_keys: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    metrics: tuple[Metric, ...] = (
        Metric.MATHEMATICS,
        Metric.GENERAL,
        Metric.GRAMMAR,
        Metric.TRANSITIVITY,
        Metric.ARITHMETIC,
    )
    documents_per_step: int | None = None
    least_shrink: float | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        assert len(set(names)) == len(names), names
        used = {self.baseline, *(n for h in self.hypotheses for n in (h.variant, h.baseline))}
        assert used <= set(names), used - set(names)
        assert {h.metric for h in self.hypotheses} <= set(self.metrics), self.name

    def keys_on(self, device: str) -> Mapping[str, Any]:
        """The recipe keys of all variants on a device."""
        return self.keys if device.startswith("cuda") else {**self.keys, **self.cpu_keys}

    def variant(self, name: str) -> Variant:
        """The variant of a name."""
        return next(variant for variant in self.variants if variant.name == name)
