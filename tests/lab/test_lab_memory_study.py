"""`trimtab bench memory`: cells from options, measured cells, and a report that is correct for any data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.main import main
from trimtab.facts.errors import DataError, RecipeError
from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory_blocks import AttributedTimeline, MemoryBlock, PhaseSpan, Role
from trimtab.lab.memory_summary import MemorySummary, find_size, group_allocations, summarize
from trimtab.lab.reporting import build_report
from trimtab.lab.step_settings import Kernels, Loss, StepSettings
from trimtab.lab.studies import find_study
from trimtab.lab.studies.memory.cells import Options, cells
from trimtab.lab.studies.memory.measure import measure
from trimtab.lab.studies.memory.results import Allocator, MemoryResult, ResidualStream
from trimtab.lab.studies.memory.settings import MeasuredPass, MemorySettings
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.report.document import LineChart, Section, StackChart, Table, Text
from trimtab.report.document_markdown import markdown

CONTEXT, BATCH = 32, 2


def settings(part: MeasuredPass, **more: Any) -> dict[str, Any]:
    return MemorySettings(StepSettings("tiny", CONTEXT, BATCH, **more), part).to_dict()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return {
        "forward": measure(settings(MeasuredPass.FORWARD)),
        "full": measure(settings(MeasuredPass.FULL)),
        "fast": measure(settings(MeasuredPass.FULL, kernels=Kernels.FAST, loss=Loss.CROSS_ENTROPY)),
    }


def test_a_full_step_has_more_than_a_forward_pass(results: dict[str, dict[str, Any]]) -> None:
    forward, full = (MemoryResult.from_dict(results[name]) for name in ("forward", "full"))
    weights = 4 * forward.parameters
    assert forward.memory.buckets[TensorKind.WEIGHTS.value] == weights
    assert forward.memory.buckets[TensorKind.OPTIMIZER.value] == 0, "inference has no optimizer"
    assert full.memory.buckets[TensorKind.OPTIMIZER.value] == 2 * weights
    assert full.measured_peak > forward.measured_peak
    for one in (forward, full):
        assert abs(one.memory.peak_bytes - one.measured_peak) <= 64, "recorded and not recorded"
        assert sum(one.memory.buckets.values()) == one.memory.peak_bytes
        drawn = one.memory.timeline
        totals = [sum(values) for values in zip(*drawn.series.values(), strict=True)]
        assert max(totals) == one.memory.peak_bytes, "the peak is drawn"
        assert len(drawn.events) == len(drawn.titles) == len(totals)
    assert full.allocator is None
    assert json.loads(json.dumps(results["full"])) == json.loads(json.dumps(full.to_dict()))


def test_the_residual_stream_is_found(results: dict[str, dict[str, Any]]) -> None:
    for name in ("forward", "full"):
        stream = MemoryResult.from_dict(results[name]).residual
        assert stream.nbytes == BATCH * CONTEXT * 64 * 4
        assert stream.own == 1 + 2 * stream.layers == 5
        assert stream.count > stream.own


def test_the_plan_predicts_what_training_runs(results: dict[str, dict[str, Any]]) -> None:
    fast = MemoryResult.from_dict(results["fast"])
    assert fast.predicted_peak == pytest.approx(fast.measured_peak, rel=0.01)
    assert results["full"]["predicted_peak"] is None, "the sum of the logits is nothing that is trained"


def test_snapshots_are_written_on_request(tmp_path: Path) -> None:
    (cell,) = cells(Options(["tiny"], [16], ["fp32"], ["forward"], batch=1, snapshots=tmp_path / "here"))
    result = measure(dict(cell.settings))
    [file] = (tmp_path / "here").iterdir()
    assert file.name == "tiny-16-fp32-forward.json"
    blocks = json.loads(file.read_text())["blocks"]
    weights = sum(one["bytes"] for one in blocks if one["bucket"] == "weights")
    assert weights == result["memory"]["buckets"]["weights"]


def test_cells_of_options() -> None:
    found = cells(Options(["tiny", "small"], [128, 256]))
    assert len(found) == 2 * 2 * 2 * 2
    assert [cell.settings["size"] for cell in found[:8]] == ["tiny"] * 8
    assert {cell.settings["precision"] for cell in found} == {"fp32", "bf16"}
    assert MemorySettings.from_dict(found[0].settings).to_dict() == found[0].settings
    assert {cell.settings["size"] for cell in cells()} == {"small"}, "on a CPU"
    assert {cell.settings["size"] for cell in cells(device="cuda")} > {"small", "2.7B"}
    assert len({cell.key for cell in found}) == len(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(sizes=["smal"]), "did you mean small"),
        (Options(["tiny"], precisions=["bf61"]), "did you mean bf16"),
        (Options(["tiny"], parts=["ful"]), "did you mean full"),
        (Options(["tiny"], contexts=[0]), "use 1 to"),
        (Options(["tiny"], contexts=[10**6]), "use 1 to"),
        (Options(["tiny"], batch=0), "use at least 1"),
        (Options(["tiny"], kernels="quick"), "choose from reference, fast"),
        (Options(["tiny"], loss="cross entropy"), "did you mean cross_entropy"),
    ],
)
def test_invalid_options_are_rejected(options: Options, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        cells(options)


def test_the_full_step_is_called_full_as_in_bench_step() -> None:
    chosen = cells(Options(["tiny"], contexts=[8], precisions=["fp32"], parts=["full"]))
    assert [cell.settings["pass"] for cell in chosen] == [MeasuredPass.FULL.value]


def block(nbytes: int, start: int | None = None, end: int | None = None, **more: Any) -> MemoryBlock:
    role = more.pop("role", Role(TensorKind.ACTIVATIONS, MemoryPart.ATTENTION))
    return MemoryBlock(nbytes, role, start=start, end=end, phase=RunPhase.FORWARD, **more)


def test_a_drawn_timeline_keeps_the_peak_and_few_points() -> None:
    """A thousand blocks, and one that is large for a moment."""
    many = [block(10, start=2 * i, end=2 * i + 1) for i in range(1000)]
    peak = block(5000, start=2000, end=2001, module="model.layers.3.mlp")
    timeline = AttributedTimeline((*many, peak), (PhaseSpan(RunPhase.FORWARD, 0, 2002),), num_events=2002)
    found = summarize(timeline, points=50)
    assert found.peak_bytes == 5000
    assert len(found.timeline.events) <= 50
    assert max(found.timeline.series["attention"]) == 5000
    assert "forward: model.layers.3.mlp" in found.timeline.titles
    assert found.timeline.end == 2003


def test_small_blocks_are_not_on_the_axis() -> None:
    """They count in the levels: the peak is where a small block is added to a large one."""
    large, next_one = block(100_000, start=0, end=1002), block(50_000, start=1003, end=1004)
    small = [block(8, start=2 + i, name="tiny") for i in range(1000)]
    spans = (PhaseSpan(RunPhase.FORWARD, 0, 500), PhaseSpan(RunPhase.BACKWARD, 500, 1005))
    found = summarize(AttributedTimeline((large, next_one, *small), spans, num_events=1005)).timeline
    assert found.events == (0, 1, 2, 3, 4)
    assert found.series["attention"] == (0, 100_000 + 8000, 8000, 58_000, 8000)
    assert [(span.start, span.end) for span in found.phases] == [(0, 1), (1, 4)]
    assert found.least == 54


def test_equal_blocks_of_layers_are_one_row() -> None:
    layers = [
        block(8, i, name="mm [2]", module=f"model.layers.{i}.mlp", line="a.py:3 (f)") for i in range(12)
    ]
    found = group_allocations([*layers, block(16, 12, name="other"), block(10**6)])
    assert [(one.count, one.total, one.module) for one in found] == [
        (12, 96, "model.layers.*.mlp"),
        (1, 16, ""),
    ]


def test_sizes_are_compared_with_tensors_first() -> None:
    """A GPU's allocator may allocate more bytes than a tensor needs."""
    tensor = block(1024, 0, tensor_bytes=1000, module="a")
    larger = block(1024, 1, tensor_bytes=1024, module="b")
    unknown = block(1024, 2, module="c")
    timeline = AttributedTimeline((tensor, larger, unknown), (), num_events=3)
    assert [one.module for one in find_size(timeline, 1000)] == ["a", "c"]


