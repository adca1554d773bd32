"""The norm of a branch before the residual addition, and the norm that follows: exact with every gradient."""

# N rows, D elements per row

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.kernels import parity
from tests.kernels.parity import UPSTREAM, accuracy_checks, run
from tests.kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.kernels.rms_norm import norm_add, norm_add_norm, spec
from trimtab.kernels.rms_norm.spec import BRANCH_CASES, LARGE_BRANCH_CASES, Case

pytest.importorskip("triton")
from trimtab.kernels import partial_sums
from trimtab.kernels.rms_norm import impl_triton, impl_triton_branch


def caller(case: Case):  # type: ignore[no-untyped-def]
    def call(impl: str, x, weight, residual, next_weight=None):  # type: ignore[no-untyped-def]
        if next_weight is None:
            return norm_add(x, residual, weight, case.eps, offset=case.offset, impl=impl)
        return norm_add_norm(x, residual, weight, next_weight, case.eps, offset=case.offset, impl=impl)

    return call


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: x.requires_grad_() for name, x in spec.make_inputs(case, "fp32", device).items()}


MODULES = (impl_triton, impl_triton_branch, partial_sums)
interpreter = partial(parity.interpreter, *MODULES)


@pytest.mark.parametrize("case", BRANCH_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "kind"), [("fp32", "expanded"), ("fp16", "transposed")])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case), dtype, kind=kind, around=interpreter):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*BRANCH_CASES, *LARGE_BRANCH_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(caller(case), inputs(case, "cuda"), dtype, kind=kind, device="cuda"):
        assert checked, checked


