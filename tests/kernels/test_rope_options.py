"""Partial and interleaved RoPE, norms over all heads and with an offset: exact with every gradient."""

# B batch, T tokens, H query heads, K key heads, D head size, R rotated elements per head, F = R / 2 frequencies

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import parity
from tests.kernels.parity import accuracy_checks, run
from tests.kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted
from trimtab.facts.errors import ModelError
from trimtab.kernels.rope import rope, spec
from trimtab.kernels.rope.spec import LARGE_OPTION_CASES, OPTION_CASES, Case

pytest.importorskip("triton")
from trimtab.kernels.rope import impl_triton

NAMED = {case.name: case for case in OPTION_CASES}


def caller(case: Case):  # type: ignore[no-untyped-def]
    def call(impl: str, q, k, cos, sin, q_weight=None, k_weight=None):  # type: ignore[no-untyped-def]
        return rope(
            q,
            k,
            cos,
            sin,
            q_weight_D=q_weight,
            k_weight_D=k_weight,
            offset=case.offset,
            norm_all_heads=case.all_heads,
            rotary_dim=case.R,
            interleaved=case.interleaved,
            impl=impl,
        )

    return call


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    made = spec.make_inputs(case, "fp32", device)
    return {name: x if name in ("cos", "sin") else x.requires_grad_() for name, x in made.items()}


interpreter = partial(parity.interpreter, impl_triton)


@pytest.mark.parametrize("case", OPTION_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "kind"), [("fp32", "transposed"), ("fp16", "expanded")])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case), dtype, kind=kind, around=interpreter):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*OPTION_CASES, *LARGE_OPTION_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", parity.UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case, "cuda"), dtype, kind=kind, device="cuda"):
        assert checked, checked


@settings(max_examples=10, deadline=None)
@given(
    K=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 40),
    rotated=st.integers(1, 40),
    norm=st.sampled_from(["none", "head", "all heads"]),
    interleaved=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16"]),
)
def test_any_shape(
    K: int, group: int, half: int, rotated: int, norm: str, interleaved: bool, dtype: str
) -> None:
    R, all_heads = 2 * min(rotated, half), norm == "all heads"
    case = Case(
        "drawn", 1, 2, K * group, K, 2 * half, norm != "none", 1.0, all_heads, R, interleaved=interleaved
    )
    floor = 1.0 if half < 4 else 0.0  # the gradient of a norm over two elements partly cancels
    for checked in accuracy_checks(caller(case), inputs(case), dtype, around=interpreter, floor=floor):
        assert checked, checked


