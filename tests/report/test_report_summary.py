"""Improvements, regressions and unchanged results, and the contents of the curves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimtab.report import read_run
from trimtab.report.buckets import BUCKETS, bucket_bar
from trimtab.report.charts import MAX_POINTS, Chart, Line, _smoothed, charts, thin_points
from trimtab.report.drawing import draw, ticks
from trimtab.report.progress import Training, sparkline
from trimtab.report.summary import memory_basis, memory_rows, memory_verdict, parameters, samples, speed
from trimtab.report.verdicts import OTHER_ITEMS, MeasuredChange, changes, first_label, verdict

MakeRun = Callable[..., Path]


@pytest.mark.parametrize("unit", ["loss", "share"])
@pytest.mark.parametrize(
    ("after", "outcome"), [(1.9, "untested"), (2.1, "untested"), (math.nan, "worse"), (math.inf, "worse")]
)
def test_without_a_test_only_a_nonfinite_loss_is_worse(unit: str, after: float, outcome: str) -> None:
    assert MeasuredChange("x", 2.0, after, unit).outcome == outcome


def test_the_probe_has_a_total(make_run: MakeRun) -> None:
    def record(step: int, first: float, second: float) -> dict[str, Any]:
        return {
            "kind": "probe",
            "step": step,
            "scores": {"a": first, "b": second},
            "items": {"a": 10, "b": 30},
        }

    rows = changes(read_run(make_run([record(0, 0.5, 0.5), record(9, 1.0, 0.9)])))
    assert [row.name for row in rows] == ["probe: all", "probe: a", "probe: b"]
    assert rows[0].text() == "20 of 40 → 37 of 40 (+42.5 points)"


def test_changes_are_formatted() -> None:
    assert MeasuredChange("x", 2.0, 1.5, "loss").text() == "2.000 → 1.500 (−0.500)"
    assert MeasuredChange("x", 0.5, 0.75, "share").text() == "50% → 75% (+25 points)"
    assert MeasuredChange("x", 0.501, 0.504, "share").text() == "50% → 50% (±0 points)"
    assert (
        MeasuredChange("x", 186 / 220, 190 / 220, "share", items=220).text()
        == "186 of 220 → 190 of 220 (+1.8 points)"
    )
    assert (
        MeasuredChange("x", 16 / 24, 15 / 24, "share", items=24).text() == "16 of 24 → 15 of 24 (−4.2 points)"
    )
    assert MeasuredChange("x", 2.0, math.nan, "loss").text() == "2.000 → nan (—)"


def test_the_verdict_of_a_run_with_improvements_and_regressions(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    rows = changes(read_run(make_run(learnt)))
    found = verdict(rows)
    assert [c.name for c in found.gained] == [
        "domain loss",
        "exact answers",
        "probe: all",
        "probe: arithmetic",
    ]
    assert [c.name for c in found.lost] == ["general loss"]
    assert [c.name for c in found.unchanged] == ["probe: grammar", "probe: transitivity"]
    assert found.untested == []
    assert [c.evidence() for c in found.lost] == ["± 0.005, 60 documents"]
    assert found.gained[1].text() == "0 of 90 → 54 of 90 (+60 points)"
    assert found.gained[1].evidence() == "+54 −0, p < 0.001"
    assert "Holm's correction for 7 comparisons" in found.explanation()
    assert first_label(rows) == "before"


def test_metrics_without_results_by_item_claim_no_change(
    make_run: MakeRun, learnt_without_items: list[dict[str, Any]]
) -> None:
    found = verdict(changes(read_run(make_run(learnt_without_items))))
    assert (found.gained, found.lost, found.unchanged) == ([], [], [])
    assert [c.name for c in found.untested][:3] == ["domain loss", "general loss", "exact answers"]
    assert all(c.evidence() == "" for c in found.untested)
    assert found.explanation() == (
        "Not tested, so no change is claimed: metrics.jsonl contains no results by item; older versions "
        "did not write them."
    )


def test_different_items_are_not_compared(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    """For example after a resume with another number of sequences, or with problems of a newer version."""
    records = []
    for record in learnt:
        changed = dict(record)
        if record["step"] == 300 and record["kind"] == "eval":
            changed["units"] = {**record["units"], "tokens": [151] * 60}
        if record["step"] == 300 and record["kind"] in ("answers", "probe"):
            changed["digest"] = "others"
        records.append(changed)
    found = verdict(changes(read_run(make_run(records))))
    assert (found.gained, found.lost, found.unchanged) == ([], [], [])
    assert {c.untested for c in found.untested} == {OTHER_ITEMS}
    assert "different items were measured" in found.explanation()


def test_one_part_may_be_tested_and_another_not(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    few = {"unit": "piece", "losses": [3.0, 2.0], "tokens": [9, 9]}
    records = [{**r, "units": few} if r.get("name") == "general" else r for r in learnt]
    found = verdict(changes(read_run(make_run(records))))
    assert [c.name for c in found.untested] == ["general loss"]
    assert "general loss (fewer than 6 pieces of documents)" in found.explanation()
    assert "for 6 comparisons" in found.explanation()


def test_single_measurements_are_not_compared(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run([r for r in learnt if r.get("step", 0) == 0]))
    assert changes(data) == []
    assert verdict([]).explanation() == ""
    assert all(s.after is None for s in samples(data))
    assert speed(data) == {}
    assert memory_verdict(data) is None


def test_a_first_measurement_after_training_started_has_its_step(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    rows = changes(read_run(make_run([r for r in learnt if r.get("step", 0) > 0])))
    assert first_label(rows) == "step 50"


def test_memory_predicted_and_measured(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
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
        "Peak memory: 516.0 MiB predicted, 519.0 MiB measured, 0.6% above the prediction."
    )
    basis = memory_basis(data)
    assert basis is not None
    assert "tensor allocations" in basis
    data.choices["device"] = "cuda"
    assert "allocator" in str(memory_basis(data))


@given(st.dictionaries(st.sampled_from(BUCKETS), st.integers(0, 2**50)), st.integers(1, 100))
def test_a_bar_has_the_requested_width(buckets: dict[str, int], width: int) -> None:
    whole = sum(buckets.values())
    text = bucket_bar(buckets, whole).text(width).plain
    assert len(text) == width
    assert text == ("█" * width if whole else "·" * width)
    assert len(bucket_bar(buckets, 3 * whole).text(width).plain) == width


def test_a_bar_shows_small_values() -> None:
    assert bucket_bar({"weights": 1}, 10_000).text(10).plain == "▏·········"


@given(st.lists(st.floats(), max_size=200), st.integers(0, 40))
def test_a_sparkline_of_any_losses(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([3.0, 2.0, math.nan, 1.0], 4) == "█▅ ▁"
    assert sparkline([1.0, 1.0], 4) == "▁▁"


def test_remaining_time_uses_loop_seconds_then_wall_time() -> None:
    state = Training(total=100)
    assert state.left() is None
    state.update({"step": 2, "loss": 1, "tokens_per_second": 1, "seconds": 6, "memory_bytes": 0})
    assert state.left() == 6 / 2 * 98
    assert state.line() == "step   2/100  loss 1.0000  1 tokens/s  4 min 54 s left"
    state.update({"step": 2, "loss": 1, "tokens_per_second": 0.043, "seconds": 6, "memory_bytes": 0})
    assert "0.043 tokens/s" in state.line()


def test_curves(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    found = {c.id: c for c in charts(read_run(make_run(learnt)))}
    assert list(found) == ["loss", "lr", "norm", "rate", "answers"]
    loss = found["loss"]
    assert [line.name for line in loss.lines] == [
        "training, each step",
        "training, smoothed",
        "held-out: domain",
        "held-out: general",
    ]
    assert [x for x, _ in loss.lines[2].points] == [0, 50, 100, 150, 200, 250, 300]


def test_a_drawn_chart_is_inside_its_frame(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    for chart in charts(read_run(make_run(learnt))):
        drawing = draw(chart)
        assert drawing is not None
        for stroke in drawing.strokes:
            numbers = [tuple(map(int, p.split(","))) for p in re.findall(r"-?\d+,-?\d+", stroke.path)]
            assert len(numbers) > 1
            assert all(0 <= x <= 2000 and 0 <= y <= 1000 for x, y in numbers)
        assert all(0 <= tick.percent <= 100 for tick in (*drawing.x_ticks, *drawing.y_ticks))
        assert len(drawing.y_ticks) >= 2
        assert len({tick.label for tick in drawing.x_ticks}) == len(drawing.x_ticks)
        assert len({tick.label for tick in drawing.y_ticks}) == len(drawing.y_ticks)
    assert drawing.strokes[0].last == "60"
    assert drawing.figure["lines"][0]["y"][-1] == 60


@given(st.floats(-1e300, 1e300), st.floats(1e-9, 1e300), st.integers(1, 10))
def test_ticks_of_any_range_are_few_and_inside(low: float, width: float, most: int) -> None:
    high = low + width
    if not low < high:
        return
    found = ticks(low, high, most)
    slack = 1e-6 * max(abs(low), abs(high))
    assert len(found) <= most + 1
    assert all(low - slack <= v <= high + slack for v in found)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats()), min_size=1, max_size=30))
@example([(0, 1.0406e308)])
def test_any_numbers_can_be_drawn(points: list[tuple[int, float]]) -> None:
    points = sorted(points)
    for large in (True, False):
        drawing = draw(Chart("a", "A", [Line("a", "train", points, markers=True)], large=large))
        assert (drawing is None) == (not any(math.isfinite(y) for _, y in points))
        if drawing is not None:
            assert "nan" not in drawing.strokes[0].path
            assert "inf" not in drawing.strokes[0].path


def test_a_nonfinite_number_is_a_gap(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    rows = [{**r, "loss": "NaN"} if r["kind"] == "train" and r["step"] == 20 else r for r in learnt]
    drawing = draw(charts(read_run(make_run(rows)))[0])
    assert drawing is not None
    assert drawing.strokes[0].path.count("M") == 2
    values = drawing.figure["lines"][0]["y"]
    assert values[19] is None
    assert None not in values[20:]


def test_long_curves_keep_their_spikes() -> None:
    points = [(i, 1.0) for i in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[77_777] = (77_777, math.nan)
    thin = thin_points(points)
    assert len(thin) <= MAX_POINTS + 2
    assert (54_321, 99.0) in thin
    assert any(math.isnan(y) for _, y in thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_long_curves_keep_their_last_point() -> None:
    points = [(i, float(i % 7)) for i in range(10_000)]
    points[-1] = (9_999, 3.5)  # neither the minimum nor the maximum of its interval
    assert thin_points(points)[-1] == (9_999, 3.5)


def test_the_smoothed_curve_ends_with_a_mean() -> None:
    values = [1.0] * 99 + [5.0]
    assert _smoothed(values)[-1] == pytest.approx(1 + 4 / 3)  # the mean of the last three
    assert _smoothed(values[::-1])[0] == pytest.approx(1 + 4 / 3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_smoothing_is_between_minimum_and_maximum(values: list[float]) -> None:
    smooth = _smoothed(values)
    slack = 1e-6 * (1 + max(abs(v) for v in values) * len(values))
    assert len(smooth) == len(values)
    assert all(min(values) - slack <= v <= max(values) + slack for v in smooth)


def test_trainable_parameters_are_formatted() -> None:
    assert parameters({"parameters": 1000}) == "1.00 K parameters, all trainable"
    assert parameters({"parameters": 1000, "trained": 1000}) == "1.00 K parameters, all trainable"
    adapted = parameters({"parameters": 1000, "trained": 10})
    assert adapted == "1.00 K frozen parameters, 10 trainable (1.00%)"
    for nonsense in ({}, {"parameters": "many"}, {"parameters": 0, "trained": 1}):
        assert parameters(nonsense) == ""


def test_a_short_run_has_a_tick_for_each_step() -> None:
    def labels(last: int) -> list[str]:
        drawing = draw(Chart("a", "A", [Line("a", "train", [(1, 2.0), (last, 1.0)])], large=True))
        assert drawing is not None
        return [tick.label for tick in drawing.x_ticks]

    assert labels(4) == ["1", "2", "3", "4"]
    assert labels(400) == ["50", "100", "150", "200", "250", "300", "350", "400"]
