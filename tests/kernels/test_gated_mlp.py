"""The gate of a feed-forward layer: exact with both gradients, for each activation, as the decoder uses it."""

# N rows, W elements per row

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import parity
from tests.kernels.parity import UPSTREAM, accuracy_checks, run
from tests.kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.kernels.gated_mlp import ACTIVATIONS, gated_activation, spec
from trimtab.kernels.gated_mlp.spec import CASES, LARGE_CASES, Case

pytest.importorskip("triton")
from trimtab.kernels.gated_mlp import impl_triton


def caller(case: Case):  # type: ignore[no-untyped-def]
    def call(impl: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gated_activation(gate, up, activation=case.activation, impl=impl)

    return call


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: x.requires_grad_() for name, x in spec.make_inputs(case, "fp32", device).items()}


interpreter = partial(parity.interpreter, impl_triton)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case), dtype, kind=kind, around=interpreter):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case, "cuda"), dtype, kind=kind, device="cuda"):
        assert checked, checked


@settings(max_examples=15, deadline=None)
@given(
    N=st.integers(1, 20),
    W=st.integers(1, 200),
    activation=st.sampled_from(ACTIVATIONS),
    fused=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16"]),
)
def test_any_shape(N: int, W: int, activation: str, fused: bool, dtype: str) -> None:
    case = Case("drawn", N, W, activation, fused)
    for checked in accuracy_checks(caller(case), inputs(case), dtype, around=interpreter):
        assert checked, checked


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(activation: str, dtype: str) -> None:
    case = Case("", 8, 64, activation)
    found = accuracy_checks(
        caller(case), inputs(case), dtype, impl="reference", factor=1.01, around=nullcontext
    )
    assert not any(found), found


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_huge_numbers_stay_finite(activation: str) -> None:
    gate = torch.tensor([-6e4, -100.0, -1e19, 1e19, 6e4]).requires_grad_()
    up = torch.ones(5, requires_grad=True)
    found = {}
    for impl in ("triton", "reference"):
        with interpreter():
            out = gated_activation(gate, up, activation=activation, impl=impl)
            found[impl] = (out, *torch.autograd.grad(out.sum(), (gate, up)))
    for got, want in zip(found["triton"], (x.nan_to_num() for x in found["reference"]), strict=True):
        torch.testing.assert_close(got, want)