@pytest.mark.parametrize("name", ["interleaved, partial", "all options"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(name: str, dtype: str) -> None:
    call, made = caller(NAMED[name]), inputs(NAMED[name])
    found = accuracy_checks(call, made, dtype, impl="reference", factor=1.01, around=nullcontext)
    assert not any(found), found


def twice(x: torch.Tensor) -> torch.Tensor:
    """Cosines in Hugging Face's layout: repeated for both halves."""
    return torch.cat((x, x), -1)


@pytest.mark.parametrize("family", ["glm", "glm4", "phi3"])
def test_partial_as_hugging_face_rotates(family: str) -> None:
    """GLM: the first half of a head, neighbours; Phi: some of a head, halves."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    case = Case("", B=2, T=5, H=4, K=2, D=16, R=8, interleaved=family != "phi3")
    made = spec.make_inputs(case, "fp32")
    q, k = made["q"].transpose(1, 2), made["k"].transpose(1, 2)
    want = module.apply_rotary_pos_emb(q, k, twice(made["cos"]), twice(made["sin"]))
    for got, true in zip(caller(case)("reference", **made), want, strict=True):
        torch.testing.assert_close(got.transpose(1, 2), true)


def test_norms_as_hugging_face_takes_them() -> None:
    """OLMo 2: one norm over all heads; Gemma 3: 1 + weight, over each head."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.olmo2 import modeling_olmo2

    for module, norm, case in (
        (modeling_olmo2, modeling_olmo2.Olmo2RMSNorm, NAMED["one norm over all heads"]),
        (modeling_gemma3, modeling_gemma3.Gemma3RMSNorm, NAMED["norms with an offset"]),
    ):
        made = spec.make_inputs(case, "fp32")
        normed = []
        for name in ("q", "k"):
            weight = made[f"{name}_weight"]
            layer = norm(weight.numel(), eps=1e-6)
            layer.weight.data = weight
            x = made[name].flatten(-2) if case.all_heads else made[name]
            normed.append(layer(x).view_as(made[name]).transpose(1, 2))
        want = module.apply_rotary_pos_emb(*normed, twice(made["cos"]), twice(made["sin"]))
        for got, true in zip(caller(case)("reference", **made), want, strict=True):
            torch.testing.assert_close(got.transpose(1, 2), true)


def test_the_rest_passes_through() -> None:
    for name in ("partial, a quarter and odd", "interleaved, partial"):
        case = NAMED[name]
        made = spec.make_inputs(case, "fp16")
        with interpreter():
            q, k = caller(case)("triton", **made)
        assert torch.equal(q[..., case.R :], made["q"][..., case.R :])
        assert torch.equal(k[..., case.R :], made["k"][..., case.R :])


def test_slices_of_one_projection() -> None:
    case = NAMED["all options"]
    made = spec.make_inputs(case, "fp32")
    fused = torch.randn(2, 3, 11, 24, requires_grad=True)
    rest = {name: made[name] for name in made if name not in ("q", "k")}
    found = {}
    for impl in ("reference", "triton"):
        with interpreter():
            q, k = caller(case)(impl, fused[:, :, :5], fused[:, :, 5:8], **rest)
            (g,) = torch.autograd.grad((q * 2).sum() + k.square().sum(), fused)
        found[impl] = (q, k, g)
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-5, atol=1e-5)


def test_more_tokens_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "programs", lambda capability: 3)
    case = Case("many", 2, 10, 2, 1, 8, norm=True, all_heads=True)
    for checked in accuracy_checks(caller(case), inputs(case), "fp32", around=interpreter):
        assert checked, checked
    with interpreter():
        first, second = (run(caller(case), "triton", inputs(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_operators_pass_opcheck() -> None:
    ops = torch.ops.trimtab
    plain, whole = NAMED["interleaved, partial"], NAMED["all options"]
    with interpreted(impl_triton):
        made = inputs(plain)
        torch.library.opcheck(ops.rope, (*made.values(), False, True))
        normed, options = inputs(whole), (1e-6, 1.0, True, True)
        torch.library.opcheck(ops.normed_rope, (*normed.values(), *options))
        tensors = [x.detach() for x in normed.values()]
        torch.library.opcheck(ops.normed_rope_backward, (tensors[0], tensors[1], *tensors, *options))
        for case, tried in ((plain, made), (whole, normed)):
            got = torch.compile(caller(case), backend="aot_eager", fullgraph=True)("triton", **tried)
            torch.testing.assert_close(got, caller(case)("reference", **tried))
            sum(x.sum() for x in got).backward()
            assert tried["q"].grad is not None


def test_saved_tensors_are_the_declared_ones() -> None:
    for name in ("interleaved, partial", "all options"):
        case, saved = NAMED[name], []
        made = inputs(case)
        with interpreter(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):  # type: ignore[arg-type,return-value]
            caller(case)("triton", **made)
        want = spec.saved_bytes(case.B * case.T, case.H, case.K, case.D, "fp32", norm=case.norm)
        shared = sum(made[name].nbytes for name in made if name not in ("q", "k"))
        assert sum(x.nbytes for x in saved) == want + shared


def test_invalid_arguments_raise() -> None:
    case = NAMED["partial"]
    made = spec.make_inputs(case, "fp32")
    q, k, cos, sin = made.values()
    for R, message in ((7, "rotary_dim 7 is odd"), (18, "rotary_dim 18 is not within"), (None, "cos is")):
        with pytest.raises(AssertionError, match=message):
            rope(q, k, cos, sin, rotary_dim=R)
    weight = torch.ones(16)
    with pytest.raises(AssertionError, match="for 64 elements"):
        rope(q, k, cos, sin, rotary_dim=8, q_weight_D=weight, k_weight_D=weight, norm_all_heads=True)
    wide = Case("", B=1, T=1, H=257, K=1, D=64, norm=True, all_heads=True)
    with interpreted(impl_triton), pytest.raises(ModelError, match="rows of up to 16,384"):
        caller(wide)("triton", **spec.make_inputs(wide, "fp32"))


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    of_heads = ("q_ptr", "k_ptr", "qw_ptr", "kw_ptr", "q_out_ptr", "k_out_ptr")
    strides = dict.fromkeys(("stride_qn", "stride_qh", "stride_kn", "stride_kh"), "i32:16")
    rest = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32", "H": "i32", "K": "i32", "F": "i32:16"}
    types = dict.fromkeys(of_heads, "*fp16") | strides | rest
    more = dict.fromkeys(("stride_gqn", "stride_gqh", "stride_gkn", "stride_gkh"), "i32:16")
    back = types | more | {"gq_ptr": "*fp16", "gk_ptr": "*fp16", "parts_ptr": "*fp32", "N": "i32"}
    forward, backward = impl_triton._rope_kernel, impl_triton._normed_backward_kernel
    flags = {"BACK": False, "NORM": True}
    for kernel, signature, more, heads, all_heads, rotated, interleaved in (
        (forward, types, flags, 40, True, 32, True),
        (backward, back, {}, 40, True, 0, False),  # 5120 elements in a tile of 8192
        (backward, back, {}, 32, False, 32, True),
    ):
        chosen = spec.configuration(heads, 128, chip, all_heads=all_heads)
        tile = {"BH": chosen.heads, "BK": max(chosen.heads // 4, 1), "BF": chosen.frequencies}
        options = {"OFFSET": 1.0, "ALL_HEADS": all_heads, "ROTATED": rotated, "INTERLEAVED": interleaved}
        compiled = compile_for(chip, kernel, signature, more | tile | options, num_warps=chosen.warps)
        assert compiled.shared <= SHARED_LIMIT[chip]
        assert not compiled.spills, (chosen, compiled.registers, compiled.spills)
