"""`trimtab bench compile`: records of compilations, options, measured cells and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import _dynamo as dynamo
from torch._inductor.utils import fresh_cache

from trimtab.facts.compilers import compile_obstacle
from trimtab.facts.errors import DataError, RecipeError
from trimtab.lab.compilation import break_reason, place_of, recompile_reason, record_compilations
from trimtab.lab.compile_data import Compilation, CompileLog, GraphBreak
from trimtab.lab.studies.compile import measure as measuring
from trimtab.lab.studies.compile import subject as subjects
from trimtab.lab.studies.compile.cells import cells
from trimtab.lab.studies.compile.measure import measure
from trimtab.lab.studies.compile.report import sections
from trimtab.lab.studies.compile.results import CompileResult, Length
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement, NotSupported
from trimtab.lab.study_models import named_shape
from trimtab.report.document import Section, Table, Text


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets compiled code and torch's settings, which are global, before and after each test."""
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    duck = torch.fx.experimental._config.use_duck_shape
    with dynamo.config.patch(recompile_limit=dynamo.config.recompile_limit, specialize_float=False):
        yield
    torch.fx.experimental._config.use_duck_shape = duck
    dynamo.reset()


# ---- the record


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print("this breaks the graph")
    return y.cos()


LINE = broken.__code__.co_firstlineno + 2


def outer(x: torch.Tensor) -> torch.Tensor:
    return broken(x) * 2


def test_graph_breaks_have_a_place_and_a_reason() -> None:
    with record_compilations() as recorded:
        torch.compile(outer, backend="eager")(torch.ones(3))
    log = recorded()
    (found,) = log.breaks
    assert found.place == f"tests/lab/test_lab_compile_study.py:{LINE}"
    assert "print" in found.reason
    assert "\n" not in found.reason
    assert found.count >= 1, "met where it is inlined, and where its function is compiled alone"
    assert log.graphs == 3, "before the break, behind it, and the product outside"


def test_recompilations_have_reasons() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    with record_compilations() as recorded:
        for length in (4, 5, 6, 4):
            compiled(torch.ones(length))
        compiled(torch.ones(4, dtype=torch.float64))
    log = recorded()
    assert log.graphs == len(log.compilations) == 4
    first, *again = log.compilations
    assert not first.is_recompilation
    assert log.recompilations == tuple(again)
    assert [one.reason for one in again] == [
        "tensor 'x' size mismatch at index 0. expected 4, actual 5",
        "tensor 'x' size mismatch at index 0. expected 5, actual 6",
        "tensor 'x' dtype mismatch. expected Float, actual Double",
    ]
    assert all(one.seconds > 0 and one.operations == 2 for one in log.compilations)
    assert log.breaks == ()
    assert 0 < log.seconds < 60


def test_a_record_begins_empty_and_ends_with_its_block() -> None:
    with record_compilations() as first:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    with record_compilations() as second:
        pass
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert (first().graphs, second().graphs) == (1, 0)
    assert second().compilations == ()


def test_more_compilations_are_recorded_than_torchs_default() -> None:
    dynamo.utils.set_compilation_metrics_limit(2)
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with record_compilations() as recorded:
        for length in (2, 3, 4, 5):
            compiled(torch.ones(length))
    assert len(recorded().compilations) == 4
    assert dynamo.utils._compilation_metrics.maxlen == dynamo.utils.DEFAULT_COMPILATION_METRICS_LIMIT


def test_reasons_and_places_are_one_short_line() -> None:
    assert recompile_reason(None) == ""
    assert recompile_reason("3/1: L['n'] == 4\n3/0: L['n'] == 3") == "L['n'] == 4"
    assert break_reason("Data-dependent branching") == "Data-dependent branching"
    assert len(break_reason("x" * 999)) == 300
    assert place_of(str(Path.cwd() / "mine.py"), 3) == "mine.py:3"
    assert place_of("/elsewhere/other.py", None) == "/elsewhere/other.py:None"


# ---- options


def test_defaults_compare_regions_and_the_whole_model() -> None:
    found = [cell.settings for cell in cells(device="cuda")]
    assert [(one["size"], one["method"], one["scope"], one["shapes"]) for one in found] == [
        ("small", method, *rest)
        for method in ("full", "qlora")
        for rest in (("regions", "dynamic"), ("regions", "static"), ("whole", "auto"))
    ]
    assert {one["precision"] for one in found} == {"bf16"}
    assert all(cell.fresh for cell in cells(device="cpu"))


