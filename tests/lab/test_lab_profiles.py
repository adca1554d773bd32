"""Profiles: kinds of real operators, JSON, fake GPU events, and errors without a profiler."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from trimtab.facts.errors import DataError
from trimtab.lab.kernel_kinds import KernelKind
from trimtab.lab.profiles import Entry, Profile, check_profiler, profile_run, summarize, write_trace
from trimtab.lab.study import NotSupported
from trimtab.lab.study_step import Kernels, Loss, StepSettings, StudyStep


@pytest.fixture(scope="module")
def step() -> StudyStep:
    return StudyStep(StepSettings("tiny", 64, 2, loss=Loss.CROSS_ENTROPY))


def test_kinds_of_a_real_step(step: StudyStep) -> None:
    step.full_step()
    profile = profile_run(step.full_step, "cpu", rounds=2)
    kinds = {one.kind: one for one in profile.by_kind()}
    assert set(kinds) == set(KernelKind) - {KernelKind.ATTENTION}
    assert sum(one.share for one in kinds.values()) == pytest.approx(1)
    assert sum(one.calls for one in kinds.values()) == profile.calls
    products = [entry for entry in profile.entries if entry.kind is KernelKind.GEMM]
    # 7 linear layers per block and the head, forward and two gradients; two products of attention per block
    called = {entry.name: entry.count for entry in products}
    assert called["aten::mm"] == 3 * (7 * 2 + 1)
    assert called["aten::bmm"] == 3 * 2 * 2
    assert profile.busy_seconds <= profile.span_seconds <= profile.host_seconds
    assert profile.kind_share(KernelKind.OPTIMIZER) > 0


def test_operators_inside_a_norm_or_the_optimizer_are_its_own(step: StudyStep) -> None:
    forward = profile_run(step.forward, "cpu")
    rsqrt = [entry for entry in forward.entries if entry.name == "aten::rsqrt"]
    assert [entry.kind for entry in rsqrt] == [KernelKind.NORM]
    assert forward.kind_share(KernelKind.OPTIMIZER) == 0
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    update = profile_run(torch.optim.SGD([weight], lr=0.1, foreach=False).step, "cpu")
    assert [entry.kind for entry in update.entries if entry.name == "aten::add_"] == [KernelKind.OPTIMIZER]


def test_fused_attention_has_its_own_kind() -> None:
    step = StudyStep(StepSettings("tiny", 64, 2, kernels=Kernels.FAST))
    found = {one.kind: one for one in profile_run(step.forward, "cpu").by_kind()}
    assert found[KernelKind.ATTENTION].seconds > 0
    assert KernelKind.SOFTMAX not in found


def test_profiles_survive_json() -> None:
    long = "void at::native::vectorized_elementwise_kernel<" + "x" * 2000 + "CUDAFunctor_add>"
    profile = Profile((Entry.of("aten::mm", 3, 0.5), Entry.of(long, 1, 0.1)), 0.7, 0.8, "cuda")
    read = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert read.entries[0] == profile.entries[0]
    assert read.entries[1].kind is KernelKind.ELEMENTWISE
    assert len(read.entries[1].name) < 200
    assert (read.span_seconds, read.host_seconds, read.device) == (0.7, 0.8, "cuda")
    for damaged in (
        {},
        {**profile.to_dict(), "entries": [["mm", 1]]},
        {**profile.to_dict(), "span_seconds": None},
    ):
        with pytest.raises(DataError, match=r"a profile is damaged"):
            Profile.from_dict(damaged)


def test_an_empty_profile() -> None:
    empty = Profile((), 0.0)
    assert empty.by_kind() == []
    assert empty.kind_share(KernelKind.GEMM) == 0
    assert empty.lines() == ["kernels 0, busy 0.0 ms, from first to last 0.0 ms"]


@dataclass
class Event:
    """A fake event of torch's profiler."""

    name: str
    start: float
    end: float
    device_type: Any = DeviceType.CUDA
    is_user_annotation: bool = False

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.start, end=self.end, elapsed_us=lambda: self.end - self.start)


def test_kernels_of_a_gpu_are_counted_by_the_devices_time() -> None:
    events = [
        Event("cudaLaunchKernel", 0, 5, DeviceType.CPU),
        Event("ampere_sgemm_128x64_tn", 10, 40),
        Event("ampere_sgemm_128x64_tn", 50, 70),
        Event("operation: block", 10, 90, is_user_annotation=True),
        Event("Memset (Device)", 80, 90),
    ]
    profile = summarize(events, cuda=True, host_seconds=1e-4)
    assert [(e.name, e.count, e.kind) for e in profile.entries] == [
        ("ampere_sgemm_128x64_tn", 2, KernelKind.GEMM),
        ("Memset (Device)", 1, KernelKind.COPY),
    ]
    assert profile.busy_seconds == pytest.approx(60e-6)
    assert profile.span_seconds == pytest.approx(80e-6)


def test_without_a_profiler_the_error_names_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupported, match=r"recorded no kernel.*trimtab bench step"):
        summarize([Event("cudaLaunchKernel", 0, 5, DeviceType.CPU)], cuda=True, host_seconds=1.0)
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU})
    check_profiler("cpu")
    with pytest.raises(NotSupported, match=r"no CUPTI.*trimtab bench step"):
        check_profiler("cuda:1")
    monkeypatch.setattr(torch.autograd, "kineto_available", lambda: False)
    with pytest.raises(NotSupported, match=r"Kineto.*trimtab bench step"):
        profile_run(lambda: None, "cpu")


def test_a_trace_opens_as_json(step: StudyStep, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"

    def run() -> None:
        with torch.profiler.record_function("my range"):
            step.inference()

    write_trace(run, "cpu", path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"my range", "aten::mm"} <= names


@pytest.mark.gpu
@pytest.mark.alone
def test_kinds_of_a_real_step_on_a_gpu() -> None:
    step = StudyStep(StepSettings("tiny", 256, 2, loss=Loss.CROSS_ENTROPY, device="cuda"))
    step.full_step()
    profile = profile_run(step.full_step, "cuda", rounds=2)
    assert profile.kind_share(KernelKind.OTHER) < 0.02
    assert profile.kind_share(KernelKind.OPTIMIZER) > 0
    assert 0 < profile.busy_seconds <= 1.01 * profile.span_seconds
    assert profile.span_seconds <= 1.03 * profile.host_seconds