MACHINE = Machine("a GPU", {"torch": "2.13.0"})


def measurement(
    result: dict[str, Any], outcome: CellOutcome = CellOutcome.MEASURED, message: str = "", **changes: Any
) -> Measurement:
    own = {**settings(MeasuredPass.FULL), **changes}
    return Measurement(
        Cell("memory", own), outcome, result, message, 1.0, MACHINE, "abc", "2026-01-01T00:00:00"
    )


def blocks_of(found: list[Section], kind: type) -> list[Any]:
    return [one for section in found for one in section.blocks if isinstance(one, kind)]


def test_the_report_shows_every_outcome(results: dict[str, dict[str, Any]]) -> None:
    measured = [
        measurement(results["forward"], **{"pass": "forward"}),
        measurement(results["full"]),
        measurement({}, CellOutcome.OUT_OF_MEMORY, "no memory", context=4096),
        measurement({}, CellOutcome.NOT_SUPPORTED, "no bf16 here", precision="bf16"),
    ]
    found = find_study("memory").sections(measured)
    assert [section.title for section in found] == [
        "Peak memory by context",
        "What is in memory at the peak",
        "Memory over time",
        "The largest allocations",
        "The residual stream",
    ]
    _, step = (one for one in blocks_of(found, Table) if one.title.startswith("Peak of a "))
    assert step.head == ("model", "precision", "32 tokens", "4096 tokens")
    assert [row[2:] for row in step.rows] == [
        (step.rows[0][2], "out of memory"),
        ("not supported", "–"),
    ]
    [chart] = blocks_of(found, LineChart)
    assert chart.id == "memory-peak-full-step"
    assert {series.name: len(series.points) for series in chart.series} == {"tiny, fp32": 2, "tiny, bf16": 1}
    assert chart.series[0].points[1][1] is None, "a gap where memory ran out"
    stacks = blocks_of(found, StackChart)
    assert len({chart.id for chart in stacks}) == len(stacks) == 2
    for stack in stacks:
        assert all(len(band.values) == len(stack.x) == len(stack.titles) for band in stack.bands)
        assert list(stack.x) == sorted(stack.x)
        assert stack.phases[0].start < stack.phases[-1].end <= stack.end
    assert "no bf16 here" in " ".join(text.text for text in blocks_of(found, Text))
    assert "2 × 32 × 64 × 4" in markdown(build_report(measured, "trimtab bench memory"))


