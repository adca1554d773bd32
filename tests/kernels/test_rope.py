"""RoPE, with and without norms: exact with every gradient, and as the decoder computes it."""

# B batch, T tokens, H query heads, K key heads, D head size

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
from trimtab.kernels.rope import rope, spec
from trimtab.kernels.rope.spec import CASES, LARGE_CASES, Case

pytest.importorskip("triton")
from trimtab.kernels.rope import impl_triton


def call(impl: str, q, k, cos, sin, q_weight=None, k_weight=None):  # type: ignore[no-untyped-def]
    return rope(q, k, cos, sin, q_weight_D=q_weight, k_weight_D=k_weight, eps=1e-6, impl=impl)


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    made = spec.make_inputs(case, "fp32", device)
    return {name: x if name in ("cos", "sin") else x.requires_grad_() for name, x in made.items()}


def floor(case: Case) -> float:
    """The gradient of a norm over two elements partly cancels."""
    return 1.0 if case.D < 8 else 0.0


interpreter = partial(parity.interpreter, impl_triton)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(call, inputs(case), dtype, kind=kind, around=interpreter):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(call, inputs(case, "cuda"), dtype, kind=kind, device="cuda"):
        assert checked, checked


@settings(max_examples=15, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 5),
    K=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 40),
    norm=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16"]),
)
def test_any_shape(B: int, T: int, K: int, group: int, half: int, norm: bool, dtype: str) -> None:
    case = Case("drawn", B, T, K * group, K, 2 * half, norm)
    for checked in accuracy_checks(call, inputs(case), dtype, around=interpreter, floor=floor(case)):
        assert checked, checked


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(case: Case, dtype: str) -> None:
    found = accuracy_checks(call, inputs(case), dtype, impl="reference", factor=1.01, around=nullcontext)
    assert not any(found), found


def test_rotation_matches_hugging_face() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    made = spec.make_inputs(CASES[0], "fp32")
    cos, sin = (torch.cat((made[name], made[name]), -1) for name in ("cos", "sin"))
    want = apply_rotary_pos_emb(made["q"].transpose(1, 2), made["k"].transpose(1, 2), cos, sin)
    for got, true in zip(call("reference", **made), want, strict=True):
        torch.testing.assert_close(got.transpose(1, 2), true)


@pytest.mark.parametrize("norm", [False, True])
def test_slices_of_one_projection(norm: bool) -> None:
    """Queries, keys and values as slices of the output of one fused projection."""
    case = Case("", B=2, T=3, H=4, K=2, D=16, norm=norm)
    made = spec.make_inputs(case, "fp32")
    fused = torch.randn(2, 3, 8, 16, requires_grad=True)
    rest = {name: made[name] for name in made if name not in ("q", "k")}
    found = {}
    for impl in ("reference", "triton"):
        with interpreter():
            q, k = call(impl, fused[:, :, :4], fused[:, :, 4:6], **rest)
            (g,) = torch.autograd.grad((q * 2).sum() + k.square().sum(), fused)
        found[impl] = (q, k, g)
    for got, want in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got, want)


def test_only_queries_used() -> None:
    made = inputs(CASES[1])
    names = ("q", "k", "q_weight", "k_weight")
    with interpreter():
        found = torch.autograd.grad(call("triton", **made)[0].sum(), [made[name] for name in names])
    want = torch.autograd.grad(
        call("reference", **made)[0].sum(),
        [made[name] for name in names],
        materialize_grads=True,
        allow_unused=True,
    )
    for got, true in zip(found, want, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)


def test_deterministic() -> None:
    with interpreter():
        first, second = (run(call, "triton", inputs(CASES[1])) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_more_tokens_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "programs", lambda capability: 3)
    case = Case("many", 2, 10, 2, 1, 8, norm=True)
    for checked in accuracy_checks(call, inputs(case), "fp32", around=interpreter):
        assert checked, checked


def test_operators_pass_opcheck() -> None:
    ops = torch.ops.trimtab
    plain, normed = inputs(CASES[0]), inputs(CASES[1])
    with interpreted(impl_triton):
        torch.library.opcheck(ops.rope, (*plain.values(), False))
        torch.library.opcheck(ops.normed_rope, (*normed.values(), 1e-6))
        tensors = [x.detach() for x in normed.values()]
        torch.library.opcheck(ops.normed_rope_backward, (tensors[0], tensors[1], *tensors, 1e-6))
        for made in (plain, normed):
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            got = compiled("triton", **made)
            torch.testing.assert_close(got, call("reference", **made))
            sum(x.sum() for x in got).backward()
            assert made["q"].grad is not None


def test_invalid_arguments_raise() -> None:
    made = spec.make_inputs(CASES[0], "fp32")
    with pytest.raises(ModelError, match="unknown RoPE implementation 'fast'"):
        call("fast", **made)
    with pytest.raises(ResourceError, match="CUDA"):
        call("triton", **made)
    made["cos"].requires_grad_()
    with pytest.raises(AssertionError, match="no gradient flows to positions"):
        call("triton", **made)


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    of_heads = ("q_ptr", "k_ptr", "qw_ptr", "kw_ptr", "q_out_ptr", "k_out_ptr")
    strides = dict.fromkeys(("stride_qn", "stride_qh", "stride_kn", "stride_kh"), "i32:16")
    rest = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32", "H": "i32", "K": "i32", "F": "i32:16"}
    types = dict.fromkeys(of_heads, "*fp16") | strides | rest
    more = dict.fromkeys(("stride_gqn", "stride_gqh", "stride_gkn", "stride_gkh"), "i32:16")
    back = types | more | {"gq_ptr": "*fp16", "gk_ptr": "*fp16", "parts_ptr": "*fp32", "N": "i32"}
    for heads, D in ((1, 16), (32, 128), (128, 256)):
        chosen = spec.configuration(heads, D, chip)
        tile = {"BH": chosen.heads, "BK": max(chosen.heads // 4, 1), "BF": chosen.frequencies}
        tile |= {"OFFSET": 0.0, "ALL_HEADS": False, "ROTATED": 0, "INTERLEAVED": False}
        for kernel, signature, flags in (
            (impl_triton._rope_kernel, types, {"BACK": False, "NORM": True}),
            (impl_triton._normed_backward_kernel, back, {}),
        ):
            compiled = compile_for(chip, kernel, signature, tile | flags, num_warps=chosen.warps)
            assert compiled.shared <= SHARED_LIMIT[chip]
            assert not compiled.spills, (chosen, compiled.registers, compiled.spills)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    B, T, H, D = 1, 70_000, 256, 128
    q = torch.zeros(B, T, H, D, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(B, T, 1, D, dtype=torch.bfloat16, device="cuda")
    q[:, -1] = 1.0
    cos, sin = torch.zeros(B, T, D // 2, device="cuda"), torch.ones(B, T, D // 2, device="cuda")
    rotated, _ = rope(q, k, cos, sin, impl="triton")
    assert rotated[:, :-1].abs().max() == 0
    assert (rotated[:, -1, :, : D // 2] == -1).all()
    assert (rotated[:, -1, :, D // 2 :] == 1).all()
