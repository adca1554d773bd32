"""The runs of one claim with one model, and the verdicts on its hypotheses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.lab.studies.claims.claim import Claim, Hypothesis, Metric
from trimtab.lab.studies.claims.declared import CLAIMS
from trimtab.lab.studies.claims.trial import Result, Trial
from trimtab.lab.studies.claims.verdict import ClaimVerdict, Interval, judge, mean_interval
from trimtab.lab.study import CellOutcome, Measurement


@dataclass(frozen=True)
class Group:
    """Comparable runs: they differ only in variant and seed."""

    claim: Claim
    model: str
    steps: int
    device: str
    results: Mapping[tuple[str, int], Result]
    """By variant and seed."""
    failures: tuple[tuple[Trial, Measurement], ...]
    """Runs without a result, with the reason."""

    @property
    def seeds(self) -> list[int]:
        """Seeds that have a result, in order."""
        return sorted({seed for _, seed in self.results})

    @property
    def any_result(self) -> Result | None:
        """Any of the results: metrics before training are the same in all."""
        return next(iter(self.results.values()), None)

    def of(self, variant: str) -> list[Result]:
        """The results of a variant, in the order of the seeds."""
        return [result for (name, _), result in sorted(self.results.items()) if name == variant]

    def values(self, variant: str, metric: Metric) -> list[float]:
        """A metric after training, one value per seed with a result."""
        metric_values = [result.after(metric) for result in self.of(variant)]
        return [value for value in metric_values if value is not None]

    def differences(self, variant: str, baseline: str, metric: Metric) -> list[float]:
        """Variant − baseline of each seed that has both; seeds for which both diverged are skipped."""
        differences = []
        for seed in self.seeds:
            variant_value, baseline_value = (
                self.results[name, seed].after(metric) if (name, seed) in self.results else None
                for name in (variant, baseline)
            )
            if variant_value is not None and baseline_value is not None:
                differences.append(metric.difference(variant_value, baseline_value))
        return [value for value in differences if not math.isnan(value)]

    def interval(self, variant: str, baseline: str, metric: Metric) -> Interval | None:
        """The interval of the paired difference."""
        return mean_interval(self.differences(variant, baseline, metric), self.resolution(metric))

    def resolution(self, metric: Metric) -> float:
        """The smallest step of a metric."""
        return self.any_result.resolution(metric) if self.any_result else 0.0

    def shrinkage(self, variant: str) -> float | None:
        """The share by which decay alone shrinks weights, mean over seeds; None without a result."""
        shrinkages = [result.shrinkage for result in self.of(variant)]
        return statistics.fmean(shrinkages) if shrinkages else None

    def verdict(self, hypothesis: Hypothesis) -> ClaimVerdict:
        """The verdict of the runs on a hypothesis."""
        differences = self.differences(hypothesis.variant, hypothesis.baseline, hypothesis.metric)
        return judge(
            hypothesis,
            differences,
            resolution=self.resolution(hypothesis.metric),
            too_weak=self.too_weak(hypothesis),
        )

    def too_weak(self, hypothesis: Hypothesis) -> str:
        """The reason why no effect could show; empty if one could."""
        least = self.claim.least_shrink
        variant_shrinkage, baseline_shrinkage = (
            self.shrinkage(hypothesis.variant),
            self.shrinkage(hypothesis.baseline),
        )
        if (
            least is None
            or variant_shrinkage is None
            or baseline_shrinkage is None
            or abs(variant_shrinkage - baseline_shrinkage) >= least
        ):
            return ""
        return (
            f"decay shrinks weights by {percent(variant_shrinkage)} against {percent(baseline_shrinkage)}; rounding to "
            f"bf16 changes them more ({percent(least)}), so no effect could show: raise --steps"
        )


def percent(share: float) -> str:
    """A small share as a percentage.

    Example:
        >>> percent(0.00098), percent(0.63)
        ('0.098 %', '63 %')
    """
    return f"{100 * share:.2g} %"


def grouped(measurements: Sequence[Measurement]) -> list[Group]:
    """Groups runs, in the order of the claims and then of appearance."""
    runs: dict[tuple[str, str, int, str], list[tuple[Trial, Measurement]]] = {}
    for measurement in measurements:
        trial = Trial.of(measurement.cell.settings)
        runs.setdefault((trial.claim, trial.model, trial.steps, trial.device), []).append(
            (trial, measurement)
        )
    order = list(CLAIMS)
    groups = []
    for (claim, model, steps, device), pairs in sorted(
        runs.items(), key=lambda item: order.index(item[0][0])
    ):
        results = {
            (trial.variant, trial.seed): Result.from_dict(measurement.result)
            for trial, measurement in pairs
            if measurement.outcome is CellOutcome.MEASURED
        }
        failures = tuple(pair for pair in pairs if pair[1].outcome is not CellOutcome.MEASURED)
        groups.append(Group(CLAIMS[claim], model, steps, device, results, failures))
    return groups
