"""The norm, alone and with the residual addition: exact with every gradient, and as the decoder computes it."""

# N rows, D elements per row

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
from trimtab.kernels.rms_norm import add_rms_norm, rms_norm, spec
from trimtab.kernels.rms_norm.spec import CASES, LARGE_CASES, LARGE_OFFSET_CASES, OFFSET_CASES, Case
from trimtab.model.parts import RMSNorm

pytest.importorskip("triton")
from trimtab.kernels import partial_sums
from trimtab.kernels.rms_norm import impl_triton

EVERY_CASE = (*CASES, *OFFSET_CASES, *LARGE_CASES, *LARGE_OFFSET_CASES)


def caller(case: Case):  # type: ignore[no-untyped-def]
    def call(impl: str, x, weight, residual=None):  # type: ignore[no-untyped-def]
        if residual is None:
            return rms_norm(x, weight, case.eps, offset=case.offset, impl=impl)
        return add_rms_norm(x, residual, weight, case.eps, offset=case.offset, impl=impl)

    return call


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: x.requires_grad_() for name, x in spec.make_inputs(case, "fp32", device).items()}


interpreter = partial(parity.interpreter, impl_triton, partial_sums)


@pytest.mark.parametrize("case", [*CASES, *OFFSET_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    floor = 1.0 if case.D < 4 else 0.0  # the norm of one element is its sign: its gradient cancels to zero
    for checked in accuracy_checks(
        caller(case), inputs(case), dtype, kind=kind, around=interpreter, floor=floor
    ):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    floor = 1.0 if case.D < 4 else 0.0
    for checked in accuracy_checks(
        caller(case), inputs(case, "cuda"), dtype, kind=kind, device="cuda", floor=floor
    ):
        assert checked, checked


@settings(max_examples=15, deadline=None)
@given(
    N=st.integers(1, 40),
    D=st.integers(1, 200),
    residual=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16"]),
    kind=st.sampled_from(UPSTREAM),
)
def test_any_shape(N: int, D: int, residual: bool, dtype: str, kind: str) -> None:
    case = Case("drawn", N, D, residual)
    floor = 1.0 if case.D < 4 else 0.0  # the norm of one element is its sign: its gradient cancels to zero
    for checked in accuracy_checks(
        caller(case), inputs(case), dtype, kind=kind, around=interpreter, floor=floor
    ):
        assert checked, checked


@pytest.mark.parametrize("case", [*CASES[:2], *OFFSET_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(case: Case, dtype: str) -> None:
    found = accuracy_checks(
        caller(case), inputs(case), dtype, impl="reference", factor=1.01, around=nullcontext
    )
    assert not any(found), found


def test_the_decoders_norm_is_the_reference() -> None:
    norm = RMSNorm(24, 1e-5)
    with torch.no_grad():
        norm.weight.normal_()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 24).to(dtype)
        assert torch.equal(norm(x), rms_norm(x, norm.weight, 1e-5))
        same = norm.weight.to(dtype)
        if dtype == torch.float32:
            assert torch.equal(torch.nn.functional.rms_norm(x, (24,), same, 1e-5), rms_norm(x, same, 1e-5))


def test_an_offset_as_hugging_face_adds_it() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    norm = Gemma3RMSNorm(24, eps=1e-5)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(5, 24).to(dtype), norm.weight.to(dtype)
        norm.weight.data = w.float()
        torch.testing.assert_close(rms_norm(x, w, 1e-5, offset=1.0), norm(x))


def test_the_offset_is_added_in_fp32() -> None:
    """A sum in fp16 would lose these weights: values after 1 are 2⁻¹⁰ apart."""
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).half()
    w = torch.full((256,), 2.0**-12, dtype=torch.float16)
    exact = rms_norm(x.double(), w.double(), 1e-6, offset=1.0).half()
    assert not torch.equal(rms_norm(x, w + 1.0, 1e-6), exact)
    for impl in spec.IMPLS:
        with interpreter():
            assert torch.equal(rms_norm(x, w, 1e-6, offset=1.0, impl=impl), exact)


def test_fp32_weights_under_half_precision() -> None:
    """As under autocast: everything in fp32, rounded once, the weight's gradient in fp32."""
    x, w = torch.randn(6, 40).half().requires_grad_(), torch.randn(40).requires_grad_()
    with interpreter():
        y = rms_norm(x, w, 1e-6, impl="triton")
        gx, gw = torch.autograd.grad(y.float().sum(), (x, w))
    want = rms_norm(x, w, 1e-6)
    wx, ww = torch.autograd.grad(want.float().sum(), (x, w))
    assert (y.dtype, gx.dtype, gw.dtype) == (torch.float16, torch.float16, torch.float32)
    assert torch.equal(y, want)
    torch.testing.assert_close(gx, wx, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(gw, ww, rtol=1e-5, atol=1e-5)


def test_strides() -> None:
    wide, w = torch.randn(4, 6, 64), torch.randn(32)
    for x in (wide[..., :32], wide.transpose(0, 1)[..., 32:], wide[..., ::2], w.expand(3, 32)):
        with interpreter():
            got, kept = add_rms_norm(x, x, w, 1e-6, impl="triton")
        want, h = add_rms_norm(x, x, w, 1e-6)
        assert torch.equal(kept, h)
        torch.testing.assert_close(got, want)


def test_only_one_output_used() -> None:
    x, r, w = (torch.randn(5, 16, requires_grad=True) for _ in range(3))
    w = torch.randn(16, requires_grad=True)
    for index in (0, 1):
        with interpreter():
            got = add_rms_norm(x, r, w, 1e-6, impl="triton")[index]
            found = torch.autograd.grad(got.square().sum(), (x, r, w), allow_unused=True)
        want = torch.autograd.grad(
            add_rms_norm(x, r, w, 1e-6)[index].square().sum(), (x, r, w), allow_unused=True
        )
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(
                torch.zeros(16) if a is None else a, torch.zeros(16) if b is None else b
            )


def test_frozen_weight_has_no_gradient() -> None:
    x, w = torch.randn(5, 16, requires_grad=True), torch.ones(16)
    with interpreter():
        rms_norm(x, w, 1e-6, impl="triton").sum().backward()
    want = torch.autograd.grad(rms_norm(x, w, 1e-6).sum(), x)[0]
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-6)
    assert w.grad is None


def test_deterministic() -> None:
    case = Case("again", 300, 24, residual=True)
    with interpreter():
        first, second = (run(caller(case), "triton", inputs(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_operators_pass_opcheck() -> None:
    x, r, g = (torch.randn(5, 16, requires_grad=True) for _ in range(3))
    w = torch.randn(16, requires_grad=True)
    ops = torch.ops.trimtab
    with interpreted(impl_triton, partial_sums):
        torch.library.opcheck(ops.rms_norm, (x, w, 1e-6))
        torch.library.opcheck(ops.add_rms_norm, (x, r, w, 1e-6))
        torch.library.opcheck(ops.rms_norm, (x, w, 1e-6, 1.0))
        torch.library.opcheck(ops.add_rms_norm, (x, r, w, 1e-6, 1.0))
        for gh, weight_grad in ((None, True), (g.detach(), False)):
            arguments = (g.detach(), gh, x.detach(), w.detach(), torch.rand(5), weight_grad)
            torch.library.opcheck(ops.rms_norm_backward, arguments)
        compiled = torch.compile(caller(CASES[0]), backend="aot_eager", fullgraph=True)
        got = compiled("triton", x, w, r)
        torch.testing.assert_close(got, add_rms_norm(x, r, w, 1e-6))
        got[0].sum().backward()
        assert w.grad is not None


def test_invalid_arguments_raise() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(ModelError, match="unknown RMSNorm implementation 'fast'"):
        rms_norm(x, w, 1e-6, impl="fast")
    with pytest.raises(ResourceError, match="CUDA"):
        rms_norm(x, w, 1e-6, impl="triton")
    with interpreted(impl_triton, partial_sums), pytest.raises(ModelError, match="rows of up to 16,384"):
        rms_norm(torch.ones(1, 16_385), torch.ones(16_385), 1e-6, impl="triton")


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    numbers = {"N": "i32", "D": "i32:16"}
    for which, chosen in dict.fromkeys(spec.configurations(chip)):
        tile = {"R": chosen.rows, "C": chosen.columns}
        if which == "forward":
            names = ("x_ptr", "residual_ptr", "w_ptr", "y_ptr", "h_ptr")
            types = dict.fromkeys(names, "*fp16") | numbers
            types |= {"scale_ptr": "*fp32", "stride_x": "i32:16", "stride_residual": "i32:16", "eps": "fp32"}
            kernel, more = impl_triton._rms_norm_forward_kernel, {"HAS_RESIDUAL": True, "OFFSET": 0.0}
        else:
            names = ("gy_ptr", "gh_ptr", "h_ptr", "w_ptr", "out_ptr")
            types = dict.fromkeys(names, "*fp16") | numbers | {"scale_ptr": "*fp32", "parts_ptr": "*fp32"}
            types |= {"P": "i32", "stride_gy": "i32:16", "stride_gh": "i32:16", "stride_h": "i32:16"}
            kernel, more = (
                impl_triton._rms_norm_backward_kernel,
                {"HAS_GH": True, "WEIGHT_GRAD": True, "OFFSET": 0.0},
            )
        compiled = compile_for(chip, kernel, types, tile | more, num_warps=chosen.warps)
        assert compiled.shared <= SHARED_LIMIT[chip]
        # rows of 16,384 spill some values per thread: still one pass over memory
        assert chosen.columns > 8192 or not compiled.spills, (which, chosen, compiled.spills)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    N, D = 140_000, 16_384
    x = torch.zeros(N, D, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    x.requires_grad_()
    w = torch.ones(D, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = rms_norm(x, w, 1e-6, impl="triton")
    assert y[-1].min() == y[-1].max() == 1
    assert y[:-1].abs().max() == 0
    gx, gw = torch.autograd.grad(y[-1].sum(), (x, w))
    assert torch.equal(gw, torch.ones_like(w))
    assert gx.abs().max() < 1e-3
