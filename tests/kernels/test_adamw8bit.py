"""The 8-bit AdamW step against fp64 truth, and the properties of its quantization maps."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trimtab.kernels.adamw8bit import State8bit, adamw8bit_step, moments, new_state, spec
from trimtab.kernels.adamw8bit.code import DEFAULT_FORMAT
from trimtab.kernels.adamw8bit.truth import adamw_truth
from trimtab.kernels.adamw8bit.update import apply_, moments_

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def study() -> ModuleType:
    """The benchmark that chose the quantization map, for its tables."""
    path = Path(__file__).parents[2] / "benchmarks" / "adamw8bit_convergence.py"
    found = importlib.util.spec_from_file_location("adamw8bit_convergence", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def block_scales(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Each element's block scale, in the parameter's shape."""
    _, columns, _ = spec.grid(shape)
    return scale.repeat_interleave(spec.BLOCK, dim=1)[:, :columns].reshape(shape)


def advanced(case: tuple[int, ...], steps: int = 3, dtype: str = "fp32") -> tuple[torch.Tensor, State8bit]:
    param, _ = spec.make_inputs(case, weight_dtype=dtype)
    state = new_state(param)
    for step in range(1, steps + 1):
        grad = spec.make_inputs(case, seed=step)[1]
        adamw8bit_step(param, grad, state, **HYPER, step=step)
    return param, state


def fp32_step(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int
) -> torch.Tensor:
    """The plain step without quantization, in fp32: its own error is the tolerance."""
    param, m, v = param.clone(), m.clone(), v.clone()
    moments_(m, v, grad, beta1=HYPER["beta1"], beta2=HYPER["beta2"])
    apply_(param, m, v.sqrt(), **HYPER, step=step)
    return param


@pytest.mark.parametrize("case", [c for c in spec.CASES if 0 not in c])
def test_weight_is_as_close_to_fp64_as_plain_fp32(case: tuple[int, ...]) -> None:
    param, state = advanced(case)
    m, v = moments(state)
    grad = spec.make_inputs(case, seed=9)[1]
    truth, *_ = adamw_truth(param, grad, m, v, **HYPER, step=4)
    plain = fp32_step(param, grad, m, v, 4)
    adamw8bit_step(param, grad, state, **HYPER, step=4)

    def error(weight: torch.Tensor) -> float:
        return (weight.double() - truth).square().mean().sqrt().item()

    bound = error(plain) + spec.ALLOWED_SHARE * truth.square().mean().sqrt().item()
    assert error(param) <= bound
    assert error(param * 1.01) > bound, "the bound must be able to fail"


