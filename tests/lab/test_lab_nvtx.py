"""NVTX ranges: balanced, nested and named, in both passes, also if a pass fails. A fake replaces NVTX."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from trimtab.adapt.compiling import compile_regions
from trimtab.lab.nvtx import nvtx_ranges
from trimtab.lab.study import NotSupported
from trimtab.lab.study_step import Kernels, Loss, StepSettings, StudyStep
from trimtab.model.parts import MLP


class Recorder:
    """A fake `torch.cuda.nvtx`, per thread like NVTX: records (depth, name) of each range in the order of start."""

    def __init__(self) -> None:
        self.open: dict[int, list[str]] = {}
        self.ranges: list[tuple[int, str]] = []

    def range_push(self, msg: str) -> None:
        names = self.open.setdefault(threading.get_ident(), [])
        self.ranges.append((len(names), msg))
        names.append(msg)

    def range_pop(self) -> None:
        self.open[threading.get_ident()].pop()

    def all_ended(self) -> bool:
        return not any(self.open.values())

    def names(self) -> list[str]:
        return [name for _, name in self.ranges]


@pytest.fixture
def step() -> StudyStep:
    return StudyStep(StepSettings("tiny", 16, 2, loss=Loss.CROSS_ENTROPY))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found = Recorder()
    yield found
    assert found.all_ended()


def test_modules_are_nested_as_they_are_called(step: StudyStep, recorder: Recorder) -> None:
    with nvtx_ranges(step.decoder, recorder) as ranges:
        step.inference()
    block = "model.layers.1"
    mine = [(depth, name) for depth, name in recorder.ranges if name.startswith(block)]
    assert mine == [
        (0, block),
        (1, f"{block}.input_layernorm"),
        (1, f"{block}.self_attn"),
        (2, f"{block}.self_attn.q_proj"),
        (2, f"{block}.self_attn.k_proj"),
        (2, f"{block}.self_attn.v_proj"),
        (2, f"{block}.self_attn.o_proj"),
        (1, f"{block}.post_attention_layernorm"),
        (1, f"{block}.mlp"),
        (2, f"{block}.mlp.gate_proj"),
        (2, f"{block}.mlp.up_proj"),
        (2, f"{block}.mlp.down_proj"),
    ]
    assert recorder.ranges[0] == (0, "model.embed_tokens")
    assert recorder.ranges[-2:] == [(0, "model.norm"), (0, "lm_head")]
    assert (2, "attention") in recorder.ranges
    assert ranges.count == len(recorder.ranges)
    assert not any("backward" in name for name in recorder.names())


@pytest.mark.parametrize("kernels", Kernels)
def test_backward_ranges_have_the_names_of_modules(recorder: Recorder, kernels: Kernels) -> None:
    step = StudyStep(StepSettings("tiny", 16, 2, loss=Loss.CROSS_ENTROPY, kernels=kernels))
    with nvtx_ranges(step.decoder, recorder) as ranges, ranges.named("step"):
        step.forward_backward()
    forward = [name for name in recorder.names() if not name.endswith(" backward")]
    backward = [name.removesuffix(" backward") for name in recorder.names() if name.endswith(" backward")]
    assert recorder.ranges[0] == (0, "step")
    assert all(depth == 1 for depth, name in recorder.ranges if name.endswith(" backward"))
    assert set(backward) <= set(forward)
    linear = [f"model.layers.0.{part}" for part in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj")]
    found = [backward.index(name) for name in linear]
    assert found == sorted(found), "the last layer of the forward pass comes first"
    assert backward.index("model.layers.1.mlp.up_proj") < backward.index("model.layers.0.mlp.up_proj")
    assert "attention" in backward


def test_gradients_are_those_without_ranges(step: StudyStep, recorder: Recorder) -> None:
    step.forward_backward()
    plain = [parameter.grad for parameter in step.parameters]
    step.drop_gradients()
    with nvtx_ranges(step.decoder, recorder):
        step.forward_backward()
    for before, parameter in zip(plain, step.parameters, strict=True):
        assert torch.equal(before, parameter.grad)


def test_ranges_end_where_a_forward_pass_fails(
    step: StudyStep, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MLP, "forward", lambda self, x, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError), nvtx_ranges(step.decoder, recorder):
        step.forward()
    assert recorder.names()[-1] == "model.layers.0.mlp"
    monkeypatch.undo()
    before = len(recorder.ranges)
    step.forward_backward()
    assert len(recorder.ranges) == before, "labels are put back"


def test_ranges_end_where_a_backward_pass_fails(step: StudyStep, recorder: Recorder) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    norm = step.decoder.model.norm
    plain = norm.forward
    norm.forward = lambda x: Fails.apply(plain(x))
    with pytest.raises(ZeroDivisionError), nvtx_ranges(step.decoder, recorder):
        step.forward_backward()
    assert recorder.names()[-1] == "model.norm backward"


def test_a_graph_that_outlives_the_ranges_emits_nothing(step: StudyStep, recorder: Recorder) -> None:
    with nvtx_ranges(step.decoder, recorder):
        loss = step.forward()
    before = len(recorder.ranges)
    loss.backward()
    assert len(recorder.ranges) == before


def test_compiled_blocks_have_one_range_each(step: StudyStep, recorder: Recorder) -> None:
    compile_regions(step.decoder, backend="eager")
    regions = step.decoder.regions
    step.forward_backward()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with nvtx_ranges(step.decoder, recorder):
        step.forward_backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "labels compile nothing anew"
    blocks = [name for name in recorder.names() if name.startswith("model.layers")]
    assert set(blocks) == {f"model.layers.{i}{way}" for i in (0, 1) for way in ("", " backward")}
    assert step.decoder.regions is regions


@pytest.mark.skipif(torch.cuda.is_available(), reason="has NVTX")
def test_without_cuda_the_error_names_an_alternative(step: StudyStep) -> None:
    with pytest.raises(NotSupported, match="need a CUDA GPU; without --nvtx operators are profiled"):
        nvtx_ranges(step.decoder).__enter__()


@pytest.mark.gpu
def test_ranges_on_a_gpu() -> None:
    step = StudyStep(StepSettings("tiny", 64, 2, loss=Loss.CROSS_ENTROPY, device="cuda"))
    with nvtx_ranges(step.decoder) as ranges:
        step.forward_backward()
    assert ranges.count > 50
