"""Attributed memory: exact totals, every block with its bucket, part, phase, module and line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model
from torch._C._profiler import _EventType

from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import During, RunPhase, no_phase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory import (
    LABEL,
    Allocation,
    EnclosingRanges,
    MemoryEvent,
    allocation_events,
    memory_timeline,
    peak_bytes,
    traced_allocations,
)
from trimtab.lab.memory_attribution import (
    NamedAddress,
    OperationRecord,
    OperationResult,
    _allocated,
    attribute,
)
from trimtab.lab.memory_blocks import AttributedTimeline, MemoryBlock, Role
from trimtab.lab.memory_recorder import record_memory
from trimtab.lab.memory_roles import SUM_AND_NORM, Place, role_of
from trimtab.lab.study_step import Precision, StepSettings, StudyStep
from trimtab.lab.training_step import build_step, random_batch
from trimtab.plan import Plan
from trimtab.recipe import build as build_recipe
from trimtab.run.live_tensors import Origin
from trimtab.run.prepare import prepare

BATCH, CONTEXT, WIDTH, LAYERS = 4, 64, 64, 2
SCALARS = {"cpu": 64, "cuda": 4096}
"""Bytes by which two runs may differ: a dispatch mode turns some Python numbers into tensors."""


def block_bytes(nbytes: int, device: str) -> int:
    """The bytes of a block: CUDA's allocator rounds up to 512."""
    return nbytes if device == "cpu" else -(-nbytes // 512) * 512


def study_timeline(precision: Precision, device: str = "cpu") -> tuple[StudyStep, AttributedTimeline]:
    step = StudyStep(StepSettings("tiny", CONTEXT, BATCH, precision, device=device))
    step.full_step()

    def run(during: During) -> None:
        with during(RunPhase.FORWARD):
            loss = step.forward()
        with during(RunPhase.BACKWARD):
            loss.backward()
        with during(RunPhase.OPTIMIZER_STEP):
            step.update()

    return step, record_memory(run, device, step.decoder, step.optimizer)


def check_study_step(precision: Precision, device: str) -> None:
    step, timeline = study_timeline(precision, device)
    plain = peak_bytes(step.full_step, device)
    assert abs(timeline.peak.total - timeline.before.total - plain) <= SCALARS[device]
    phases = [span.phase for span in timeline.phases]
    assert phases == [RunPhase.FORWARD, RunPhase.LOSS, RunPhase.BACKWARD, RunPhase.OPTIMIZER_STEP]
    parameters = sum(block_bytes(one.nbytes, device) for one in step.parameters)
    backward = timeline.phases[2]
    ended = next(moment for moment in timeline.moments() if moment.event == backward.end - 1)
    assert ended.by_kind()[TensorKind.GRADIENTS] == parameters
    last = list(timeline.moments())[-1]
    assert last.by_kind()[TensorKind.GRADIENTS] == 0
    assert last.total == timeline.before.total


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_totals_of_a_study_step_on_a_cpu(precision: Precision) -> None:
    check_study_step(precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_totals_of_a_study_step_on_a_gpu(precision: Precision) -> None:
    check_study_step(precision, "cuda")


@pytest.fixture(scope="module")
def plain_step() -> tuple[StudyStep, AttributedTimeline]:
    return study_timeline(Precision.FP32)


def blocks_of(
    timeline: AttributedTimeline, part: MemoryPart, phase: RunPhase = RunPhase.FORWARD
) -> list[MemoryBlock]:
    return [block for block in timeline.blocks if block.role.part is part and block.phase is phase]


def test_blocks_have_their_bucket_and_place(plain_step: tuple[StudyStep, AttributedTimeline]) -> None:
    step, timeline = plain_step
    parameters = sum(one.nbytes for one in step.parameters)
    before = timeline.before.by_kind()
    assert before[TensorKind.WEIGHTS] == parameters
    assert before[TensorKind.OPTIMIZER] == 2 * parameters
    stream = BATCH * CONTEXT * WIDTH * 4
    found = [b for b in blocks_of(timeline, MemoryPart.RESIDUAL) if b.tensor_bytes == stream]
    assert sorted({block.module for block in found}) == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(LAYERS)),
    ]
    assert len(found) == 1 + 2 * LAYERS, "the embedding, and two additions a layer"
    [softmax] = [
        block
        for block in blocks_of(timeline, MemoryPart.ATTENTION)
        if block.name.startswith("_softmax") and block.module == "model.layers.1.self_attn"
    ]
    assert softmax.name == f"_softmax [{BATCH}, 4, {CONTEXT}, {CONTEXT}] float32"
    assert softmax.line is not None
    assert softmax.line.startswith("trimtab/kernels/attention/impl_reference.py:")
    assert softmax.end is not None, "released in the backward pass"
    assert timeline.phase_at(softmax.end) is RunPhase.BACKWARD
    [up] = [
        b for b in blocks_of(timeline, MemoryPart.FEED_FORWARD) if b.module == "model.layers.0.mlp.up_proj"
    ]
    assert up.tensor_bytes == BATCH * CONTEXT * 256 * 4
    logits = [b for b in blocks_of(timeline, MemoryPart.LOSS, RunPhase.LOSS) if b.nbytes > stream]
    assert [block.name for block in logits] == [f"mm [{BATCH * CONTEXT}, 10000] float32"]