def neighbours(code: Any, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries below and above."""
    table = code.decode(torch.arange(256, dtype=torch.uint8)).double() / code.peak
    if code.signed:
        table = table[:255]  # code 255 is not used
    position = torch.bucketize(value, table[1:-1], right=True)
    return table[position], table[position + 1]


@pytest.mark.parametrize("case", [c for c in spec.CASES if 0 not in c])
def test_moments_are_stored_as_a_neighbouring_entry(case: tuple[int, ...]) -> None:
    param, state = advanced(case)
    before = moments(state)
    grad = spec.make_inputs(case, seed=9)[1]
    _, m, v = adamw_truth(param, grad, *before, **HYPER, step=4)
    adamw8bit_step(param, grad, state, **HYPER, step=4)
    for stored, true, code, scale_RK in (
        (moments(state)[0].double(), m, DEFAULT_FORMAT.first, state.scale1),
        (moments(state)[1].double().sqrt(), v.sqrt(), DEFAULT_FORMAT.second, state.scale2),
    ):
        scale = block_scales(scale_RK, case).double()
        low, high = neighbours(code, true / scale)
        # a level's root is accurate to 1/256 of a level: 4/256 of it at level 1, nothing in between at most levels
        slack = 1e-5 * stored.abs() + 1e-10 * scale
        assert (stored >= low * scale - slack).all()
        assert (stored <= high * scale + slack).all()
        assert torch.isclose(true.abs().amax(), scale.amax(), rtol=1e-6), "the scale is the block's maximum"


@pytest.mark.parametrize("code", [DEFAULT_FORMAT.first, DEFAULT_FORMAT.second])
def test_entries_are_stored_exactly_and_the_rest_without_bias(code: Any) -> None:
    codes = torch.arange(255 if code.signed else 256, dtype=torch.uint8)
    table = code.decode(codes)
    assert table[-1] == (2 * code.top) ** 4 // 256 * 256
    assert code.peak < table[-1] < 1.0006 * code.peak, "the maximum is just below the top"
    assert table[0] == (-table[-1] if code.signed else 32**4)
    assert (table.diff() > 0).all()
    for fraction in (0.01, 0.5, 0.99):
        assert torch.equal(code.encode(table, torch.full_like(table, fraction)).to(torch.uint8), codes)
    count = 100_000
    fraction = (torch.arange(count) + 0.5) / count
    for value in (1.0, 0.97, 0.3, 0.1, 0.011, 3e-4, 2e-5, *((-0.7, -1e-3, 1e-7) if code.signed else ())):
        x = torch.full((count,), value * code.peak)
        mean = code.decode(code.encode(x, fraction).to(torch.uint8)).double().mean().item() / code.peak
        assert math.isclose(mean, value, rel_tol=2e-4)
    assert (
        not code.signed or not code.decode(code.encode(torch.zeros(3), torch.full((3,), 1e-5)).byte()).any()
    )


def test_moments_follow_fp32_where_rounding_to_nearest_is_stuck() -> None:
    """Gradients fall to a third: √v must fall with them, though a step changes it by less than half a level.

    One element of each block keeps its gradient, so that the block's scale does not fall instead.
    """
    fixed = study().formats()["quartic √v, nearest"]
    from trimtab.kernels.adamw8bit import impl_reference

    ratio = {}
    for name, fmt in (("random", DEFAULT_FORMAT), ("nearest", fixed)):
        param, state = torch.zeros(8, 256), impl_reference.new_state(torch.zeros(8, 256), fmt)
        true = 0.0
        for step in range(1, 901):
            size = 1.0 if step <= 300 else 1 / 3
            grad = torch.full((8, 256), size)
            grad[:, 0] = 1.0
            impl_reference.adamw8bit_step(param, grad, state, **HYPER, step=step, fmt=fmt)
            true = HYPER["beta2"] * true + (1 - HYPER["beta2"]) * size**2
        stored = impl_reference.moments(state, fmt)[1][:, 1:].sqrt()
        ratio[name] = (stored.mean() / math.sqrt(true)).item()
    assert abs(ratio["random"] - 1) < 0.02, ratio
    assert ratio["nearest"] > 1.2, ratio


@pytest.mark.oracle
@pytest.mark.parametrize("signed", [True, False])
def test_the_benchmark_uses_bitsandbytes_own_table(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed)
    assert torch.allclose(torch.tensor(study().dynamic_table(signed)), theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize("case", spec.CASES)
def test_layout_and_bytes(case: tuple[int, ...]) -> None:
    state = new_state(torch.zeros(case))
    rows, _, blocks = spec.grid(case)
    assert state.codes1.shape == state.codes2.shape == torch.Size(case)
    assert state.scale1.shape == state.scale2.shape == (rows, blocks)
    assert (state.codes1.dtype, state.scale1.dtype) == (torch.uint8, torch.float32)
    assert spec.state_bytes(case) == sum(t.numel() * t.element_size() for t in state)
    first, second = moments(state)
    assert first.shape == torch.Size(case)
    assert not first.any()
    assert not second.any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_can_be_resharded(dtype: str) -> None:
    """Two halves of the rows, with their offset, are bitwise identical to the whole."""
    param, state = advanced((10, 300), dtype=dtype)
    halves = [
        (param[a:b].clone(), State8bit(*(t[a:b].clone() for t in state)), a) for a, b in ((0, 4), (4, 10))
    ]
    grad = spec.make_inputs((10, 300), seed=9)[1]
    adamw8bit_step(param, grad, state, **HYPER, step=4, seed=5, param_index=6)
    for piece, mine, start in halves:
        rows = slice(start, start + piece.shape[0])
        adamw8bit_step(piece, grad[rows], mine, **HYPER, step=4, seed=5, param_index=6, offset=start * 300)
        assert torch.equal(piece, param[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(mine, state, strict=True))


def test_short_blocks_do_not_depend_on_the_next_row() -> None:
    param, state = torch.zeros(2, 300), new_state(torch.zeros(2, 300))
    grad = torch.ones(2, 300)
    grad[1] = 1e6
    adamw8bit_step(param, grad, state, **HYPER, step=1)
    assert torch.allclose(state.scale1[:, 1], torch.tensor([0.1, 1e5]))
    assert torch.allclose(moments(state)[0][0], torch.tensor(0.1), rtol=0.04)  # a level at most


def wide_range(steps: int, span: float, off: bool, beta2: float = 0.999) -> tuple[float, float]:
    """Returns the largest update of a block with gradients over `span` decades, 8-bit and fp32, in units of lr."""
    size = torch.logspace(0, -span, 256).view(1, 256)
    weight, plain = torch.zeros(1, 256), torch.zeros(1, 256)
    state, m, v = new_state(weight), torch.zeros(1, 256), torch.zeros(1, 256)
    generator = torch.Generator().manual_seed(1)
    largest = [0.0, 0.0]
    hyper = {"lr": 1.0, "beta1": 0.9, "beta2": beta2, "eps": 1e-20, "weight_decay": 0.0}
    for step in range(1, steps + 1):
        grad = (torch.randn(1, 256, generator=generator) + 1) * size
        if off and step > steps // 2:
            grad[:, ::2] = 0
        before, before_plain = weight.clone(), plain.clone()
        adamw8bit_step(weight, grad, state, **hyper, step=step)
        moments_(m, v, grad, beta1=0.9, beta2=beta2)
        apply_(plain, m, v.sqrt(), **hyper, step=step)
        largest[0] = max(largest[0], (weight - before).abs().max().item())
        largest[1] = max(largest[1], (plain - before_plain).abs().max().item())
    return largest[0], largest[1]


@pytest.mark.parametrize("span", [2.0, 6.0, 12.0])
@pytest.mark.parametrize("off", [False, True])
def test_tiny_second_moments_give_bounded_updates(span: float, off: bool) -> None:
    """ε is far below all gradients, so a √v rounded to zero would give updates of 10³ learning rates and more."""
    ours, plain = wide_range(120, span, off)
    assert 1 < plain < 1.5
    assert ours < 5 * plain


def test_storing_v_instead_of_its_root_gives_unbounded_updates() -> None:
    """The counterexample behind the choice of √v: bitsandbytes' layout on the same gradients."""
    from trimtab.kernels.adamw8bit import impl_reference

    fmt = study().formats()["dynamic v, nearest"]
    weight, size = torch.zeros(1, 256), torch.logspace(0, -6, 256).view(1, 256)
    state = impl_reference.new_state(weight, fmt)
    common: dict[str, Any] = {"lr": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-20, "weight_decay": 0.0}
    for step in range(1, 20):
        impl_reference.adamw8bit_step(weight, size, state, **common, step=step, fmt=fmt)
    impl_reference.adamw8bit_step(weight, torch.zeros(1, 256), state, **common, step=20, fmt=fmt)
    assert weight.abs().max() > 1e3


def test_a_negative_block_maximum_is_not_shrunk() -> None:
    """The map reaches −1, so m converges to g; bitsandbytes' −0.993 would leave it 6 % short."""
    param, state = torch.zeros(16, 256), new_state(torch.zeros(16, 256))
    for step in range(1, 101):
        adamw8bit_step(param, torch.full((16, 256), -2.0), state, **HYPER, step=step)
    assert torch.allclose(moments(state)[0].mean(), torch.tensor(-2.0), rtol=2e-3)


def test_gradients_of_other_dtypes_strides_and_scale() -> None:
    grad = torch.randn(300, 20)
    results = []
    for given, scale in (
        (grad.t(), torch.tensor(0.5)),
        (grad.t().contiguous() * 0.5, 1.0),
        (grad.t().contiguous(), 0.5),
    ):
        param = torch.ones(20, 300)
        adamw8bit_step(param, given, new_state(param), **HYPER, step=1, grad_scale=scale)
        results.append(param)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    param, bits = torch.ones(20, 300, dtype=torch.bfloat16), torch.ones(20, 300, dtype=torch.bfloat16)
    adamw8bit_step(param, grad.t(), new_state(param), **HYPER, step=1)
    adamw8bit_step(bits, grad.t().bfloat16(), new_state(bits), **HYPER, step=1)
    assert (param != 1).any()
    assert (bits != 1).any()


def test_nan_propagates_without_a_crash() -> None:
    param = torch.ones(4, 300)
    state = new_state(param)
    grad = torch.ones(4, 300)
    grad[1, 280] = torch.nan
    adamw8bit_step(param, grad, state, **HYPER, step=1)
    assert state.scale1[1, 1].isnan()
    assert state.scale1.isnan().sum() == 1
    assert param.isnan().sum() == 1
    adamw8bit_step(param, torch.full((4, 300), torch.inf), state, **HYPER, step=2)


def test_unknown_impl() -> None:
    param = torch.ones(1, 1)
    with pytest.raises(ValueError, match="no impl"):
        adamw8bit_step(param, param, new_state(param), **HYPER, step=1, impl="cuda")


@pytest.mark.oracle
def test_stays_closer_to_fp32_than_bitsandbytes_does() -> None:
    """A least-squares problem with columns of different scale: distance to fp32's weights after 200 steps."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    inputs = torch.randn(64, 128) * torch.logspace(0, -2, 128)
    targets = inputs @ torch.randn(128, 64)
    start = torch.randn(64, 128) * 0.02
    hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-8}
    weights = {name: torch.nn.Parameter(start.clone()) for name in ("fp32", "ours", "theirs")}
    fp32 = torch.optim.AdamW([weights["fp32"]], **hyper)
    theirs = bitsandbytes.optim.AdamW8bit([weights["theirs"]], **hyper)
    state = new_state(start)
    for step in range(1, 201):
        for weight in weights.values():
            weight.grad = None
            (inputs @ weight.t() - targets).square().mean().backward()
        fp32.step()
        theirs.step()
        with torch.no_grad():
            ours = weights["ours"]
            adamw8bit_step(ours, ours.grad, state, **hyper, beta1=0.9, beta2=0.999, step=step)
    with torch.no_grad():
        distance = {name: (weights[name] - weights["fp32"]).norm().item() for name in weights}
    moved = (weights["fp32"] - start).norm().item()
    assert distance["ours"] < 0.5 * distance["theirs"], distance
    assert distance["ours"] < 0.1 * moved, (distance, moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_agrees_with_the_cpu(dtype: str) -> None:
    for case in spec.CASES:
        param, state = advanced(case, dtype=dtype)
        grad = spec.make_inputs(case, seed=9)[1]
        copy, copied = param.cuda(), State8bit(*(t.cuda() for t in state))
        adamw8bit_step(param, grad, state, **HYPER, step=4)
        adamw8bit_step(copy, grad.cuda(), copied, **HYPER, step=4, grad_scale=torch.ones((), device="cuda"))
        # roundings of the last bit differ; a bf16 weight may then round to the other neighbour
        assert torch.allclose(
            copy.cpu().float(), param.float(), rtol=1e-2 if dtype == "bf16" else 1e-5, atol=1e-7
        )
        assert ((copied.codes1.cpu().int() - state.codes1.int()).abs() <= 1).all()
        assert (copied.codes2.cpu() != state.codes2).sum() <= 0.01 * state.codes2.numel()
