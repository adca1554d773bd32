"""Measured time per declared operation in all three phases, of models built by trimtab's builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from trimtab.facts.operations import OperationKind
from trimtab.lab.operation_times import (
    ACCUMULATION,
    ADDITIONS,
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    UNDECLARED,
    OperationTimes,
    attribute,
    measure_operations,
)
from trimtab.lab.training_step import TrainingStep, build_step, random_batch
from trimtab.model.spec_block import DeclaredBlock
from trimtab.plan.layers import declared_blocks
from trimtab.recipe import build as build_recipe
from trimtab.run.prepare import prepare

TOKENS = 256
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_positions": TOKENS,
}


def built(folder: Path, device: str = "cpu", **changes: Any) -> tuple[TrainingStep, DeclaredBlock]:
    """A step over 2 × 256 tokens, and the declaration of its last layer."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, **SHAPE)
    recipe = {
        "model": {"name": str(model)},
        "data": {"train": [{"source": "starter:math"}]},
        "max_seq_length": TOKENS,
        "packing": False,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "device": device,
        "dtype": "fp32" if device == "cpu" else "bf16",
        "torch_compile": False,
        "cuda_graphs": False,
        "recompute": "none",
        **changes,
    }
    prepared = prepare(build_recipe(recipe))
    step = build_step(prepared, model, random_batch(300, 2, TOKENS))
    return step, declared_blocks(prepared.plan.job)[-1][0]


def measured(step: TrainingStep, device: str = "cpu") -> OperationTimes:
    """Of some measurements the one that other programs disturbed least: where one interrupts Python, the time has no
    name."""
    found = (measure_operations(step.decoder, step.microbatch, device, rounds=2) for _ in range(4))
    return max(found, key=lambda one: one.attributed)


def check(times: OperationTimes, block: DeclaredBlock) -> None:
    """Time is attributed to operations, and all of them are declared."""
    assert times.attributed >= 0.9, times.table()
    declared = {one.name for one in block.operations} | {"embed_tokens", "norm", "loss"}
    measured = {row.operation.removesuffix(" dequantization") for row in times.rows}
    assert measured - set(UNDECLARED) <= declared, times.table()
    for one in block.operations:
        if one.kind in (
            OperationKind.PRODUCT,
            OperationKind.ATTENTION,
            OperationKind.ROPE,
            OperationKind.GATE,
            OperationKind.NORM,
        ):
            assert times.seconds(one.name, FORWARD) > 0, one.name
            assert times.seconds(one.name, BACKWARD) > 0, one.name
    assert times.seconds("loss") > 0


def products(times: OperationTimes, block: DeclaredBlock) -> dict[str, float]:
    """Seconds of the products by name, forward and backward."""
    return {
        one.name: times.seconds(one.name) for one in block.operations if one.kind is OperationKind.PRODUCT
    }


def test_full_training_on_a_cpu(tmp_path: Path) -> None:
    step, block = built(tmp_path)
    times = measured(step)
    check(times, block)
    assert all(row.phase != RECOMPUTE for row in times.rows)
    found = products(times, block)
    assert found["mlp.up_proj"] > found["self_attn.k_proj"], "eight times as much arithmetic"
    forward, backward = (sum(times.seconds(name, way) for name in found) for way in (FORWARD, BACKWARD))
    assert backward > forward, "two products for each one"
    assert times.seconds(ADDITIONS, BACKWARD) > 0, "of q, k and v, of gate and up, of the residual stream"
    assert "forward" not in vars(step.decoder.model.layers[0]), "labels are put back"
    assert "| mlp.up_proj" in times.table()