def test_backward_blocks_name_their_forward_place(plain_step: tuple[StudyStep, AttributedTimeline]) -> None:
    _, timeline = plain_step
    gradients = blocks_of(timeline, MemoryPart.GRADIENTS, RunPhase.BACKWARD)
    modules = {block.module for block in gradients}
    assert "backward of model.layers.0.mlp.down_proj" in modules
    assert all(block.line for block in gradients if block.module != "backward")
    scratch = [b for b in blocks_of(timeline, MemoryPart.WORKSPACE, RunPhase.BACKWARD) if b.nbytes > 2**20]
    assert len(scratch) == 2, "the gradient of the sum, copied by each of the two products that read it"
    named = [block for block in timeline.blocks if block.name == "gradient of lm_head.weight"]
    assert [block.role for block in named] == [Role(TensorKind.GRADIENTS)]


TOKENS = 128
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_positions": TOKENS,
}


class Phases:
    """The components of a step; it records while there is a listener."""

    def __init__(self) -> None:
        self.listener: During = no_phase

    @contextmanager
    def __call__(self, phase: RunPhase) -> Iterator[None]:
        with self.listener(phase):
            yield


@dataclass(frozen=True)
class Recorded:
    timeline: AttributedTimeline
    plain: int
    plan: Plan


def recorded_step(folder: Path, microbatches: int = 1, **changes: Any) -> Recorded:
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, **SHAPE)
    recipe = {
        "model": {"name": str(model)},
        "data": {"train": [{"source": "starter:math"}]},
        "max_seq_length": TOKENS,
        "packing": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": microbatches,
        "device": "cpu",
        "dtype": "fp32",
        "recompute": "none",
        **changes,
    }
    prepared, phases = prepare(build_recipe(recipe)), Phases()
    step = build_step(prepared, model, random_batch(300, 2, TOKENS), during=phases)

    def whole() -> None:
        for _ in range(microbatches):
            step.microbatch()
        step.update()

    def run(during: During) -> None:
        phases.listener = during
        whole()
        phases.listener = no_phase

    whole()
    plain = memory_timeline(whole, "cpu").peak_bytes
    timeline = record_memory(run, "cpu", step.decoder, step.optimizer)
    return Recorded(timeline, plain, prepared.plan)


def test_buckets_of_a_recipe_are_those_of_its_plan(tmp_path: Path) -> None:
    """The second microbatch adds to existing gradients, as the plan assumes."""
    found = recorded_step(tmp_path, microbatches=2)
    assert abs(found.timeline.peak.total - found.timeline.before.total - found.plain) <= SCALARS["cpu"]
    measured, planned = found.timeline.peak.by_kind(), found.plan.memory.peak
    assert measured[TensorKind.WEIGHTS] == planned.weights
    assert measured[TensorKind.GRADIENTS] == planned.gradients
    assert measured[TensorKind.OPTIMIZER] == planned.optimizer
    assert measured[TensorKind.ACTIVATIONS] == pytest.approx(planned.activations, rel=0.005)
    passing = [b for b in found.timeline.blocks if b.role.part is MemoryPart.PARAMETER_GRADIENTS]
    assert passing, "gradients that are added to others"


def test_recomputed_adapters_are_recorded_as_they_run(tmp_path: Path) -> None:
    """Adapters run together and recomputation skips unused tensors; hooks on modules would prevent both."""
    found = recorded_step(tmp_path, lora={"r": 8}, load_in_4bit=True, recompute="block")
    assert abs(found.timeline.peak.total - found.timeline.before.total - found.plain) <= SCALARS["cpu"]
    backward = [block for block in found.timeline.blocks if block.phase is RunPhase.BACKWARD]
    modules = {block.module for block in backward}
    assert "recomputation of model.layers.1.mlp.gate_proj" in modules
    assert "backward of model.layers.1.mlp.gate_proj" in modules
    parts = {b.role.part for b in backward if (b.module or "").startswith("recomputation of")}
    assert {MemoryPart.ATTENTION, MemoryPart.FEED_FORWARD, MemoryPart.NORMS, MemoryPart.RESIDUAL} <= parts


