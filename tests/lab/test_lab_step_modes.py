"""Study steps: parts, precision, compiled and captured steps that must compute what eager mode computes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.lab import study_graphs, study_modes, study_step
from trimtab.lab.step_settings import Kernels, Loss, Mode, Precision, StepSettings, TimedPart
from trimtab.lab.study import NotSupported
from trimtab.lab.study_graphs import GraphStep
from trimtab.lab.study_modes import Fingerprint, check_mode, disagreement, fingerprint, ready_step
from trimtab.lab.study_step import StudyStep, check_supported

SETTINGS = StepSettings("tiny", context=8, batch=2)


@pytest.fixture
def step() -> StudyStep:
    return StudyStep(SETTINGS)


@pytest.mark.parametrize("part", TimedPart)
def test_each_part_runs_its_passes_and_starts_without_gradients(step: StudyStep, part: TimedPart) -> None:
    before = step.parameters[0].detach().clone()
    step.forward_backward()
    prepare = step.prepared(part)
    prepare()()
    once = [None if p.grad is None else p.grad.clone() for p in step.parameters]
    prepare()()
    moved = not torch.equal(before, step.parameters[0])
    assert moved == (part is TimedPart.FULL)
    if part in (TimedPart.BACKWARD, TimedPart.FORWARD_BACKWARD):
        assert all(torch.equal(a, p.grad) for a, p in zip(once, step.parameters, strict=True)), "not added up"
    if part is TimedPart.FULL:
        assert all(p.grad is None for p in step.parameters)


@pytest.mark.parametrize("precision", Precision)
def test_fast_kernels_under_autocast_have_torchs_norms(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training: trimtab's norms, RoPE and gates need one dtype, and the residual stream is fp32."""
    monkeypatch.setattr(study_step, "runs_triton", lambda device: True)
    monkeypatch.setattr(study_step, "check_supported", lambda settings: None)
    settings = dataclasses.replace(SETTINGS, precision=precision, kernels=Kernels.FAST)
    decoder = StudyStep(settings).decoder
    assert {layer.pointwise for layer in decoder.kernels} == {"reference" if precision.is_mixed else "triton"}
    assert decoder.loss_impl == "triton"


def test_losses_and_kernels_agree() -> None:
    with torch.no_grad():
        logits = StudyStep(SETTINGS).decoder
        ids = StudyStep(SETTINGS).ids_BT
        expected = float(logits.logits(logits(ids)).sum())
        found = {
            (kernels, loss): float(
                StudyStep(dataclasses.replace(SETTINGS, kernels=kernels, loss=loss)).forward()
            )
            for kernels in Kernels
            for loss in Loss
        }
    for kernels in Kernels:
        assert found[kernels, Loss.LOGITS_SUM] == pytest.approx(expected, abs=0.01)
        assert found[kernels, Loss.CROSS_ENTROPY] == pytest.approx(math.log(10_000), abs=0.1)


def test_optimizer_states_exist_only_with_an_optimizer_step(step: StudyStep) -> None:
    step.forward_backward()
    assert "optimizer" not in vars(step)
    step.update()
    assert "optimizer" in vars(step)


def test_a_backward_pass_uses_tf32_like_the_forward_pass(step: StudyStep) -> None:
    seen: list[str] = []
    step.parameters[1].register_hook(lambda grad: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    step.forward_backward()
    step.settings = dataclasses.replace(SETTINGS, precision=Precision.TF32)
    step.forward_backward()
    assert seen == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == before


def test_mixed_precision_computes_in_16_bits_with_fp32_weights() -> None:
    step = StudyStep(dataclasses.replace(SETTINGS, precision=Precision.BF16))
    seen: list[torch.dtype] = []
    step.decoder.model.layers[0].mlp.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    step.forward_backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in step.parameters if p.grad is not None} == {torch.float32}


def test_modes_without_cpu_support_are_not_supported() -> None:
    with pytest.raises(NotSupported, match="TF32"):
        check_supported(dataclasses.replace(SETTINGS, precision=Precision.TF32))
    with pytest.raises(NotSupported, match="CUDA graphs need a CUDA GPU"):
        check_mode(Mode.GRAPHS, "cpu")
    check_mode(Mode.COMPILED, "cpu")