def test_a_recipe_determines_method_and_precision(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = "model: Qwen/Qwen3-0.6B\ndata: {train: my-texts}\nload_in_4bit: true\nlora: {r: 8}\n"
    recipe.write_text(text)
    one, *_ = cells(device="cpu", sizes=[str(recipe)], scopes=["regions"])
    assert one.settings["method"] is None
    assert one.settings["precision"] is None
    prepared = subjects.prepare_random(dict(one.settings), named_shape(str(recipe)))
    assert prepared.recipe.lora.r == 8
    assert prepared.resolved.compile.enabled is False
    recipe.write_text(text.replace("r: 8", "r: 4"))
    other, *_ = cells(device="cpu", sizes=[str(recipe)], scopes=["regions"])
    assert other.key != one.key, "another recipe is another cell"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": ["smal"]}, "did you mean small"),
        ({"methods": ["lora"]}, "did you mean qlora"),
        ({"scopes": ["region"]}, "did you mean regions"),
        ({"shapes": ["dynamics"]}, "did you mean dynamic"),
        ({"backend": "inductr"}, "did you mean inductor"),
        ({"precision": "int8"}, "choose from fp32, bf16, fp16"),
        ({"lengths": [1]}, "use at least 2"),
        ({"lengths": [65537]}, "use at most 65536"),
        ({"batch": 0}, "use at least 1"),
        ({"steps": 0}, "use at least 1"),
        ({"scopes": ["regions"], "shapes": ["auto"]}, "use --shapes dynamic or --scopes whole"),
    ],
)
def test_impossible_options_are_rejected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        cells(device="cpu", **options)


# ---- cells, traced and not generated


def traced(method: str, scope: str, shapes: str, lengths: list[int]) -> CompileResult:
    (cell,) = cells(
        device="cpu", sizes=["tiny"], methods=[method], scopes=[scope], shapes=[shapes], lengths=lengths,
        backend="eager", steps=1,
    )  # fmt: skip
    return CompileResult.from_dict(json.loads(json.dumps(measure(dict(cell.settings)))))


def test_blocks_of_a_qlora_model_are_one_program_for_all_lengths() -> None:
    found = traced("qlora", "regions", "dynamic", [16, 24, 9, 32, 64])
    assert found.cold.breaks == ()
    assert found.cold.graphs == 1
    assert found.loss_difference == found.gradient_difference == 0.0
    (only,) = found.cold.compilations
    assert only.place.startswith("trimtab/model/parts.py:")
    assert [one.tokens for one in found.lengths] == [16, 24, 9, 32, 64]
    assert found.lengths[0].first_seconds > found.lengths[1].first_seconds
    assert found.eager_ms > 0 < found.compiled_ms
    assert found.warm is None


def test_the_whole_model_is_compiled_for_each_length() -> None:
    found = traced("full", "whole", "static", [16, 24])
    assert found.cold.breaks == ()
    assert found.cold.graphs == 2
    (again,) = found.cold.recompilations
    assert "size mismatch at index 1. expected 16, actual 24" in again.reason
    assert again.function == "loss"
    assert found.loss_difference == 0.0


def test_without_a_compiler_the_error_names_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "compile_obstacle", lambda kind, capability: "there is no C++ compiler")
    (cell,) = cells(device="cpu", sizes=["tiny"], methods=["full"], scopes=["whole"])
    with pytest.raises(NotSupported, match=r"no C\+\+ compiler; --backend aot_eager .* without a compiler"):
        measure(dict(cell.settings))


@pytest.mark.slow
@pytest.mark.skipif(compile_obstacle("cpu") is not None, reason="there is no C++ compiler")
def test_code_from_the_cache_is_counted() -> None:
    with fresh_cache():
        found = []
        for _ in range(2):
            with record_compilations() as recorded:
                torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
            found.append(recorded())
    cold, warm = found
    assert (cold.graphs, cold.cached, warm.graphs, warm.cached) == (1, 0, 1, 1)
    assert warm.seconds < cold.seconds


