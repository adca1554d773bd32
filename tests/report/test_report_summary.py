"""What is called gained, lost and unchanged, and what the curves hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report import read_run
from trimtab.report.buckets import BUCKETS, Bar
from trimtab.report.charts import MOST_POINTS, _figure, _smoothed, _thinned, charts
from trimtab.report.progress import Training, sparkline
from trimtab.report.summary import (
    Change,
    changes,
    first_label,
    memory_basis,
    memory_rows,
    memory_verdict,
    parameters,
    samples,
    speed,
    verdict,
)

MakeRun = Callable[..., Path]


@pytest.mark.parametrize(
    ("unit", "before", "after", "outcome"),
    [
        ("loss", 2.0, 1.5, "better"),
        ("loss", 2.0, 2.5, "worse"),
        ("loss", 2.0, 2.009, "unchanged"),
        ("loss", 2.0, 1.99, "better"),
        ("loss", 2.0, math.nan, "worse"),
        ("loss", 2.0, math.inf, "worse"),
        ("share", 0.5, 0.52, "better"),
        ("share", 0.52, 0.5, "worse"),
        ("share", 0.5, 0.519, "unchanged"),
        ("share", 0.5, math.nan, "worse"),
    ],
)
def test_outcomes(unit: str, before: float, after: float, outcome: str) -> None:
    assert Change("x", before, after, unit).outcome == outcome


@pytest.mark.parametrize(
    ("before", "after", "items", "label"),
    [
        (0.5, 0.65, 14, "within chance"),  # two choices of fourteen
        (0.5, 0.65, 220, "better"),
        (0.9, 0.5, 14, "worse"),
        (0.5, 0.51, 220, "unchanged"),
        (0.0, 0.03, 60, "within chance"),
        (0.0, 0.9, 60, "better"),
    ],
)
def test_few_items_do_not_make_a_finding(before: float, after: float, items: int, label: str) -> None:
    assert Change("x", before, after, "share", items=items).label == label


def test_the_probe_is_also_counted_as_a_whole(make_run: MakeRun) -> None:
    def record(step: int, first: float, second: float) -> dict[str, Any]:
        return {
            "kind": "probe",
            "step": step,
            "scores": {"a": first, "b": second},
            "items": {"a": 10, "b": 30},
        }

    rows = changes(read_run(make_run([record(0, 0.5, 0.5), record(9, 1.0, 0.9)])))
    assert [row.name for row in rows] == ["probe: all", "probe: a", "probe: b"]
    assert rows[0].text() == "20 of 40 → 37 of 40 (+42 points)"


def test_changes_read_as_people_write_them() -> None:
    assert Change("x", 2.0, 1.5, "loss").text() == "2.000 → 1.500 (−0.500)"
    assert Change("x", 0.5, 0.75, "share").text() == "50% → 75% (+25 points)"
    assert Change("x", 0.501, 0.504, "share").text() == "50% → 50% (±0 points)"
    assert Change("x", 2.0, math.nan, "loss").text() == "2.000 → nan (—)"


def test_the_verdict_of_a_run_that_learnt_and_forgot(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run(learnt))
    found = verdict(data)
    assert [c.name for c in found.gained] == ["domain loss", "exact answers", "probe: arithmetic"]
    assert [c.name for c in found.lost] == ["general loss", "probe: transitivity"]
    assert [c.name for c in found.unchanged] == ["probe: grammar"]
    first, second, third = found.sentences()
    assert first.startswith("Gained: domain loss 3.520 → 1.210 (−2.310); exact answers 0 of 90 → 54 of 90")
    assert second.startswith("Lost: general loss 3.104 → 3.135 (+0.031)")
    assert third == "Unchanged, or within chance: probe: grammar."
    assert first_label(data) == "before"


def test_nothing_is_said_of_what_was_measured_once(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run([r for r in learnt if r.get("step", 0) == 0]))
    assert changes(data) == []
    assert verdict(data).sentences() == []
    assert all(s.after is None for s in samples(data))
    assert speed(data) == {}
    assert memory_verdict(data) is None


def test_a_first_measurement_that_is_not_before_training_says_its_step(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    data = read_run(make_run([r for r in learnt if r.get("step", 0) > 0]))
    assert first_label(data) == "step 50"


def test_memory_predicted_beside_measured(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run(learnt))
    rows = [(row.when, row.source) for row in memory_rows(data)]
    assert rows == [
        ("before", "predicted"),
        ("before", "measured"),
        ("peak", "predicted"),
        ("peak", "measured"),
        ("after", "measured"),
    ]
    assert memory_verdict(data) == (
        "At the peak 516.0 MiB were predicted and 519.0 MiB measured: the prediction was 0.6% too low."
    )
    basis = memory_basis(data)
    assert basis is not None
    assert "bytes of tensors" in basis
    data.choices["device"] = "cuda"
    assert "allocator" in str(memory_basis(data))


@given(st.dictionaries(st.sampled_from(BUCKETS), st.integers(0, 2**50)), st.integers(1, 100))
def test_a_bar_is_as_wide_as_asked(buckets: dict[str, int], width: int) -> None:
    whole = sum(buckets.values())
    text = Bar(buckets, whole).text(width).plain
    assert len(text) == width
    assert text == ("█" * width if whole else "·" * width)
    assert len(Bar(buckets, 3 * whole).text(width).plain) == width


def test_a_bar_shows_even_little() -> None:
    assert Bar({"weights": 1}, 10_000).text(10).plain == "▏·········"


@given(st.lists(st.floats(), max_size=200), st.integers(0, 40))
def test_a_sparkline_of_any_losses(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([3.0, 2.0, math.nan, 1.0], 4) == "█▅ ▁"
    assert sparkline([1.0, 1.0], 4) == "▁▁"


def test_training_counts_its_time_from_the_loop_until_the_clock_knows_better() -> None:
    state = Training(total=100)
    assert state.left() is None
    state.update({"step": 2, "loss": 1, "tokens_per_second": 1, "seconds": 6, "memory_bytes": 0})
    assert state.left() == 6 / 2 * 98
    assert state.line() == "step   2/100  loss 1.0000  1 tokens/s  4 min 54 s left"


def test_curves(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    found = {c.id: c for c in charts(read_run(make_run(learnt)))}
    assert list(found) == ["loss", "lr", "norm", "rate", "answers"]
    loss = found["loss"].figure
    assert [line["name"] for line in loss["data"]] == [
        "training, each step",
        "training, smoothed",
        "held-out: domain",
        "held-out: general",
    ]
    assert loss["data"][2]["x"] == [0, 50, 100, 150, 200, 250, 300]
    # Plotly dropped titles that are plain strings: they would silently be missing.
    assert loss["layout"]["xaxis"]["title"] == {"text": "step"}


def test_a_number_that_is_not_finite_is_a_gap(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    rows = [{**r, "loss": "NaN"} if r["kind"] == "train" and r["step"] == 2 else r for r in learnt]
    line = charts(read_run(make_run(rows)))[0].figure["data"][0]
    assert line["y"][1] is None
    assert None not in line["y"][2:]


def test_long_curves_keep_their_spikes() -> None:
    points = [(i, 1.0) for i in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[77_777] = (77_777, math.nan)
    thin = _thinned(points)
    assert len(thin) <= MOST_POINTS + 2
    assert (54_321, 99.0) in thin
    assert any(math.isnan(y) for _, y in thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_smoothing_stays_between_the_least_and_the_greatest(values: list[float]) -> None:
    smooth = _smoothed(values)
    slack = 1e-6 * (1 + max(abs(v) for v in values) * len(values))
    assert len(smooth) == len(values)
    assert all(min(values) - slack <= v <= max(values) + slack for v in smooth)


def test_what_of_a_model_is_trained() -> None:
    assert parameters({"parameters": 1000}) == "1.00 K parameters, all trained"
    assert parameters({"parameters": 1000, "trained": 1000}) == "1.00 K parameters, all trained"
    adapted = parameters({"parameters": 1000, "trained": 10})
    assert adapted == "1.00 K parameters, frozen; 10 are trained on top, 1.00% as many"
    for nonsense in ({}, {"parameters": "many"}, {"parameters": 0, "trained": 1}):
        assert parameters(nonsense) == ""


def test_a_short_run_has_a_tick_for_each_step() -> None:
    def ticks(last: int) -> int | None:
        line = {"x": [1, last], "y": [2.0, 1.0]}
        return _figure([line], large=True)["layout"]["xaxis"].get("dtick")

    assert ticks(4) == 1
    assert ticks(400) is None