def test_no_gradient_remains_with_the_optimizer_in_backward(tmp_path: Path) -> None:
    found = recorded_step(tmp_path, optim_in_backward=True, max_grad_norm=0)
    assert all(moment.by_kind()[TensorKind.GRADIENTS] == 0 for moment in found.timeline.moments())
    assert any(block.role.part is MemoryPart.PARAMETER_GRADIENTS for block in found.timeline.blocks)


def place(phase: RunPhase, module: str | None = None) -> Place:
    return Place(phase, module)


def test_every_moment_adds_up_to_the_events() -> None:
    """An output, a stored gradient, scratch, a released block from before the run, and an unknown block."""
    events = [
        MemoryEvent(0.0, 100, 1, EnclosingRanges(label=1, after=1, call=7, operation="aten::mm")),
        MemoryEvent(0.1, 30, 2, EnclosingRanges(label=1, after=1, call=7, operation="aten::mm")),
        MemoryEvent(0.2, -30, 2, EnclosingRanges(label=1, after=1, call=7, operation="aten::mm")),
        MemoryEvent(0.3, -50, 8, EnclosingRanges(after=1)),
        MemoryEvent(0.4, 40, 3, EnclosingRanges(after=2, node=20, sequence=5, call=21, operation="aten::mm")),
        MemoryEvent(0.5, -100, 1, EnclosingRanges(after=2, node=22)),
        MemoryEvent(0.6, 16, 4, EnclosingRanges(after=2)),
        MemoryEvent(0.7, -8, 99, EnclosingRanges(after=3)),
    ]
    operations = [
        OperationRecord("", Origin(), place(RunPhase.FORWARD)),
        OperationRecord(
            "aten::mm",
            Origin("model.layers.0.mlp.up_proj", "a.py:1 (f)"),
            place(RunPhase.FORWARD, "model.layers.0.mlp.up_proj"),
            (OperationResult(1, 96, 0, "[24] float32"),),
        ),
        OperationRecord("", Origin(), place(RunPhase.BACKWARD)),
        OperationRecord("", Origin(), place(RunPhase.OPTIMIZER_STEP)),
    ]
    standing = [
        MemoryBlock(500, Role(TensorKind.WEIGHTS), "w", address=9),
        MemoryBlock(50, Role(TensorKind.OTHER), address=8),
    ]
    known = [NamedAddress(3, 3, TensorKind.GRADIENTS, "gradient of w")]
    forward = {5: Origin("model.layers.0.mlp.up_proj", "a.py:1 (f)")}
    timeline = attribute(events, operations, forward, known, standing)
    total, totals = 500 + 50 + 8, []
    for event in events:
        total += event.nbytes
        totals.append(total)
    assert [moment.total for moment in timeline.moments()] == [558, *totals]
    made, scratch, kept, loose = (b for b in timeline.blocks if b.start is not None)
    assert made.role.part is MemoryPart.FEED_FORWARD
    assert (made.name, made.tensor_bytes, made.start, made.end) == ("mm [24] float32", 96, 0, 5)
    assert scratch.role.part is MemoryPart.WORKSPACE
    assert (kept.role.kind, kept.name, kept.end) == (TensorKind.GRADIENTS, "gradient of w", None)
    assert kept.module == "backward of model.layers.0.mlp.up_proj"
    assert loose.role.part is MemoryPart.WORKSPACE
    assert [span.phase for span in timeline.phases] == [
        RunPhase.FORWARD,
        RunPhase.BACKWARD,
        RunPhase.OPTIMIZER_STEP,
    ]


def test_a_run_without_operations_has_no_phase() -> None:
    timeline = attribute([MemoryEvent(0.0, 8, 1)], [], {}, [], [])
    assert timeline.peak.total == 8
    assert timeline.phase_at(0) is RunPhase.OTHER
    assert attribute([], [], {}, [], []).peak.total == 0


def ranged(name: str, start: int, *children: Any, sequence: int = -1, number: int = 0) -> SimpleNamespace:
    """A profiler range, with only the attributes that are read."""
    fields = SimpleNamespace(sequence_number=sequence)
    return SimpleNamespace(
        name=name,
        tag=_EventType.TorchOp,
        id=number,
        start_time_ns=start,
        extra_fields=fields,
        children=list(children),
    )