def test_deterministic() -> None:
    with interpreter():
        first, second = (run(caller(CASES[0]), "triton", inputs(CASES[0])) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def gradients(case: Case, *, over: bool, device: str = "cpu", dtype: str = "fp32") -> dict[str, torch.Tensor]:
    """Gradients of gate and up that are not shared, their inputs, and where the gradients are stored."""
    leaves = {name: x.detach().requires_grad_() for name, x in spec.make_inputs(case, dtype, device).items()}
    gate, up = (x * 1 for x in leaves.values())
    out = gated_activation(gate, up, activation=case.activation, impl="triton", overwrite_inputs=over)
    found = torch.autograd.grad(out.square().sum(), (gate, up), retain_graph=True)
    return {"gate": gate, "up": up, "out": out, "d_gate": found[0], "d_up": found[1]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_written_over_the_inputs_are_bitwise_identical(case: Case) -> None:
    with interpreter():
        plain, over = (gradients(case, over=over) for over in (False, True))
    for name in ("d_gate", "d_up"):
        assert torch.equal(plain[name], over[name])
        assert plain[name].data_ptr() != plain[name[2:]].data_ptr() or not case.N
        assert over[name].data_ptr() == over[name[2:]].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_written_over_the_inputs_on_a_gpu(case: Case, dtype: str) -> None:
    plain, over = (gradients(case, over=over, device="cuda", dtype=dtype) for over in (False, True))
    for name in ("d_gate", "d_up"):
        assert torch.equal(plain[name], over[name])
        assert over[name].data_ptr() == over[name[2:]].data_ptr()


def test_a_second_backward_over_overwritten_inputs_raises() -> None:
    with interpreter():
        found = gradients(CASES[0], over=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(found["out"].sum(), (found["gate"], found["up"]))


def test_shared_inputs_are_not_overwritten() -> None:
    both = torch.randn(4, 16)
    before = both.clone()
    halves = [half.requires_grad_() for half in both.split(8, dim=1)]
    alone = torch.randn(4, 8, requires_grad=True)
    with interpreter():
        gated_activation(*halves, impl="triton", overwrite_inputs=True).sum().backward()
        gated_activation(alone, alone, impl="triton", overwrite_inputs=True).sum().backward()
    assert torch.equal(both, before)
    want = torch.autograd.grad(gated_activation(alone, alone).sum(), alone)[0]
    torch.testing.assert_close(alone.grad, want)


def test_a_compiled_graph_overwrites_nothing() -> None:
    gate, up = inputs(CASES[0]).values()
    before = gate.detach().clone()
    with interpreter():
        call = partial(gated_activation, activation="silu", impl="triton", overwrite_inputs=True)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        compiled(gate * 1, up * 1).sum().backward()
        found = gate.grad
        compiled(gate, up).sum().backward()
    assert torch.equal(gate.detach(), before)
    assert found is not None
    torch.testing.assert_close(found, torch.autograd.grad(gated_activation(gate, up).sum(), gate)[0] * 2)


def test_operators_pass_opcheck() -> None:
    gate, up = inputs(CASES[0]).values()
    ops = torch.ops.trimtab
    with interpreted(impl_triton):
        torch.library.opcheck(ops.gated_activation, (gate, up, "silu", False))
        backward = (torch.ones(8, 64), gate.detach(), up.detach(), "gelu_tanh")
        torch.library.opcheck(ops.gated_activation_backward, backward)
        schema = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.gated_activation_backward_, backward, test_utils=schema)
        compiled = torch.compile(caller(CASES[0]), backend="aot_eager", fullgraph=True)
        got = compiled("triton", gate, up)
        torch.testing.assert_close(got, gated_activation(gate, up))
        got.sum().backward()
        assert up.grad is not None


def test_invalid_arguments_raise() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ModelError, match="unknown gated activation implementation 'fast'"):
        gated_activation(x, x, impl="fast")
    with pytest.raises(ModelError, match="unknown activation 'relu'"):
        gated_activation(x, x, activation="relu")
    with pytest.raises(ResourceError, match="CUDA"):
        gated_activation(x, x, impl="triton")


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    rows = {"W": "i32:16", "blocks": "i32", "stride_gate": "i32:16", "stride_up": "i32:16"}
    forward = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*fp16") | rows
    names = ("g_ptr", "gate_ptr", "up_ptr", "gate_out_ptr", "up_out_ptr")
    backward = dict.fromkeys(names, "*fp16") | rows | {"stride_g": "i32:16"}
    for activation in ACTIVATIONS:
        options = {"ACTIVATION": activation, "BLOCK": spec.BLOCK}
        for kernel, types in (
            (impl_triton._gated_mlp_forward_kernel, forward),
            (impl_triton._gated_mlp_backward_kernel, backward),
        ):
            compiled = compile_for(chip, kernel, types, options, num_warps=spec.WARPS)
            assert compiled.shared <= SHARED_LIMIT[chip]
            assert not compiled.spills
            assert ".f64" not in compiled.ptx, (
                "a constant became fp64, which runs at 1/64 speed on GeForce cards"
            )


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    both = torch.zeros(150_000, 2 * 14_336, dtype=torch.bfloat16, device="cuda")
    both[-1] = 1.0
    gate, up = both.split(14_336, dim=1)
    out = gated_activation(gate, up, impl="triton")
    assert out[:-1].abs().max() == 0
    assert out[-1].min() == out[-1].max() == torch.tensor(0.7310586).bfloat16().item()
