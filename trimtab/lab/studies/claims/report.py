"""Verdicts first, then a section for each claim: its runs, paired differences, curves and verdicts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence, Set

from trimtab.lab.studies.claims.claim import Metric
from trimtab.lab.studies.claims.declared import CLAIMS
from trimtab.lab.studies.claims.formatting import (
    MISSING,
    difference,
    heading,
    mean_of_seeds,
    verdict_sentence,
    with_unit,
)
from trimtab.lab.studies.claims.group import Group, grouped, percent
from trimtab.lab.studies.claims.trial import ON_CPU, ON_CUDA, Result, Trial
from trimtab.lab.studies.claims.verdict import FEWEST_SEEDS, Ruling
from trimtab.lab.study import Measurement
from trimtab.lab.training_runs import STARTER
from trimtab.report.document import Block, LineChart, Section, Series, Table, Text

METHOD = (
    "How to read this: runs of two variants with the same seed draw the same data in the same order, unless the claim "
    "is about the data, so their difference is taken seed by seed, and the interval is Student's 95 % interval of the "
    "mean difference. Each "
    "hypothesis names its smallest effect of interest beforehand. It is confirmed where the whole interval lies on its "
    "side of that effect, refuted where the whole interval lies on the other side, and not detectable where the "
    f"interval has both, or where there are fewer than {FEWEST_SEEDS} seeds. Seeds change the order of the data and "
    "the bits of stochastic rounding; the model and the held-out texts are always the same, so verdicts do not cover "
    "others. Intervals are not corrected for the number of hypotheses: of twenty, one may miss by chance."
)


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """The table of verdicts, and one section per claim, model and number of steps."""
    known = [measurement for measurement in measurements if measurement.cell.settings.get("claim") in CLAIMS]
    groups = grouped(known)
    others = {
        str(measurement.cell.settings.get("claim"))
        for measurement in measurements
        if measurement not in known
    }
    return [_verdicts(groups, others), *(_section(group, _suffix(group, groups)) for group in groups)]


def _verdicts(groups: Sequence[Group], others: Set[str]) -> Section:
    several = len({group.model for group in groups}) > 1
    rows, rulings = [], []
    for group in groups:
        for hypothesis in group.claim.hypotheses:
            verdict = group.verdict(hypothesis)
            rulings.append(verdict.ruling)
            unit = hypothesis.metric.unit
            measured = difference(hypothesis.metric, verdict.interval)
            rows.append(
                (
                    group.claim.name,
                    *((group.model,) if several else ()),
                    hypothesis.text,
                    f"{measured} {unit}" if verdict.interval else MISSING,
                    f"{hypothesis.smallest:g} {unit}",
                    verdict.ruling.value,
                )
            )
    counts = ", ".join(f"{rulings.count(ruling)} {ruling.value}" for ruling in Ruling)
    head = (
        "claim",
        *(("model",) if several else ()),
        "hypothesis",
        "measured difference (95 % interval)",
        "smallest effect of interest",
        "verdict",
    )
    text = f"{len(rulings)} hypotheses: {counts}."
    if others:
        text += f" This version has no claims {', '.join(sorted(others))}; their runs are left out."
    return Section("Verdicts", (Text(text), Table("", head, tuple(rows)), Text(METHOD)))


def _suffix(group: Group, groups: Sequence[Group]) -> str:
    """Distinguishes the sections of one claim: model, steps, device."""
    same = [other for other in groups if other.claim is group.claim]
    parts = (
        group.model if len({other.model for other in same}) > 1 else "",
        f"{group.steps} steps" if len({other.steps for other in same}) > 1 else "",
        group.device if len({other.device for other in same}) > 1 else "",
    )
    return "".join(f", {part}" for part in parts if part)


def _section(group: Group, suffix: str) -> Section:
    claim = group.claim
    blocks: list[Block] = [Text(claim.background), Text(_setup(group))]
    if group.results:
        blocks += [_values_table(group), _differences_table(group), Text(_extremes(group)), *_charts(group)]
    if group.failures:
        blocks.append(_failures_table(group))
    blocks += [
        Text(verdict_sentence(hypothesis, group.verdict(hypothesis))) for hypothesis in claim.hypotheses
    ]
    return Section(claim.title + suffix, tuple(blocks))


def _setup(group: Group) -> str:
    """Describes the runs, and the metrics before them."""
    claim, size = group.claim, ON_CUDA if group.device.startswith("cuda") else ON_CPU
    tokens = claim.keys_on(group.device).get("max_seq_length", size.tokens)
    rates = {Trial(claim.name, v.name, 0, group.model, group.steps, "").learning_rate for v in claim.variants}
    rate = f"peak learning rate {rates.pop():g}" if len(rates) == 1 else "learning rate by variant"
    length = (
        f"{group.steps} steps"
        if claim.documents_per_step is None
        else f"one epoch over {claim.documents_per_step * group.steps:,} documents"
    )
    text = (
        f"Model {group.model}, {length}, sequences of {tokens} tokens, {rate}, "
        f"{len(group.seeds)} seed{'s' if len(group.seeds) != 1 else ''}."
    )
    first = group.any_result
    if first is None:
        return text
    before = [(metric, first.before(metric)) for metric in claim.metrics if metric is not Metric.SPEED]
    known = ", ".join(
        f"{metric.value} {with_unit(metric, value)}" for metric, value in before if value is not None
    )
    if any(variant.replay for variant in claim.variants) and group.model != STARTER:
        text += (
            " The replayed text is like the held-out general text, and is not what this model was pretrained on: where "
            "general text loss falls, the model has learned that kind of text."
        )
    return f"{text} Before training: {known}."


def _values_table(group: Group) -> Table:
    claim = group.claim
    decays = claim.least_shrink is not None
    extra = ("learning rate × decay × steps", "decay shrinks weights by") if decays else ()
    speeds = Metric.SPEED in claim.metrics
    head = (
        "variant",
        *extra,
        *(heading(m) for m in claim.metrics),
        *(("tokens per step",) if speeds else ()),
    )
    rows = []
    for variant in claim.variants:
        results = group.of(variant.name)
        cells = [variant.name]
        if decays:
            cells += _decay_cells(results)
        cells += [
            mean_of_seeds(metric, group.values(variant.name, metric), group.resolution(metric))
            for metric in claim.metrics
        ]
        if speeds:
            cells.append(_mean(results, lambda r: r.tokens / max(1, r.steps)))
        rows.append(tuple(cells))
    note = "Mean over seeds ± half of its 95 % interval."
    if speeds:
        note += (
            " Speed counts trained tokens, without padding, over the second half of each run. Other programs on the "
            "machine change speeds, not losses."
        )
    return Table("After training", head, tuple(rows), note)


def _decay_cells(results: Sequence[Result]) -> list[str]:
    if not results:
        return [MISSING, MISSING]
    total = statistics.fmean(result.decay_sum for result in results)
    shrinkage = statistics.fmean(result.shrinkage for result in results)
    return [f"{total:.3g}", percent(shrinkage)]


def _mean(results: Sequence[Result], of: Callable[[Result], float]) -> str:
    return f"{statistics.fmean(map(of, results)):,.0f}" if results else MISSING


def _differences_table(group: Group) -> Table:
    claim = group.claim
    head = ("variant", *(f"{metric.value}, {metric.unit}" for metric in claim.metrics))
    rows = tuple(
        (
            variant.name,
            *(
                difference(
                    metric,
                    group.interval(variant.name, claim.baseline, metric),
                    group.differences(variant.name, claim.baseline, metric),
                )
                for metric in claim.metrics
            ),
        )
        for variant in claim.variants
        if variant.name != claim.baseline
    )
    note = "Mean of the differences with the same seed, and its 95 % interval; without an interval, the mean alone."
    return Table(f"Difference to {claim.baseline}", head, rows, note)


def _failures_table(group: Group) -> Table:
    rows = tuple(
        (trial.variant, str(trial.seed), measurement.outcome.value, measurement.message)
        for trial, measurement in group.failures
    )
    return Table("Runs without a result", ("variant", "seed", "outcome", "message"), rows)


def _extremes(group: Group) -> str:
    """The best variant by each metric, compared by means."""
    sentences = []
    for metric in group.claim.metrics:
        means = {
            variant.name: statistics.fmean(values)
            for variant in group.claim.variants
            if (values := group.values(variant.name, metric))
        }
        if len(means) < 2 or len(set(means.values())) == 1:
            continue
        pick = min if metric.scale == "loss" else max
        best = pick(means, key=means.__getitem__)
        adjective = "Lowest" if metric.scale == "loss" else "Highest"
        first = group.any_result.before(metric) if group.any_result else None
        before = "" if first is None else f", before training {with_unit(metric, first)}"
        sentences.append(f"{adjective} {metric.value}: {best} ({with_unit(metric, means[best])}{before}).")
    return " ".join(sentences)


def _charts(group: Group) -> list[LineChart]:
    """Training loss, and loss on held-out general text, by variant: means over seeds."""
    name = re.sub(r"[^a-z0-9]+", "-", f"claims-{group.claim.name}-{group.model}-{group.steps}".lower())
    curves = (
        ("training", "Training loss", lambda result: result.losses),
        (
            "mathematics",
            "Held-out mathematics",
            lambda result: tuple(
                (evaluation.step, evaluation.mathematics) for evaluation in result.evaluations
            ),
        ),
        (
            "general",
            "Held-out general text",
            lambda result: tuple((evaluation.step, evaluation.general) for evaluation in result.evaluations),
        ),
    )
    return [
        LineChart(
            id=f"{name}-{kind}",
            title=f"{title}, mean over seeds",
            x_label="optimizer step",
            y_label="loss, nats per token",
            series=tuple(
                Series(variant.name, _mean_curve([curve(result) for result in group.of(variant.name)]))
                for variant in group.claim.variants
                if group.of(variant.name)
            ),
        )
        for kind, title, curve in curves
    ]


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[tuple[float, float | None], ...]:
    """The mean of curves at the steps that all of them have."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, loss in curve:
            by_step.setdefault(step, []).append(loss)
    return tuple(
        (float(step), statistics.fmean(losses))
        for step, losses in sorted(by_step.items())
        if len(losses) == len(curves)
    )