def test_a_compiled_step_is_compared_with_eager_mode(
    step: StudyStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    ready = ready_step(step, Mode.COMPILED, TimedPart.FORWARD_BACKWARD)
    made = ready.preparation
    assert step.compiled_loss is not None
    assert made.compile_seconds is not None
    assert made.compile_seconds > 0
    assert made.difference is not None
    assert made.difference < 1e-5
    ready.prepare()()
    assert all(p.grad is not None for p in step.parameters)


def test_a_compiled_step_that_is_one_percent_off_is_not_timed(
    step: StudyStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(function: Any, **options: Any) -> Any:
        return lambda: 1.01 * function()

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(RuntimeError, match="differ from eager mode"):
        ready_step(step, Mode.COMPILED, TimedPart.FORWARD)


def test_where_eager_mode_runs_out_of_memory_nothing_is_compared(
    step: StudyStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = study_modes.fingerprint

    def first_fails(given: StudyStep) -> Fingerprint:
        if given.compiled_loss is None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return real(given)

    monkeypatch.setattr(study_modes, "fingerprint", first_fails)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert ready_step(step, Mode.COMPILED, TimedPart.FORWARD).preparation.difference is None


def test_disagreements_are_relative_and_nan_is_one() -> None:
    base = Fingerprint(10.0, (1.0, 100.0), 10.0)
    assert disagreement(base, base) == (0.0, 0.0)
    assert disagreement(Fingerprint(10.1, (1.0, 100.0), 10.0), base)[0] == pytest.approx(0.01)
    assert disagreement(Fingerprint(10.0, (1.0, 98.0), 10.0), base)[1] == pytest.approx(0.02)
    small = disagreement(Fingerprint(10.0, (0.5, 100.0), 10.0), base)[1]
    assert small == pytest.approx(0.5), "one percent of the largest norm is not small yet"
    for norms in ((0.0, math.nan), (math.nan, 100.0), (1.0, math.inf)):
        assert disagreement(Fingerprint(10.0, norms, 10.0), base) == (math.inf, math.inf)


class Recorder(TorchDispatchMode):
    """Records the operations of a capture, with the tensors they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class FakeGraph:
    """A CUDA graph on the CPU: the same operations on the same tensors at each replay."""

    broken = False

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.replays = 0

    def pool(self) -> object:
        return "a pool"

    def replay(self) -> None:
        self.replays += 1
        if self.broken:
            return
        with torch.no_grad():
            for func, args, kwargs, out in self.recorder.calls:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(out), _tensors(again), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        one
        for one in (value if isinstance(value, (tuple, list)) else [value])
        if isinstance(one, torch.Tensor)
    ]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fakes the part of `torch.cuda` that a capture needs; returns a log of the calls."""
    log: list[str] = []

    @contextlib.contextmanager
    def capture(graph: FakeGraph, pool: Any = None) -> Iterator[None]:
        log.append(f"capture with {pool}")
        with graph.recorder:
            yield

    @contextlib.contextmanager
    def use(stream: Any) -> Iterator[None]:
        log.append("side stream")
        yield
        log.append("main stream")

    stream = SimpleNamespace(wait_stream=lambda other: log.append("wait"))
    monkeypatch.setattr(FakeGraph, "broken", False)
    for name, double in {
        "CUDAGraph": FakeGraph, "graph": capture, "Stream": lambda: stream,
        "current_stream": lambda: stream, "stream": use,
    }.items():  # fmt: skip
        monkeypatch.setattr(study_graphs.torch.cuda, name, double)
    monkeypatch.setattr(study_modes, "check_mode", lambda mode, device: None)
    return log


@pytest.mark.parametrize("part", TimedPart)
def test_a_captured_step_computes_what_eager_mode_computes(
    step: StudyStep, part: TimedPart, graphs: list[str]
) -> None:
    expected = fingerprint(step)
    ready = ready_step(step, Mode.GRAPHS, part)
    assert ready.preparation.difference is not None
    assert ready.preparation.difference < 1e-5
    assert graphs[:4] == ["wait", "side stream", "main stream", "wait"], "warmed up before the capture"
    assert graphs[4:] == ["capture with None"] + ["capture with a pool"] * (part is TimedPart.BACKWARD)
    weight = step.parameters[1].detach().clone()
    ready.prepare()()
    ready.prepare()()
    assert torch.equal(weight, step.parameters[1]) == (part is not TimedPart.FULL)
    if part in (TimedPart.BACKWARD, TimedPart.FORWARD_BACKWARD):
        norms = [float(torch.linalg.vector_norm(p.grad)) for p in step.parameters if p.grad is not None]
        assert norms == pytest.approx(expected.norms, rel=1e-4), "replayed, not added up"


def test_before_a_captured_backward_pass_the_forward_pass_is_replayed(
    step: StudyStep, graphs: list[str]
) -> None:
    captured: Any = GraphStep(step, TimedPart.BACKWARD)
    run = captured.prepared()
    assert (captured.first.replays, captured.last.replays) == (1, 0)
    run()
    assert (captured.first.replays, captured.last.replays) == (1, 1)


@pytest.mark.parametrize("part", TimedPart)
def test_a_graph_that_computes_nothing_is_not_timed(
    step: StudyStep, part: TimedPart, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGraph, "broken", True)
    with pytest.raises(RuntimeError, match="differ from eager mode"):
        ready_step(step, Mode.GRAPHS, part)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("kernels", Kernels)
@pytest.mark.parametrize("part", TimedPart)
def test_on_a_gpu_captured_steps_compute_what_eager_mode_computes(part: TimedPart, kernels: Kernels) -> None:
    for precision in (Precision.FP32, Precision.BF16):
        settings = StepSettings("tiny", 128, 2, precision, kernels, device="cuda")
        ready = ready_step(StudyStep(settings), Mode.GRAPHS, part)
        assert ready.preparation.difference is not None
        for _ in range(3):
            ready.prepare()()


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_a_compiled_step_computes_what_eager_mode_computes() -> None:
    for precision in (Precision.FP32, Precision.TF32, Precision.BF16):
        step = StudyStep(StepSettings("tiny", 128, 2, precision, device="cuda"))
        assert ready_step(step, Mode.COMPILED, TimedPart.FORWARD_BACKWARD).preparation.difference is not None
