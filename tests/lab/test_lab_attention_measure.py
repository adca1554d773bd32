"""Measured cells of the attention study: on this CPU, and on a GPU if there is one."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.cli.main import main
from trimtab.lab import memory
from trimtab.lab.memory import retained_bytes
from trimtab.lab.studies.attention import measure as measuring
from trimtab.lab.studies.attention.formula import before_backward, minimum_bytes
from trimtab.lab.studies.attention.measure import WrongResult, check_supported, measure, measure_attention
from trimtab.lab.studies.attention.passes import Attend, AttentionRun, build_attention
from trimtab.lab.studies.attention.results import AttentionResult, PassTimes
from trimtab.lab.studies.attention.settings import AttentionSettings, Mode, Visibility, WeightedSumSettings
from trimtab.lab.study import CellOutcome, NotSupported, PredictedOutOfMemory
from trimtab.lab.timing import time_samples
from trimtab.lab.worker import measure_cell as measured_by_a_worker

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "attention.md"
SMALL = AttentionSettings("reference", batch=2, head_dim=8, length=32, repetitions=3, seconds=0.5)


@pytest.mark.parametrize("backend", ["reference", "sdpa_math", "sdpa_flash", "tiled"])
@pytest.mark.parametrize("visibility", list(Visibility))
def test_a_cell_on_a_cpu(backend: str, visibility: Visibility) -> None:
    settings = replace(SMALL, backend=backend, heads=2, visibility=visibility)
    result = AttentionResult.from_dict(json.loads(json.dumps(measure(settings.to_dict()))))
    assert result.times.forward.repetitions == result.times.backward.repetitions == 3
    assert min(*result.times.forward.times_ms, *result.times.backward.times_ms) > 0
    assert result.times.cache.value == "as left"
    predicted = before_backward(settings)
    assert predicted is not None
    assert result.before_backward_bytes == pytest.approx(predicted.total, abs=64)
    assert result.peak_bytes > result.before_backward_bytes
    assert (result.compile_seconds, result.compile_cached) == (0.0, False)


def test_repetitions_end_with_the_time() -> None:
    result = measure_attention(replace(SMALL, repetitions=10**6, seconds=0.02))
    assert 1 <= result.times.forward.repetitions < 10_000


def test_a_compiled_cell_reports_compile_time_separately() -> None:
    settings = replace(SMALL, backend="sdpa_flash", mode=Mode.COMPILED, head_dim=16)
    start = time.perf_counter()
    result = measure_attention(settings)
    assert 0 < result.compile_seconds < time.perf_counter() - start
    eager = before_backward(replace(settings, mode=Mode.EAGER))
    assert eager is not None
    assert result.before_backward_bytes == eager.total, "a single operator is compiled to itself"


def test_backward_time_excludes_the_forward_pass() -> None:
    run = AttentionRun(SMALL)
    attend = run.attend

    def slow(*inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return attend(*inputs)

    run.attend = slow
    forward, backward = (
        time_samples(prepare, device="cpu", repetitions=3, warm_up=1)
        for prepare in (run.prepare_forward, run.prepare_backward)
    )
    assert min(forward.times_ms) > 30
    assert backward.median_ms < 15


def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_per_cent_off(settings: AttentionSettings) -> Attend:
        right = build_attention(settings)
        return right if settings.backend == "reference" else lambda q, k, v: 1.01 * right(q, k, v)

    monkeypatch.setattr(measuring, "build_attention", one_per_cent_off)
    monkeypatch.setattr(measuring, "AttentionRun", None)  # nothing may be timed
    measuring._verify.cache_clear()
    settings = replace(SMALL, backend="sdpa_flash")
    with pytest.raises(WrongResult, match="sdpa_flash in fp32 is not timed: o: rms error"):
        measure_attention(settings)
    answer = measured_by_a_worker("trimtab.lab.studies.attention.measure:measure", settings.to_dict())
    assert answer["outcome"] == CellOutcome.FAILED.value
    assert answer["message"].startswith("WrongResult: ")


def test_modes_without_cpu_support_are_not_supported() -> None:
    for backend, reason in (
        ("triton", "it requires a CUDA GPU"),
        ("sdpa_cudnn", "it requires a CUDA GPU"),
        ("varlen", "it requires a CUDA GPU"),
        ("flex", "no backward on a CPU"),
    ):
        with pytest.raises(NotSupported, match=reason):
            measure_attention(replace(SMALL, backend=backend))
    with pytest.raises(NotSupported, match="unroll"):
        measure_attention(replace(SMALL, backend="tiled", mode=Mode.COMPILED))
    with pytest.raises(NotSupported, match="Triton"):
        measure(WeightedSumSettings("triton").to_dict())


def test_support_depends_on_the_compute_capability() -> None:
    def reason(backend: str, dtype: str, capability: tuple[int, int], triton: bool = True) -> str | None:
        try:
            check_supported(
                replace(SMALL, backend=backend, dtype=dtype, device="cuda", length=1024),
                capability,
                triton=triton,
            )
        except NotSupported as error:
            return str(error)
        return None

    for backend in ("reference", "sdpa_math", "tiled", "sdpa_efficient", "triton"):
        assert reason(backend, "fp32", (9, 0)) is None
    for backend in ("sdpa_flash", "sdpa_cudnn", "varlen"):
        assert reason(backend, "bf16", (9, 0)) is None
        assert reason(backend, "fp32", (9, 0)) == "it supports bf16 and fp16, not fp32"
    assert reason("triton", "bf16", (7, 5)) == "bf16 requires capability 8.0, the device has 7.5"
    assert reason("triton", "fp32", (9, 0), triton=False) == "Triton is not installed"
    full = replace(SMALL, backend="varlen", dtype="bf16", device="cuda", visibility=Visibility.FULL)
    with pytest.raises(NotSupported, match="causal attention only"):
        check_supported(full, (9, 0), triton=True)


def test_a_predicted_cell_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "AttentionRun", None)
    settings = replace(SMALL, length=65536, batch=8, memory_bytes=2**35)
    with pytest.raises(
        PredictedOutOfMemory, match=r"needs at least 132\.1 GiB, and the device has 32\.0 GiB"
    ):
        measure_attention(settings)
    answer = measured_by_a_worker("trimtab.lab.studies.attention.measure:measure", settings.to_dict())
    assert answer["outcome"] == "out of memory (predicted)"
    assert answer["result"] == {}


def test_the_weighted_sum_is_measured() -> None:
    settings = WeightedSumSettings("reference", rows=8, columns=16, repetitions=2)
    found = PassTimes.from_dict(measure(settings.to_dict()))
    assert found.forward.repetitions == found.backward.repetitions == 2


def test_retained_bytes_on_a_gpu_are_those_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, log = iter([100, 356]), []
    cuda = SimpleNamespace(
        synchronize=lambda: log.append("synchronize"),
        memory_allocated=lambda: (log.append("read"), next(levels))[1],
    )
    monkeypatch.setattr(memory, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(memory, "synchronize", lambda device: cuda.synchronize())
    assert retained_bytes(lambda: log.append("run"), "cuda") == 256
    assert log == ["synchronize", "read", "run", "synchronize", "read"]


def test_the_command_measures_reports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("trimtab ")
    )
    words = [*shlex.split(command)[1:], "--device", "cpu", "--out", str(tmp_path / "study")]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "[6/6] attention" in first.err
    assert "fp32, batch 1, 1 head, causal" in first.out
    assert "it requires a CUDA GPU, and the device is cpu" in first.out
    records = [json.loads(line) for line in (tmp_path / "study" / "records.jsonl").read_text().splitlines()]
    outcomes = {(one["settings"]["backend"], one["settings"]["length"]): one["outcome"] for one in records}
    assert outcomes == {
        (backend, length): "not supported" if backend == "triton" else "measured"
        for backend in ("sdpa_flash", "triton", "reference")
        for length in (64, 128)
    }
    assert main([*words, "--json"]) == 0
    again = capsys.readouterr()
    assert [json.loads(line)["time"] for line in again.out.splitlines()] == [one["time"] for one in records]
    assert (tmp_path / "study" / "report.md").read_text().startswith("# Attention: time and memory")
    assert main(["bench", "attention", "--backends", "flash", "--out", str(tmp_path / "other")]) == 2
    assert "--backends 'flash' is unknown; did you mean" in capsys.readouterr().err


def on_a_gpu(backend: str, **changes: Any) -> AttentionResult:
    settings = AttentionSettings(
        backend, dtype="bf16", batch=2, head_dim=64, length=2048, device="cuda", repetitions=20, seconds=1.0
    )
    return measure_attention(replace(settings, **changes))


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_flash_is_linear_and_plain_attention_quadratic() -> None:
    def growth(backend: str, **changes: Any) -> float:
        short, long = (on_a_gpu(backend, length=length, **changes) for length in (2048, 4096))
        for one in (short, long):
            assert one.times.cache.value == "cleared"
            assert min(*one.times.forward.times_ms, *one.times.backward.times_ms) > 0
            assert one.peak_bytes > one.before_backward_bytes
        return long.before_backward_bytes / short.before_backward_bytes

    assert 3.7 < growth("reference") < 4.1
    assert 3.0 < growth("reference", mode=Mode.COMPILED) < 4.2
    for backend in ("triton", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "varlen"):
        assert 1.9 < growth(backend) < 2.1, backend
    assert 1.9 < growth("triton", dtype="fp32") < 2.1


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_formula_equals_the_allocated_bytes() -> None:
    for backend in ("reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "triton", "varlen"):
        settings = AttentionSettings(backend, dtype="bf16", batch=2, length=2048, device="cuda", seconds=0.1)
        predicted = before_backward(settings)
        assert predicted is not None
        measured = measure_attention(settings).before_backward_bytes
        assert measured == pytest.approx(predicted.total, rel=0.02), backend


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_out_of_memory_is_an_outcome() -> None:
    settings = AttentionSettings("reference", dtype="fp32", batch=8, length=4096, device="cuda", seconds=0.1)
    while minimum_bytes(settings) < 2 * torch.cuda.mem_get_info()[1]:
        settings = replace(settings, length=2 * settings.length)
    answer = measured_by_a_worker("trimtab.lab.studies.attention.measure:measure", settings.to_dict())
    assert answer["outcome"] == CellOutcome.OUT_OF_MEMORY.value
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_weighted_sum_runs_in_triton() -> None:
    found = PassTimes.from_dict(measure(WeightedSumSettings("triton", "bf16", device="cuda").to_dict()))
    assert 0 < found.forward.median_ms < 10