def test_the_report_if_every_cell_failed() -> None:
    found = find_study("memory").sections([measurement({}, CellOutcome.OUT_OF_MEMORY, "no memory")])
    assert [section.title for section in found] == ["Peak memory by context"]
    assert blocks_of(found, Table)[0].rows == (("tiny", "fp32", "out of memory"),)


def test_the_report_of_a_gpu_has_its_allocator(results: dict[str, dict[str, Any]]) -> None:
    result = MemoryResult.from_dict(results["fast"])
    allocator = Allocator(reserved_peak=result.measured_peak + 2**20, segments=7, largest_free_block=512)
    with_it = {**result.to_dict(), "allocator": allocator.__dict__}
    found = find_study("memory").sections([measurement(with_it, kernels="fast", loss="cross_entropy")])
    assert found[-1].title == "The allocator"
    assert blocks_of(found[-1:], Table)[0].rows[0][3:5] == ("1.00 MiB", "7")
    [buckets] = blocks_of(found[1:2], Table)
    assert buckets.head[-2:] == ("predicted", "error")


def test_a_difference_between_the_runs_is_reported(results: dict[str, dict[str, Any]]) -> None:
    changed = {**results["full"], "measured_peak": results["full"]["measured_peak"] - 2**22}
    found = find_study("memory").sections([measurement(changed)])
    assert any("peaks 4.00 MiB above" in text.text for text in blocks_of(found, Text))


def test_damaged_records_are_rejected(results: dict[str, dict[str, Any]]) -> None:
    for damaged in ({}, {**results["full"], "memory": {"peak_bytes": 1}}, {**results["full"], "more": 1}):
        with pytest.raises(DataError, match="damaged"):
            MemoryResult.from_dict(damaged)
    with pytest.raises(DataError, match="damaged"):
        MemorySummary.from_dict({**results["full"]["memory"], "timeline": []})


def test_five_mebibytes_of_the_largest_model() -> None:
    assert ResidualStream(4, 128, 2560, 4, 32, ()).nbytes == 5 * 2**20
    assert ResidualStream(4, 1024, 2560, 4, 32, ()).nbytes == 40 * 2**20


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sizes", "tiny", "--contexts", "16", "--precisions", "fp32", "--parts", "forward"]
    assert main(["bench", "memory", *words, "--device", "cpu", "--out", str(tmp_path / "lab")]) == 0
    said = capsys.readouterr()
    assert "tiny, 16 tokens, fp32, forward: the peak of" in said.out
    assert "[1/1] memory tiny 16 4 fp32 forward" in said.err
    assert len((tmp_path / "lab" / "records.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "lab" / "report.md").read_text().startswith("# Memory of the study models")
    assert main(["bench", "memory", *words, "--device", "gpu"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("part", list(MeasuredPass))
def test_a_cell_on_a_gpu(part: MeasuredPass, tmp_path: Path) -> None:
    step = StepSettings("tiny", CONTEXT, BATCH, kernels=Kernels.FAST, loss=Loss.CROSS_ENTROPY, device="cuda")
    chosen = MemorySettings(step, part, snapshots=str(tmp_path))
    result = MemoryResult.from_dict(measure(chosen.to_dict()))
    assert result.memory.peak_bytes == pytest.approx(result.measured_peak, abs=4096), "max_memory_allocated"
    assert result.allocator is not None
    assert result.allocator.reserved_peak >= result.measured_peak
    assert result.residual.own == 1 + 2 * result.residual.layers
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".pickle"}