def test_recomputed_layers_on_a_cpu(tmp_path: Path) -> None:
    step, block = built(tmp_path, recompute="block")
    times = measured(step)
    check(times, block)
    for name in ("self_attn.q_proj", "attention", "rope", "input_layernorm", "mlp.gate_proj"):
        assert times.seconds(name, RECOMPUTE) > 0.05 * times.seconds(name, FORWARD), name
    step, block = built(tmp_path, recompute="selective")
    times = measured(step)
    check(times, block)
    assert times.seconds("mlp.gate_proj", RECOMPUTE) > 0


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_on_a_cpu(tmp_path: Path, quantized: bool) -> None:
    step, block = built(tmp_path, lora={"r": 8}, load_in_4bit=quantized)
    times = measured(step)
    check(times, block)
    found = products(times, block)
    assert list(found) == ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    dequantized = times.seconds("mlp.gate_proj dequantization")
    assert (dequantized > 0) is quantized


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("changes", [{}, {"recompute": "block"}, {"lora": {"r": 8}, "load_in_4bit": True}])
def test_on_a_gpu(tmp_path: Path, changes: dict[str, Any]) -> None:
    step, block = built(tmp_path, "cuda", **changes)
    times = measured(step, "cuda")
    check(times, block)
    torch.cuda.synchronize()


@dataclass
class Event:
    """Fake profiler events, with only the attributes that are read."""

    name: str
    start: float
    end: float
    thread: int = 1
    fwd_thread: int = 0
    sequence_nr: int = -1
    scope: int = 0
    id: int = 0
    is_user_annotation: bool = False
    device_type: Any = torch.autograd.DeviceType.CPU

    @property
    def time_range(self) -> Event:
        return self


def kernel(number: int, microseconds: float) -> Event:
    return Event("a kernel", 0.0, microseconds, id=number, device_type=torch.autograd.DeviceType.CUDA)


def test_kernels_belong_to_the_operation_that_launched_them() -> None:
    """A product and an addition in forward; backward on a separate thread, which recomputes the product first."""
    node = "autograd::engine::evaluate_function: "
    forward = [
        Event("operation: other", 0, 100),
        Event("operation: block", 10, 60),
        Event("operation: mlp.down_proj", 20, 40),
        Event("aten::mm", 21, 39, sequence_nr=7),
        Event("cudaLaunchKernel", 22, 23, id=1),
        Event("aten::add", 45, 50, sequence_nr=8),
        Event("cudaLaunchKernel", 46, 47, id=2),
        Event("cudaMemcpyAsync", 70, 71, id=3),
    ]
    backward = [
        Event(f"{node}MmBackward0", 110, 200, 2, 1, 7),
        Event("MmBackward0", 111, 180, 2, 1, 7, scope=1),
        Event("operation: mlp.down_proj", 120, 140, 2),
        Event("aten::mm", 121, 139, 2, sequence_nr=0),
        Event("cuLaunchKernelEx", 122, 123, 2, id=4),
        Event("cudaLaunchKernel", 150, 151, 2, id=5),
        Event("aten::add", 185, 190, 2),
        Event("cudaLaunchKernel", 186, 187, 2, id=6),
        Event(f"{node}torch::autograd::AccumulateGrad", 210, 220, 2),
        Event("cudaLaunchKernel", 211, 212, 2, id=7),
    ]
    kernels = [kernel(number, 10.0 * number) for number in range(1, 8)]
    kernels.append(
        Event("operation: block", 0, 500, is_user_annotation=True, device_type=kernels[0].device_type)
    )
    times = attribute([*backward, *kernels, *forward], cuda=True)
    found = {(row.operation, row.phase): round(row.seconds * 1e6) for row in times.rows}
    assert found == {
        ("mlp.down_proj", FORWARD): 10,
        ("feed_forward_residual", FORWARD): 20,
        ("other", FORWARD): 30,
        ("mlp.down_proj", RECOMPUTE): 40,
        ("mlp.down_proj", BACKWARD): 50,
        (ADDITIONS, BACKWARD): 60,
        (ACCUMULATION, BACKWARD): 70,
    }
    assert times.step_seconds == pytest.approx(280e-6)
    assert times.attributed == pytest.approx(250 / 280)