def allocated(start: int, size: int, device: str, address: int = 1) -> SimpleNamespace:
    fields = SimpleNamespace(ptr=address, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(
        name="[memory]",
        tag=_EventType.Allocation,
        id=0,
        start_time_ns=start,
        extra_fields=fields,
        children=[],
    )


def test_events_of_a_gpu_are_read_from_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass runs on a separate thread; other devices are skipped."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    forward = ranged(
        f"{LABEL}4",
        10,
        ranged("aten::mm", 11, ranged("aten::empty", 12, allocated(13, 512, "cuda:0")), number=1),
        allocated(14, 8, "cpu"),
    )
    node = ranged(
        "autograd::engine::evaluate_function: MmBackward0",
        20,
        ranged("MmBackward0", 21, ranged("aten::mm", 22, allocated(23, 1024, "cuda:0", 2), number=3)),
        allocated(25, -512, "cuda:0"),
        sequence=9,
        number=2,
    )
    other = allocated(5, 4096, "cuda:1")
    outside = Allocation(30, -1024, 2)
    listed = [Allocation(13, 512, 1), Allocation(23, 1024, 2), Allocation(25, -512, 1), outside]
    events = allocation_events([node, other, forward], listed, "cuda")
    assert [event.nbytes for event in events] == [512, 1024, -512, -1024]
    made, gradient, released, deleted = (event.around for event in events)
    assert deleted == EnclosingRanges(after=4), "only the trace lists what happens outside of operators"
    assert made == EnclosingRanges(label=4, after=4, call=1, operation="aten::mm")
    assert gradient == EnclosingRanges(after=4, node=2, sequence=9, call=3, operation="aten::mm")
    assert released == EnclosingRanges(after=4, node=2, sequence=9)
    on_the_cpu = [Allocation(14, 8, 1)]
    assert [event.nbytes for event in allocation_events([forward], on_the_cpu, "cpu")] == [8]
    with pytest.raises(AssertionError, match="lacks"):
        allocation_events([forward], [], "cpu")


def test_the_trace_lists_the_allocations_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = [(0, -1), (1, 0), (1, 1)]
    events = [
        {
            "name": "[memory]",
            "ts": Decimal(f"{number}.250"),
            "args": {"Device Type": kind, "Device Id": index, "Bytes": number, "Addr": number},
        }
        for number, (kind, index) in enumerate(devices)
    ]
    trace = {"baseTimeNanoseconds": 1000, "traceEvents": [{"name": "aten::mm", "ts": Decimal(1)}, *events]}
    assert traced_allocations(trace, "cpu") == [Allocation(1250, 0, 0)]
    assert traced_allocations(trace, "cuda") == [Allocation(3250, 2, 2)]


def test_blocks_of_the_gpu_allocator_get_names() -> None:
    segments = [
        {
            "address": 1000,
            "device": 0,
            "blocks": [
                {"size": 512, "state": "active_allocated"},
                {"size": 512, "state": "inactive"},
                {"size": 1024, "state": "active_allocated"},
            ],
        },
        {"address": 9000, "device": 1, "blocks": [{"size": 512, "state": "active_allocated"}]},
    ]
    named = {1000: MemoryBlock(500, Role(TensorKind.WEIGHTS), "w", tensor_bytes=500, address=1000)}
    found = list(_allocated(segments, 0, named))
    assert [(one.nbytes, one.tensor_bytes, one.name) for one in found] == [
        (512, 500, "w"),
        (1024, None, "allocated before"),
    ]


def test_roles_of_fused_kernels_and_casts() -> None:
    block = Place(RunPhase.FORWARD, "model.layers.0")
    assert role_of(block, SUM_AND_NORM, 0).part is MemoryPart.NORMS
    assert role_of(block, SUM_AND_NORM, 1).part is MemoryPart.RESIDUAL
    cast = Place(RunPhase.FORWARD, "model.layers.0.mlp.up_proj", casts_weight=True)
    assert role_of(cast, "aten::_to_copy", 0).part is MemoryPart.WORKSPACE
    assert role_of(cast, "aten::mm", 0).part is MemoryPart.FEED_FORWARD
    assert role_of(Place(RunPhase.FORWARD), "aten::arange", 0).part is MemoryPart.INPUTS
    assert role_of(Place(RunPhase.FORWARD, "lm_head"), "aten::mm", 0).part is MemoryPart.LOSS


def test_blocks_are_written_as_json(tmp_path: Path, plain_step: tuple[StudyStep, AttributedTimeline]) -> None:
    import json

    _, timeline = plain_step
    timeline.write(tmp_path / "snapshots" / "memory.json")
    read = json.loads((tmp_path / "snapshots" / "memory.json").read_text())
    assert len(read["blocks"]) == len(timeline.blocks)
    assert read["phases"][0] == {"phase": "forward", "start": 0, "end": timeline.phases[0].end}
    peak = timeline.peak
    alive = [
        b for b in read["blocks"] if (b["start"] or 0) <= peak.event and not (b["end"] or 1e9) <= peak.event
    ]
    assert sum(block["bytes"] for block in alive) == peak.total