def test_a_second_process_compiles_with_the_first_ones_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process is a fake that answers its order like a worker."""
    orders: list[dict[str, Any]] = []

    def run(words: list[str], *, input: str, **_: Any) -> SimpleNamespace:
        orders.append(json.loads(input))
        assert words[1:] == ["-m", "trimtab.lab.worker", "cpu"]
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"], "inherited"
        return SimpleNamespace(stdout=json.dumps(answer) + "\n")

    monkeypatch.setattr(measuring.subprocess, "run", run)
    log = CompileLog(1, 2.0, (), (), cached=2)
    answer: dict[str, Any] = {"outcome": "measured", "result": log.to_dict(), "message": ""}
    settings = {"device": "cpu", "size": "tiny"}
    with fresh_cache():
        assert measuring._warm(settings) == log
        assert orders == [{"measure": measuring.WARM, "settings": settings}]
        answer = {"outcome": "failed", "result": {}, "message": "the reason"}
        with pytest.raises(RuntimeError, match="with a warm cache: the reason"):
            measuring._warm(settings)


def test_the_second_process_compiles_the_same_programs() -> None:
    (cell,) = cells(
        device="cpu", sizes=["tiny"], methods=["full"], scopes=["regions"], shapes=["static"], lengths=[16, 24],
        backend="eager",
    )  # fmt: skip
    log = CompileLog.from_dict(measuring.measure_warm(dict(cell.settings)))
    assert (log.graphs, len(log.recompilations)) == (2, 1)


# ---- reports

MACHINE = Machine("a GPU", {"torch": "2.13.0"})


def measurement(
    cell: Cell, result: dict[str, Any], outcome: CellOutcome = CellOutcome.MEASURED
) -> Measurement:
    message = "" if outcome is CellOutcome.MEASURED else "because"
    return Measurement(cell, outcome, result, message, 1.0, MACHINE, "abc", "2026-01-01T00:00:00")


def text_of(section: Section) -> str:
    return "\n".join(block.text for block in section.blocks if isinstance(block, Text))


def rows_of(section: Section) -> tuple[tuple[str, ...], ...]:
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    return table.rows


def result(compiled_ms: float = 20.0, **changes: Any) -> CompileResult:
    once = Compilation("forward", "a.py:1", "", 9.0, 40)
    again = [Compilation("forward", "a.py:1", reason, 1.0, 40) for reason in ("size", "size", "dtype")]
    breaks = (GraphBreak("b.py:2", "print", 3),)
    cold = CompileLog(31, 12.0, breaks, (once, *again))
    lengths = tuple(Length(tokens, 1e-6, 2e-6, 3.0) for tokens in (128, 64))
    warm = CompileLog(31, 3.0, (), (), cached=2)
    return CompileResult(cold, lengths, 128, 30.0, compiled_ms, **{"warm": warm, **changes})


def one_cell(**options: Any) -> Cell:
    asked = {"methods": ["qlora"], "scopes": ["regions"], "shapes": ["dynamic"], **options}
    (cell,) = cells(device="cuda", **asked)
    return cell


def test_the_report_has_breaks_reasons_seconds_and_gain() -> None:
    found = {one.title: one for one in sections([measurement(one_cell(), result().to_dict())])}
    name = "small qlora, regions, dynamic"
    assert rows_of(found["Graph breaks, programs and agreement"]) == (
        (name, "1", "31", "3", "2", "1.0e-06", "2.0e-06"),
    )
    assert f"More than 30 programs are needed by: {name}" in text_of(
        found["Graph breaks, programs and agreement"]
    )
    assert rows_of(found["Where graphs break"]) == ((name, "b.py:2", "print", "3"),)
    assert rows_of(found["Recompilations and their reasons"]) == (
        (name, "forward (a.py:1)", "size", "2", "2.0"),
        (name, "forward (a.py:1)", "dtype", "1", "1.0"),
    )
    assert rows_of(found["Seconds of compilation"]) == ((name, "31", "12.0", "3.0", "75 %", "2"),)
    gain = rows_of(found["What compiling gains"])
    assert gain == ((name, "128", "30.0", "20.0", "1.50 ×", "1,200", "300"),)


def test_a_slower_step_never_breaks_even() -> None:
    found = sections([measurement(one_cell(), result(compiled_ms=40.0).to_dict())])
    assert rows_of(found[-1])[0][-2:] == ("never", "never")


def test_tracing_alone_has_no_seconds_and_no_gain() -> None:
    cell = one_cell(backend="aot_eager")
    titles = [one.title for one in sections([measurement(cell, result(warm=None).to_dict())])]
    assert "What compiling gains" not in titles
    assert "Seconds of compilation" not in titles


def test_a_report_without_recompilations_says_so() -> None:
    clean = CompileResult(CompileLog(1, 1.0, (), ()), (Length(8, 0, 0, 1.0),), 8, 1.0, 1.0)
    found = {one.title: one for one in sections([measurement(one_cell(), clean.to_dict())])}
    assert text_of(found["Where graphs break"]) == "No graph breaks in any cell."
    assert text_of(found["Recompilations and their reasons"]) == "No recompilation in any cell."
    assert rows_of(found["What compiling gains"])[0][-2:] == ("never", "–")


def test_many_reasons_are_counted() -> None:
    again = tuple(Compilation("f", "a.py:1", f"reason {i}", 1.0, 1) for i in range(15))
    log = CompileLog(15, 1.0, (), again)
    (section,) = [
        one
        for one in sections([measurement(one_cell(), CompileResult(log, (), 8, 1.0, 1.0).to_dict())])
        if one.title.startswith("Recompilations")
    ]
    assert rows_of(section)[-1][1] == "3 more reasons"


def test_cells_that_were_not_measured_are_listed() -> None:
    (alone,) = sections([measurement(one_cell(), {}, CellOutcome.NOT_SUPPORTED)])
    assert rows_of(alone) == (("small qlora, regions, dynamic", "not supported", "because"),)


def test_damaged_results_are_rejected() -> None:
    for damaged in (
        {},
        {**result().to_dict(), "cold": {}},
        {**result().to_dict(), "lengths": [{"tokens": 1}]},
    ):
        with pytest.raises(DataError, match="damaged"):
            sections([measurement(one_cell(), damaged)])
