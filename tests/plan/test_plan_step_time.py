"""The time model: fitted lines, interpolation, operations of a step, and steps recorded on the H200."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan_accuracy.recorded import H200, job_of, recorded_steps
from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.operations import Kernel, OperationKind
from trimtab.plan.device_rates import rates_of, shipped_calibration
from trimtab.plan.layers import declared_blocks
from trimtab.plan.rates import Rates, fit_line, interpolate
from trimtab.plan.step_time import StepTime, declared_launches, step_time, updated_chunks

LLAMA = job_of("llama-8b", "qlora", 2, 2048, False, "none in all 32 layers; weights of 32 also unpacked")
QWEN = job_of("qwen3-0.6b", "full", 4, 1024, False, "none in all 28 layers")


def timed(job, *, graphs: bool = True) -> StepTime:  # type: ignore[no-untyped-def]
    time = step_time(job, H200, graphs=graphs)
    assert time is not None
    return time


@given(st.floats(1e-6, 1e-4), st.floats(0.2, 1.0))
def test_a_line_is_recovered(overhead: float, efficiency: float) -> None:
    points = [(x, overhead + x / efficiency) for x in (1e-5, 1e-4, 1e-3)]
    line = fit_line(points)
    assert line.overhead == pytest.approx(overhead, rel=1e-3)
    assert line.efficiency == pytest.approx(efficiency, rel=1e-3)


def test_a_line_has_no_negative_overhead() -> None:
    line = fit_line([(1e-5, 1e-5), (1e-3, 2e-3)])
    assert line.overhead == 0.0
    assert 0.5 <= line.efficiency <= 1.0
    assert fit_line([(1e-5, 2e-5)]).efficiency == pytest.approx(0.5)


def test_interpolated_efficiencies_are_within_the_samples() -> None:
    samples = (((512, 128, 64), 0.3), ((4096, 128, 64), 0.6), ((4096, 64, 64), 0.5))
    for dims, least, most in (
        ((64, 128, 64), 0.3, 0.4),
        ((10**5, 128, 64), 0.45, 0.6),
        ((1024, 128, 64), 0.3, 0.6),
    ):
        assert least < interpolate(samples, dims) < most
    assert interpolate(samples, (4096, 64, 64)) == 0.5
    assert interpolate((*samples, samples[0]), samples[0][0]) == 0.3
    assert interpolate((*samples, (samples[0][0], 0.5)), samples[0][0]) == pytest.approx(0.4)


def test_the_most_similar_samples_are_used() -> None:
    samples = (
        KernelSample(OperationKind.NORM, "bf16", 0.0, 1e6, 2e-6, impl="triton"),
        KernelSample(OperationKind.NORM, "bf16", 0.0, 1e6, 4e-6, impl="triton", backward=True),
        KernelSample(OperationKind.NORM, "bf16", 0.0, 1e6, 9e-6, impl="reference"),
    )
    rates = Rates({"bf16": 1e14}, 1e12, Calibration("x", {"bf16": 1e14}, 1e12, 0.0, samples))
    kernel = Kernel(OperationKind.NORM, 0.0, 1e6)
    assert rates.seconds(kernel, "bf16", impl="triton") == pytest.approx(2e-6)
    assert rates.seconds(kernel, "bf16", impl="triton", backward=True) == pytest.approx(4e-6)
    assert rates.seconds(kernel, "bf16", impl="reference") == pytest.approx(9e-6)
    assert rates.seconds(kernel, "fp32", impl="triton") == pytest.approx(2e-6)
    assert rates.seconds(Kernel(OperationKind.GATE, 0.0, 0.0), "bf16") == 0.0


@pytest.mark.parametrize("job", [LLAMA, QWEN], ids=["qlora", "full"])
def test_kernels_add_up_to_their_pass(job) -> None:  # type: ignore[no-untyped-def]
    for block, _ in declared_blocks(job):
        for operation in block.operations:
            for work in (operation.forward, operation.backward, operation.parameter_backward):
                if work.kernels:
                    assert sum(kernel.flops for kernel in work.kernels) == pytest.approx(work.flops)
                    assert sum(kernel.moved for kernel in work.kernels) == pytest.approx(work.moved)
                    assert work.launches >= len(work.kernels)


def test_recorded_steps_are_predicted() -> None:
    rows = list(recorded_steps())
    assert len(rows) > 30
    errors = {f"{row.name} {row.commit}": row.error for row in rows}
    wrong = {name: f"{error:+.1%}" for name, error in errors.items() if abs(error) > 0.12}
    assert not wrong
    assert statistics.median(abs(error) for error in errors.values()) < 0.05
    # Eager, packed and offloaded steps separately, not only those from which the efficiencies were measured.
    for word in ("eager", "packed", "tight"):
        group_errors = [abs(error) for name, error in errors.items() if word in name]
        assert statistics.median(group_errors) < 0.06, word


POINTWISE = {"input_layernorm", "post_attention_layernorm", "norm", "mlp.activation"}
PRODUCTS = {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}
MEASURED = {  # ms of a profile (results/step-profiles-h200.txt), by the operations they belong to
    "products forward": (75.84, PRODUCTS, "forward"),
    "products backward": (84.84, PRODUCTS, "backward"),
    "attention forward": (4.98, {"attention"}, "forward"),
    "attention backward": (18.42, {"attention"}, "backward"),
    "rope": (1.45, {"rope"}, None),
    "norms and gates forward": (4.18, POINTWISE, "forward"),
    "norms and gates backward": (6.83, POINTWISE, "backward"),
}


@pytest.mark.parametrize("group", MEASURED)
def test_each_group_of_operations_is_predicted(group: str) -> None:
    """A correct total must not result from cancelling errors."""
    measured, names, phase = MEASURED[group]
    seconds = sum(
        operation.total
        for operation in timed(LLAMA).operations
        if operation.name in names and phase in (None, operation.phase)
    )
    # The profile's large products do not hold the adapters' small ones, about a tenth; RoPE is half a per cent of all.
    upper = 1.15 if group.startswith(("attention", "norms")) else 1.22
    assert 0.85 < seconds * 1e3 / measured < upper


def test_more_work_takes_longer() -> None:
    assert timed(LLAMA.changed(tokens=4096)).seconds > 1.9 * timed(LLAMA).seconds
    assert timed(LLAMA.changed(accumulation=2)).seconds > 1.9 * timed(LLAMA).seconds
    packed = LLAMA.changed(attention="triton", attended_share=0.1)
    assert timed(packed).seconds < timed(packed.changed(attended_share=1.0)).seconds
    for policy in ("pointwise", "selective", "block", "offload"):
        changed = timed(LLAMA.changed(policies=(policy,) * 32))
        assert changed.seconds > timed(LLAMA).seconds
        assert changed.by_phase()["recompute"] > 0
    tiled = [timed(LLAMA.changed(mlp_tiles=tiles)).seconds for tiles in (1, 2, 8)]
    assert tiled == sorted(tiled)
    assert (
        timed(LLAMA.changed(dequantized_layers=0)).by_kind()["matrix product"]
        > timed(LLAMA).by_kind()["matrix product"]
    )


def test_copies_over_a_slow_link_are_exposed() -> None:
    job = QWEN.changed(policies=("offload_half",) * 28)
    fast = timed(job)
    slow = dataclasses.replace(shipped_calibration(), to_host=2e9, from_host=2e9)
    exposed = step_time(job, dataclasses.replace(H200, calibration=slow), graphs=True)
    assert exposed is not None
    assert exposed.exposed_copies > fast.exposed_copies
    assert exposed.seconds > fast.seconds


def test_the_host_bounds_eager_steps() -> None:
    eager = timed(QWEN, graphs=False)
    assert eager.seconds == eager.host_seconds > timed(QWEN).seconds


def test_the_shipped_calibration_matches_the_records() -> None:
    from benchmarks import shipped_calibration as maker

    # The last bits of a sum of floats depend on Python's version.
    made, shipped = maker.measured(), shipped_calibration()
    assert shipped is not None
    seconds = [[sample.seconds for sample in one.samples] for one in (made, shipped)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)
    without = [
        dataclasses.replace(one, samples=tuple(dataclasses.replace(s, seconds=0.0) for s in one.samples))
        for one in (made, shipped)
    ]
    assert without[0] == without[1]
    assert rates_of(H200, "bf16").basis == "measured on an NVIDIA H200"  # type: ignore[union-attr]


def test_the_optimizer_takes_the_time_of_its_weights_dtype() -> None:
    """On a CPU, bf16 weights are rounded stochastically: that takes ten times as long as the update of fp32 weights."""
    rates = Calibration(
        "a CPU",
        {"fp32": 1e11},
        2e10,
        5e-6,
        (
            KernelSample(OperationKind.OPTIMIZER, "fp32", 0.0, 28e6, 1e-3, impl="adamw_torch"),
            KernelSample(OperationKind.OPTIMIZER, "bf16", 0.0, 22e6, 10e-3, impl="adamw_torch"),
        ),
    )
    cpu = dataclasses.replace(H200, kind="cpu", calibration=rates)
    seconds = {}
    for dtype in ("fp32", "bf16"):
        job = dataclasses.replace(QWEN, optimizer="adamw_torch", weights_dtype=dtype, gradient_dtype=dtype)
        step = step_time(job, cpu)
        assert step is not None
        [seconds[dtype]] = [operation.total for operation in step.operations if operation.name == "optimizer"]
    elements = QWEN.trained.count
    assert seconds["fp32"] == pytest.approx(elements * 28 / 28e6 * 1e-3, rel=0.01)
    assert seconds["bf16"] > 9 * seconds["fp32"]


def test_launches_outside_a_graph_take_host_time() -> None:
    """Forward and backward are captured; an optimizer that updates each parameter on its own is not."""
    job = QWEN.changed(optimizer="adamw_torch_fused", optimizer_impl="torch")
    slow = dataclasses.replace(
        shipped_calibration(), device="a GPU", host_seconds={"adamw_torch_fused": 1e-3}
    )
    step = step_time(job, dataclasses.replace(H200, calibration=slow), graphs=True)
    assert step is not None
    assert step.host_seconds == pytest.approx(1e-3 * updated_chunks(job))
    assert step.seconds == step.host_seconds > step.by_phase()["update"]
    fast = step_time(QWEN, dataclasses.replace(H200, calibration=slow), graphs=True)
    assert fast is not None
    assert fast.host_seconds == 0
    assert fast.seconds < step.seconds


def test_each_training_method_has_its_host_time_per_launch() -> None:
    host = {"full": 1e-3, "lora": 2e-3, "nf4": 3e-3, "int8": 4e-3}
    slow = dataclasses.replace(
        H200, calibration=dataclasses.replace(shipped_calibration(), device="a GPU", host_seconds=host)
    )
    eager = step_time(QWEN, slow)
    quantized = step_time(LLAMA, slow)
    assert eager is not None
    assert quantized is not None
    assert eager.host_seconds == pytest.approx(1e-3 * declared_launches(QWEN))
    assert quantized.host_seconds == pytest.approx(3e-3 * declared_launches(LLAMA))
    compiled = step_time(QWEN.changed(compiled=True), slow)
    assert compiled is not None
    assert compiled.host_seconds < eager.host_seconds


def test_gradients_in_another_dtype_are_cast() -> None:
    """bf16 weights with fp32 gradients: one cast per parameter, and the 8-bit update takes as long with either."""
    cast = dataclasses.replace(QWEN, gradient_dtype="fp32")
    names = {one.name for one in timed(cast).operations} - {one.name for one in timed(QWEN).operations}
    assert {"mlp.down_proj.weight.grad_cast", "embed_tokens.grad_cast"} <= names
    assert all(name.endswith(".grad_cast") for name in names)
    updates = [next(one for one in timed(job).operations if one.name == "optimizer") for job in (QWEN, cast)]
    assert updates[0].total == pytest.approx(updates[1].total)
