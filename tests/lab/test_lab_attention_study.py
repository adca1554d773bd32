"""The attention study without measuring: cells and their errors, the formula, comparisons, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.facts.errors import DataError, RecipeError
from trimtab.lab.memory import retained_bytes
from trimtab.lab.samples import CacheState, Samples
from trimtab.lab.studies.attention.cells import Options, cells
from trimtab.lab.studies.attention.crossover import Crossover, SpeedVerdict, compare
from trimtab.lab.studies.attention.formula import before_backward, longest_length, matrix_bytes, minimum_bytes
from trimtab.lab.studies.attention.passes import AttentionRun
from trimtab.lab.studies.attention.report import sections
from trimtab.lab.studies.attention.results import AttentionResult, PassTimes
from trimtab.lab.studies.attention.settings import (
    BACKENDS,
    AttentionSettings,
    Mode,
    Visibility,
    WeightedSumSettings,
)
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.report.document import Document, LineChart, Table
from trimtab.report.document_markdown import markdown

GIB = 2**30
PLAIN, FLASH = "reference", "sdpa_flash"


def asked(device: str = "cpu", memory_bytes: int = 64 * GIB, **options: Any) -> list[AttentionSettings]:
    found = cells(Options(weighted_sum=False, **options), device=device, memory_bytes=memory_bytes)
    return [AttentionSettings.from_dict(json.loads(json.dumps(dict(cell.settings)))) for cell in found]


def test_the_defaults_cover_every_backend_and_are_smaller_on_a_cpu() -> None:
    gpu, cpu = asked("cuda"), asked("cpu")
    for found in (gpu, cpu):
        assert {one.backend for one in found} == set(BACKENDS)
        assert {one.backend for one in found if one.mode is Mode.COMPILED} == {PLAIN}
        assert {one.head_dim for one in found} == {16, 32, 64, 128}
        assert {one.batch for one in found} == {1, 8}
        assert {(one.heads, one.repetitions, one.causal) for one in found} == {(1, 100, True)}
        assert len({Cell("attention", one.to_dict()).key for one in found}) == len(found)
    assert ({one.dtype for one in gpu}, {one.dtype for one in cpu}) == ({"fp32", "bf16"}, {"fp32"})
    assert (max(one.length for one in gpu), max(one.length for one in cpu)) == (65536, 4096)
    assert max(one.length for one in gpu if one.backend == "tiled") == 4096
    assert max(one.length for one in asked("cuda", backends=["tiled"])) == 65536


def test_by_default_only_plain_attention_is_compiled_as_well() -> None:
    def counts(*modes: str) -> tuple[int, int]:
        found = asked(lengths=[256], head_dims=[64], batches=[1], modes=modes)
        compiled = sum(one.mode is Mode.COMPILED for one in found)
        return len(found) - compiled, compiled

    every = len(BACKENDS)
    assert counts() == (every, 1)
    assert counts("eager") == (every, 0)
    assert counts("compiled") == (0, every)
    assert counts("eager", "compiled", "eager") == (every, every)


def test_invalid_options_are_rejected_with_a_hint() -> None:
    with pytest.raises(
        RecipeError, match=r"--backends 'sdpa_flahs' is unknown; did you mean sdpa_flash\? choose from"
    ):
        asked(backends=["sdpa_flahs"])
    with pytest.raises(RecipeError, match="--precisions 'fp8' is unknown"):
        asked(dtypes=["fp8"])
    for wrong in ({"lengths": [0]}, {"head_dims": [-1]}, {"batches": [0]}, {"heads": 0}, {"repetitions": 0}):
        with pytest.raises(RecipeError, match="use at least 1"):
            asked(**wrong)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(RecipeError, match="give a number of seconds above 0"):
            asked(seconds=seconds)
    with pytest.raises(RecipeError, match="--modes 'compile' is unknown; did you mean compiled"):
        asked(modes=["compile"])
    assert asked(dtypes=["bfloat16", "bf16"], lengths=[8, 8])[0].dtype == "bf16", "torch's name, once"


def test_cells_that_cannot_fit_are_predicted_and_every_tries_them() -> None:
    wanted: dict[str, Any] = {"backends": [PLAIN, FLASH], "batches": [8], "head_dims": [64]}
    found = asked("cuda", 40 * GIB, **wanted)
    skipped = [one for one in found if not one.tried]
    assert {(one.dtype, one.backend, one.length, one.mode) for one in skipped} == {
        ("fp32", PLAIN, 65536, Mode.EAGER),  # 128 GiB of probabilities
        ("fp32", PLAIN, 65536, Mode.COMPILED),
        ("bf16", PLAIN, 32768, Mode.EAGER),  # 6 bytes each: 48 GiB
        ("bf16", PLAIN, 65536, Mode.EAGER),
        ("bf16", PLAIN, 65536, Mode.COMPILED),
    }
    assert all(minimum_bytes(one) > 40 * GIB for one in skipped)
    everything = asked("cuda", 40 * GIB, oversized=True, **wanted)
    assert all(one.tried for one in everything)
    tried = [one for one in found if one.tried]
    assert set(tried) < set(everything), "what is measured without --oversized keeps its record"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", [PLAIN, "sdpa_math", FLASH, "tiled"])
def test_the_formula_equals_the_bytes_allocated_on_a_cpu(backend: str, dtype: str) -> None:
    for heads, visibility in ((1, Visibility.CAUSAL), (3, Visibility.FULL)):
        settings = AttentionSettings(
            backend, dtype=dtype, batch=2, heads=heads, head_dim=16, length=96, visibility=visibility
        )
        run = AttentionRun(settings)
        run.forward_backward()
        measured = run.input_bytes + retained_bytes(run.forward, "cpu")
        predicted = before_backward(settings)
        assert predicted is not None
        assert measured == pytest.approx(predicted.total, abs=64), "but for some scalars"
        assert (predicted.quadratic > 0) == (backend in (PLAIN, "sdpa_math"))


def test_the_formula_grows_with_the_square_of_the_length() -> None:
    one = AttentionSettings(PLAIN, length=1024, batch=8, dtype="bf16")
    two = replace(one, length=2048)
    assert before_backward(two).quadratic == 4 * before_backward(one).quadratic
    assert before_backward(one).quadratic == matrix_bytes(one, 6) + 1024**2
    assert before_backward(replace(one, backend=FLASH)).quadratic == 0
    assert before_backward(replace(one, mode=Mode.COMPILED)) is None
    assert minimum_bytes(replace(one, mode=Mode.COMPILED)) < minimum_bytes(one)
    for backend, memory in ((PLAIN, 40 * GIB), (FLASH, GIB), (PLAIN, 1)):
        settings = replace(one, backend=backend)
        longest = longest_length(settings, memory)
        assert (longest == 0) or minimum_bytes(replace(settings, length=longest)) <= memory
        assert minimum_bytes(replace(settings, length=longest + 1)) > memory


def test_the_page_has_the_memory_of_the_formula() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab" / "attention.md").read_text(encoding="utf-8")
    plain = AttentionSettings(PLAIN, batch=8, head_dim=16, length=4096)
    short, long = before_backward(plain), before_backward(replace(plain, length=8192))
    flash = before_backward(replace(plain, backend=FLASH))
    assert f"{short.total / 2**20:.0f} MiB allocated before backward" in page
    assert f"FlashAttention {flash.total / 2**20:.1f} MiB" in page.replace("\n", " ")
    assert f"predicts {long.total / GIB:.2f} GiB before backward" in page.replace("\n  ", " ")


def times(ms: float, spread: float = 0.0) -> PassTimes:
    samples = Samples((ms * (1 - spread), ms, ms * (1 + spread)))
    return PassTimes(samples, samples, CacheState.CLEARED)


def test_a_difference_counts_only_where_the_quartiles_are_apart() -> None:
    assert compare(times(1.0), times(1.1)) is SpeedVerdict.FASTER
    assert compare(times(1.0, 0.2), times(1.1)) is SpeedVerdict.UNCLEAR
    assert compare(times(2.0, 0.2), times(1.1, 0.2)) is SpeedVerdict.SLOWER
    faster, slower, unclear = SpeedVerdict.FASTER, SpeedVerdict.SLOWER, SpeedVerdict.UNCLEAR
    assert Crossover({256: faster, 512: faster}).describe() == "faster at every measured length, from 256 on"
    late = Crossover({256: faster, 512: slower, 1024: unclear, 2048: faster})
    assert late.faster_from == 2048
    assert late.describe() == "faster from 2048 on, slower at 512, no clear difference at 1024, faster at 256"
    assert Crossover({256: faster, 512: slower}).faster_from is None
    assert Crossover({}).describe() == "no length was measured with both"


def measured(
    settings: AttentionSettings,
    ms: float | None,
    outcome: CellOutcome = CellOutcome.MEASURED,
    message: str = "",
    **more: Any,
) -> Measurement:
    result: dict[str, Any] = {}
    if ms is not None:
        predicted = before_backward(settings)
        result = AttentionResult(
            times(ms), predicted.total if predicted else 2**20, 2**30, 40 * GIB,
            **{"compile_seconds": 0.0, "compile_cached": False, **more},
        ).to_dict()  # fmt: skip
    machine = Machine("a GPU", {"torch": "2.13.0"})
    cell = Cell("attention", settings.to_dict())
    return Measurement(cell, outcome, result, message, 1.0, machine, "unknown", "2026-01-01T00:00:00")


def study() -> list[Measurement]:
    """Plain attention against two tiled backends: slower at 256, faster from 512 on, alone from 4096 on."""
    plain = AttentionSettings(PLAIN, dtype="bf16", device="cuda")
    flash, own = replace(plain, backend=FLASH), replace(plain, backend="triton")
    found = []
    for length, plain_ms, flash_ms in ((256, 0.1, 0.2), (512, 0.4, 0.3), (1024, 1.6, 0.5)):
        found.append(measured(replace(plain, length=length), plain_ms))
        found.append(measured(replace(flash, length=length), flash_ms))
        compiled = replace(plain, length=length, mode=Mode.COMPILED)
        found.append(measured(compiled, plain_ms / 2, compile_seconds=3.0))
        wrong = "WrongResult: triton in bf16 is not timed: dq: rms error 1"
        found.append(measured(replace(own, length=length), None, CellOutcome.FAILED, wrong))
    found.append(measured(replace(plain, length=4096), None, CellOutcome.OUT_OF_MEMORY, "CUDA out of memory"))
    found.append(measured(replace(flash, length=4096), 2.0))
    missed = replace(plain, length=65536, memory_bytes=40 * GIB)
    found.append(measured(missed, None, CellOutcome.PREDICTED_OUT_OF_MEMORY, "needs at least 200 GiB"))
    found.append(measured(replace(flash, length=65536), 500.0))
    return found


def page(measurements: Sequence[Measurement]) -> str:
    return markdown(
        Document("Attention", ("a GPU",), tuple(sections(measurements)), "trimtab bench attention")
    )


def table(measurements: Sequence[Measurement], title: str) -> Table:
    blocks = [block for section in sections(measurements) for block in section.blocks]
    return next(block for block in blocks if isinstance(block, Table) and title in block.title)


def test_the_report_has_every_outcome_and_keeps_predicted_apart() -> None:
    found = table(study(), "forward / backward, ms")
    assert found.head == (
        "head dim",
        "length",
        "reference (plain)",
        "reference (plain), compiled",
        "sdpa_flash",
    )
    column = {row[1]: row[2] for row in found.rows}
    assert column == {
        "256": "0.100 / 0.100",
        "512": "0.400 / 0.400",
        "1024": "1.60 / 1.60",
        "4096": "out of memory",
        "65536": "out of memory (predicted)",
    }
    limits = {row[1]: row for row in table(study(), "Lengths that fit").rows}
    assert limits["reference (plain)"][3:6] == ("1024", "from 4096", "from 65536")
    assert limits["sdpa_flash"][3:6] == ("65536", "–", "–")
    text = page(study())
    assert "triton (own) | bf16 " in text
    assert "dq: rms error 1" in text, "a wrong backend is named, without a time"
    assert "exceeds the device's memory: 1 of 16 cells" in text
    assert "The first to run out was reference (plain) at 4096 tokens" in text


def test_the_report_computes_the_crossover_from_the_data() -> None:
    row = table(study(), "speed-up over plain").rows[0]
    assert row[:5] == ("sdpa_flash", "64", "0.50×", "1.33×", "3.20×")
    assert row[5:] == ("plain: out of memory", "plain: out of memory (predicted)", "512")
    text = page(study())
    assert (
        "sdpa_flash, head dim 64: faster from 512 on, slower at 256; runs at 4096, where plain is out of memory; "
        "runs at 65536, where plain is out of memory (predicted)." in text
    )
    slower = [m for m in study() if m.cell.settings["length"] == 256]
    assert "no crossover from 256 to 256: slower at 256" in page(slower)


def test_the_report_compares_compiled_and_eager() -> None:
    row = table(study(), "Compiled against eager").rows[0]
    assert row[4:8] == ("0.100 / 0.100", "0.0500 / 0.0500", "2.00×", "2.00×")
    assert row[-2:] == ("3.0", "30,000"), "3 s, and 0.1 ms saved by each pass"
    assert "Compiling took 3.0 to 3.0 s" in page(study())


def test_the_report_compares_formula_and_measurement() -> None:
    rows = {row[1]: row for row in table(study(), "longest measured length").rows}
    assert rows["reference (plain)"][-2] == rows["sdpa_flash"][-2] == "1.000"
    assert rows["reference (plain)"][-1] == "3.61×", "almost quadratic at 1024 tokens"
    assert rows["sdpa_flash"][-1] == "–", "32768 was not measured"
    assert rows["reference (plain), compiled"][4] == "–"


def test_charts_have_a_curve_for_each_backend_with_gaps() -> None:
    charts = [b for section in sections(study()) for b in section.blocks if isinstance(b, LineChart)]
    assert [chart.id for chart in charts] == [
        "attention-time-bf16-b8-h1-causal-d64",
        "attention-memory-bf16-b8-h1-causal-d64",
    ]
    curves = {series.name: dict(series.points) for series in charts[0].series}
    assert curves["reference (plain)"][512.0] == 0.8
    assert curves["reference (plain)"][4096.0] is None
    assert curves["sdpa_flash"][65536.0] == 1000.0
    assert "triton (own)" not in curves


def test_a_cell_that_was_tried_replaces_its_prediction() -> None:
    tried = replace(AttentionSettings(PLAIN, dtype="bf16", device="cuda"), length=65536)
    for more in ([measured(tried, 900.0)], [measured(tried, None, CellOutcome.OUT_OF_MEMORY)]):
        for order in (study() + more, more + study()):
            assert "out of memory (predicted)" not in page(order)


def test_a_report_without_cells_or_with_failures_only() -> None:
    assert sections([]) == []
    only = [
        measured(AttentionSettings("triton"), None, CellOutcome.NOT_SUPPORTED, "it exists on CUDA GPUs only")
    ]
    assert [section.title for section in sections(only)] == ["What was measured", "Cells without a time"]
    assert "it exists on CUDA GPUs only" in page(only)


def test_the_weighted_sum_has_a_section() -> None:
    machine = study()[0].machine
    rows = [
        Measurement(
            Cell("attention", WeightedSumSettings(impl, "bf16").to_dict()),
            outcome,
            result,
            "",
            1.0,
            machine,
            "c",
            "t",
        )
        for impl, outcome, result in (
            ("reference", CellOutcome.MEASURED, times(0.5).to_dict()),
            ("triton", CellOutcome.NOT_SUPPORTED, {}),
        )
    ]
    found = sections(rows)[-1].blocks[-1]
    assert isinstance(found, Table)
    assert found.rows[0] == ("reference", "bf16", "8192 × 4096", "0.500", "0.500", "134.3")
    assert found.rows[1][3] == "not supported"


def test_damaged_records_are_rejected() -> None:
    good = study()[0]
    broken_result = replace(good, result={"forward": {}})
    broken_settings = replace(good, cell=Cell("attention", {"backend": PLAIN}))
    strange = replace(good, cell=Cell("attention", {**good.cell.settings, "backend": "magic"}))
    for one in (broken_result, broken_settings, strange):
        with pytest.raises(DataError, match="damaged"):
            sections([one])


def test_cells_and_report_import_no_torch() -> None:
    code = (
        "import sys; import trimtab.lab.studies.attention.cells, trimtab.lab.studies.attention.report; "
        "import trimtab.cli.bench_attention; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_charts_contain_only_finite_numbers() -> None:
    run = AttentionRun(AttentionSettings(PLAIN, length=8, batch=1, head_dim=4))
    assert all(torch.isfinite(x).all() for x in run.forward_backward())