@pytest.mark.parametrize("case", BRANCH_CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(case: Case, dtype: str) -> None:
    found = accuracy_checks(
        caller(case), inputs(case), dtype, impl="reference", factor=1.01, around=nullcontext
    )
    assert not any(found), found


def test_blocks_as_hugging_face_adds_them() -> None:
    """Gemma 3 and OLMo 2: norm, then addition."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    branch, residual = torch.randn(2, 5, 24)
    for kind, offset in ((Gemma3RMSNorm, 1.0), (Olmo2RMSNorm, 0.0)):
        norm, following = kind(24, 1e-5), kind(24, 1e-5)
        for layer in (norm, following):
            torch.nn.init.normal_(layer.weight)
        want = residual + norm(branch)
        torch.testing.assert_close(norm_add(branch, residual, norm.weight, 1e-5, offset=offset), want)
        got = norm_add_norm(branch, residual, norm.weight, following.weight, 1e-5, offset=offset)
        torch.testing.assert_close(got, (following(want), want))


def test_strides() -> None:
    wide, w = torch.randn(4, 6, 64), torch.randn(32)
    for x in (wide[..., :32], wide.transpose(0, 1)[..., 32:], wide[..., ::2], w.expand(3, 32)):
        with interpreter():
            got = norm_add_norm(x, x, w, w, 1e-6, impl="triton")
        torch.testing.assert_close(got, norm_add_norm(x, x, w, w, 1e-6))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_one_output_used_and_frozen_weights(index: int, frozen: bool) -> None:
    x, r = (torch.randn(5, 16, requires_grad=True) for _ in range(2))
    w, following = (torch.randn(16, requires_grad=not frozen) for _ in range(2))
    wanted = [x, r] if frozen else [x, r, w, following]
    found = {}
    for impl in ("reference", "triton"):
        with interpreter():
            out = norm_add_norm(x, r, w, following, 1e-6, offset=1.0, impl=impl)[index]
            found[impl] = torch.autograd.grad(
                out.square().sum(), wanted, allow_unused=True, materialize_grads=True
            )
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-5, atol=1e-5)


def test_saved_tensors_are_the_declared_ones() -> None:
    """The branch, the stream, weights and a value per row and norm; not the residual."""
    for case in BRANCH_CASES[:2]:
        saved: list[torch.Tensor] = []
        made = inputs(case)
        with interpreter(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):  # type: ignore[arg-type,return-value]
            out = caller(case)("triton", **made)
        stream_and_weights = 4 * case.D * (1 + case.next_norm) + (
            4 * case.N * case.D if case.next_norm else 0
        )
        want = spec.saved_bytes(case.N, case.D, "fp32", branch=True, next_norm=case.next_norm)
        assert sum(x.nbytes for x in saved) == want + stream_and_weights, out


def test_deterministic() -> None:
    case = Case("again", 300, 24, residual=True, branch=True, next_norm=True)
    with interpreter():
        first, second = (run(caller(case), "triton", inputs(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_operators_pass_opcheck() -> None:
    x, r, g = (torch.randn(5, 16, requires_grad=True) for _ in range(3))
    w, following = (torch.randn(16, requires_grad=True) for _ in range(2))
    ops = torch.ops.trimtab
    with interpreted(*MODULES):
        torch.library.opcheck(ops.norm_add, (x, r, w, 1e-6, 1.0))
        torch.library.opcheck(ops.norm_add_norm, (x, r, w, following, 1e-6))
        for gh, weight_grad in ((None, True), (g.detach(), False)):
            tensors = [t.detach() for t in (x, r, w, following)]
            arguments = (g.detach(), gh, *tensors, torch.rand(5), torch.rand(5), weight_grad, 1.0)
            torch.library.opcheck(ops.norm_add_norm_backward, arguments)
        compiled = torch.compile(caller(BRANCH_CASES[0]), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled("triton", x, w, r), norm_add(x, r, w, 1e-6))
        got = compiled("triton", x, w, r, following)
        torch.testing.assert_close(got, norm_add_norm(x, r, w, following, 1e-6))
        got[0].sum().backward()
        assert following.grad is not None


def test_invalid_arguments_raise() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    for call in (partial(norm_add, x, x, w, 1e-6), partial(norm_add_norm, x, x, w, w, 1e-6)):
        with pytest.raises(ModelError, match="unknown RMSNorm implementation 'fast'"):
            call(impl="fast")
        with pytest.raises(ResourceError, match="CUDA"):
            call(impl="triton")
    wide, ones = torch.ones(1, 16_385), torch.ones(16_385)
    with interpreted(*MODULES), pytest.raises(ModelError, match="rows of up to 16,384"):
        norm_add(wide, wide, ones, 1e-6, impl="triton")


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    halves = ("x_ptr", "w1_ptr", "w2_ptr", "h_ptr")
    types = dict.fromkeys(halves, "*fp16") | {"scale1_ptr": "*fp32", "scale2_ptr": "*fp32", "N": "i32"}
    types |= {"D": "i32:16", "stride_x": "i32:16"}
    forward = types | {"residual_ptr": "*fp16", "y_ptr": "*fp16", "stride_residual": "i32:16", "eps": "fp32"}
    backward = types | dict.fromkeys(("gy_ptr", "gh_ptr", "x_out_ptr", "h_out_ptr"), "*fp16")
    backward |= dict.fromkeys(("stride_gy", "stride_gh", "stride_h"), "i32:16") | {"P": "i32"}
    backward |= {"parts_ptr": "*fp32"}
    flags = {"HAS_GH": True, "WEIGHT_GRAD": True}
    for kernel, D, chosen, signature, more in (
        (
            impl_triton_branch._rms_norm_branch_forward_kernel,
            8192,
            spec.forward_configuration,
            forward,
            {"NEXT": True},
        ),
        (
            impl_triton_branch._rms_norm_branch_backward_kernel,
            8192,
            spec.backward_configuration,
            backward,
            flags,
        ),
    ):
        tile = chosen(D, chip)
        constants = more | {"OFFSET": 1.0, "R": tile.rows, "C": tile.columns}
        compiled = compile_for(chip, kernel, signature, constants, num_warps=tile.warps)
        assert compiled.shared <= SHARED_LIMIT[chip]
        assert not compiled.spills, (tile, compiled.registers, compiled.spills)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    N, D = 140_000, 16_384
    x, r = (torch.zeros(N, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x[-1] = 3.0
    w = torch.ones(D, dtype=torch.bfloat16, device="cuda")
    y, h = norm_add_norm(x.requires_grad_(), r, w, w, 1e-6, impl="triton")
    assert y[-1].min() == y[-1].max() == h[-1].min() == h[-1].max() == 1
    assert h[:-1].abs().max() == 0
    (gx,) = torch.autograd.grad(y[-1].sum() + h[-1].sum(), x)
    assert gx.isfinite().all()
