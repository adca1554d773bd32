"""Any function of the logits, by chunks: values and gradients as with the full logits."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.parity import poisoned
from trimtab.facts.errors import ModelError
from trimtab.kernels.accuracy import TOLERANCE, AccuracyCheck, check_accuracy
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
from trimtab.kernels.linear_loss import REDUCTIONS, linear_loss, spec
from trimtab.kernels.linear_loss.losses import distillation_loss, policy_loss
from trimtab.kernels.linear_loss.spec import CASES, Case, make_inputs


def focal(logits_nV: torch.Tensor, labels_n: torch.Tensor, factors_n: torch.Tensor) -> torch.Tensor:
    logp_n = logits_nV.log_softmax(-1).gather(1, labels_n[:, None])[:, 0]
    return -((1 - logp_n.exp()) ** 2) * logp_n * factors_n


def run(case: Case, dtype: str, impl: str, reduction: str) -> dict[str, torch.Tensor]:
    """Loss and the gradients of hidden, weight, bias and a per-token tensor."""
    hidden_NC, weight_VC, bias_V, labels_N = make_inputs(case, dtype)
    factors_N = torch.linspace(0.5, 2, case.N).bfloat16().to(hidden_NC.dtype)
    named = {"hidden": hidden_NC, "weight": weight_VC, "bias": bias_V, "factors": factors_N}
    leaves = {name: x.requires_grad_() for name, x in named.items() if x is not None}
    loss = linear_loss(
        hidden_NC,
        weight_VC,
        focal,
        labels_N,
        factors_N,
        bias_V=bias_V,
        impl=impl,
        reduction=reduction,
        chunk_tokens=case.chunk_tokens,
    )
    upstream = torch.tensor(0.7, dtype=loss.dtype).expand(loss.shape)
    if reduction == "none":
        upstream = torch.linspace(-1, 2, 2 * case.N)[::2].to(loss.dtype)  # not contiguous
    found = torch.autograd.grad(loss, list(leaves.values()), upstream)
    return {"loss": loss.detach(), **dict(zip(leaves, found, strict=True))}


def compare(
    case: Case, dtype: str, reduction: str, impl: str = "chunked", factor: float = 1.0
) -> list[AccuracyCheck]:
    true, own = run(case, "fp64", "reference", reduction), run(case, dtype, "reference", reduction)
    with poisoned():
        got = run(case, dtype, impl, reduction)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in own.items()}
    return [
        check_accuracy(
            name, got[name] * factor, truth=true[name], reference=own[name], tolerance=TOLERANCE[dtype]
        )
        for name in true
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_exact(dtype: str, reduction: str, case: Case) -> None:
    for checked in compare(case, dtype, reduction):
        assert checked, checked


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_percent_error_fails(reduction: str) -> None:
    assert not any(compare(CASES[0], "bf16", reduction, impl="reference", factor=1.01))


@settings(max_examples=20, deadline=None)
@given(
    N=st.integers(1, 30), V=st.integers(2, 40), rows=st.integers(1, 40), reduction=st.sampled_from(REDUCTIONS)
)
def test_results_do_not_depend_on_chunking(N: int, V: int, rows: int, reduction: str) -> None:
    case = Case("drawn", N, 5, V, bias=True, chunk_tokens=rows)
    want = run(case, "fp64", "reference", reduction)
    for name, got in run(case, "fp64", "chunked", reduction).items():
        torch.testing.assert_close(got, want[name], rtol=1e-10, atol=1e-12)


def test_a_cross_entropy_function_equals_linear_cross_entropy() -> None:
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "fp64")
    results = []
    for call in (
        lambda h, w: linear_loss(
            h, w, lambda z, y: F.cross_entropy(z, y, reduction="none"), labels_N, chunk_tokens=7
        ),
        lambda h, w: linear_cross_entropy(h, w, labels_N, reduction="sum"),
    ):
        leaves = [x.clone().requires_grad_() for x in (hidden_NC, weight_VC)]
        loss = call(*leaves)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)


def plain_logits(hidden_NC: torch.Tensor, weight_VC: torch.Tensor) -> torch.Tensor:
    logits_NV = hidden_NC @ weight_VC.t()
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def check_against(call, plain, dtype: str, *leaves: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """Compares `call` with `plain` on fp32 leaves; `plain` in fp64 is the truth."""

    def results(function, kind):  # type: ignore[no-untyped-def]
        own = [x.to(kind).requires_grad_() for x in leaves]
        loss = function(*own)
        return [loss.detach(), *torch.autograd.grad(loss, own, torch.tensor(0.5, dtype=loss.dtype))]

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    found = zip(results(call, kind), results(plain, torch.float64), results(plain, kind), strict=True)
    for name, (got, truth, own) in zip(("loss", "hidden", "weight"), found, strict=True):
        checked = check_accuracy(name, got, truth=truth, reference=own, tolerance=TOLERANCE[dtype])
        assert checked, checked


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("source", ["states", "logits"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_distillation_equals_torchs_kl_divergence(
    direction: str, temperature: float, source: str, dtype: str
) -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(Case("", 22, 12, 35, spread=2.0), "fp32")
    teacher_ND, teacher_VD, _, _ = make_inputs(Case("", 22, 9, 35, spread=3.0), "fp32", seed=5)
    teacher_NV = teacher_ND @ teacher_VD.t()
    weights_N = torch.linspace(0, 1, 22)

    def call(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        teacher = {"teacher_hidden_ND": teacher_ND, "teacher_weight_VD": teacher_VD}
        if source == "logits":
            teacher = {"teacher_logits_NV": teacher_NV}
        return distillation_loss(
            h,
            w,
            **teacher,
            temperature=temperature,
            direction=direction,
            token_weights_N=weights_N,
            chunk_tokens=5,
        )

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        student_NV = plain_logits(h, w)
        q_NV = F.log_softmax(student_NV / temperature, -1)
        p_NV = F.log_softmax(teacher_NV.to(q_NV.dtype) / temperature, -1)
        one, other = (q_NV, p_NV) if direction == "forward" else (p_NV, q_NV)
        kl_NV = F.kl_div(one, other, reduction="none", log_target=True)
        return temperature**2 * (kl_NV.sum(-1) * weights_N).sum()

    check_against(call, plain, dtype, hidden_NC, weight_VC)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_policy_loss_equals_its_formula(beta: float, on_policy: bool, dtype: str) -> None:
    hidden_NC, weight_VC, _, actions_N = make_inputs(Case("", 40, 12, 35, spread=2.0), "fp32")
    generator = torch.Generator().manual_seed(3)
    advantages_N = torch.randn(40, generator=generator)
    with torch.no_grad():
        logp_N = plain_logits(hidden_NC, weight_VC).log_softmax(-1).gather(1, actions_N[:, None])[:, 0]
    # Ratios on both sides of the clip, and advantages of both signs.
    old_N = logp_N + 0.4 * torch.randn(40, generator=generator)
    reference_N = logp_N + 0.5 * torch.randn(40, generator=generator)
    weights_N = torch.linspace(0, 1, 40)

    def call(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            h,
            w,
            actions_N,
            advantages_N,
            old_logp_N=None if on_policy else old_N,
            reference_logp_N=reference_N,
            clip=0.2,
            clip_high=0.3,
            kl_coefficient=beta,
            token_weights_N=weights_N,
            chunk_tokens=7,
        )

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logp_N = plain_logits(h, w).log_softmax(-1).gather(1, actions_N[:, None])[:, 0]
        ratio_N = torch.exp(logp_N - (logp_N.detach() if on_policy else old_N))
        if not on_policy:
            assert ((ratio_N < 0.8) | (ratio_N > 1.3)).any()
            assert ((ratio_N > 0.8) & (ratio_N < 1.3)).any()
        surrogate_N = torch.min(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.3) * advantages_N)
        penalty_N = torch.exp(reference_N - logp_N) - (reference_N - logp_N) - 1
        return ((beta * penalty_N - surrogate_N) * weights_N).sum()

    check_against(call, plain, dtype, hidden_NC, weight_VC)


def test_a_captured_tensor_that_requires_a_gradient_raises() -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(CASES[0], "fp32")
    hidden_NC.requires_grad_()
    heat = torch.nn.Parameter(torch.tensor(2.0))
    with pytest.raises(ModelError, match=r"a tensor of shape \(\) that requires a gradient.*detach"):
        linear_loss(hidden_NC, weight_VC, lambda z: (z / (heat * 2)).logsumexp(-1))
    linear_loss(hidden_NC, weight_VC, lambda z: (z / heat.detach()).logsumexp(-1)).backward()
    assert hidden_NC.grad is not None
    assert weight_VC.grad is None


def test_invalid_arguments_raise_and_no_grad_saves_nothing() -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(CASES[0], "fp32")
    with pytest.raises(AssertionError, match="one loss per token"):
        linear_loss(hidden_NC, weight_VC, lambda z: z.logsumexp(-1).mean())
    with pytest.raises(
        ModelError, match="unknown linear loss implementation 'fast'; use one of reference, chunked"
    ):
        linear_loss(hidden_NC, weight_VC, lambda z: z.logsumexp(-1), impl="fast")
    with torch.no_grad():
        loss = linear_loss(hidden_NC, weight_VC.requires_grad_(), lambda z: z.logsumexp(-1))
    assert not loss.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_backward_gives_the_same(reduction: str) -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(CASES[0], "bf16")
    weight_VC.requires_grad_()
    loss = linear_loss(
        hidden_NC, weight_VC, lambda z: z.logsumexp(-1), reduction=reduction, chunk_tokens=5
    ).sum()
    first = torch.autograd.grad(loss, weight_VC, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight_VC)[0])


def test_a_16_bit_weight_with_fp32_gradients_gets_them_unrounded() -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(CASES[0], "bf16")
    weight = torch.nn.Parameter(weight_VC)
    weight.grad_dtype = torch.float32
    linear_loss(hidden_NC, weight, lambda z: z.logsumexp(-1), chunk_tokens=5).backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_the_function_gets_one_chunk_at_a_time() -> None:
    hidden_NC, weight_VC, _, _ = make_inputs(CASES[0], "fp32")
    seen = []

    def watched(logits_nV: torch.Tensor) -> torch.Tensor:
        seen.append(len(logits_nV))
        return logits_nV.logsumexp(-1)

    linear_loss(hidden_NC.requires_grad_(), weight_VC, watched, chunk_tokens=10)
    assert seen == [10, 10, 4]
    assert spec.chunk_tokens(10**6, 128_000) * 128_000 * 4 <= spec.CHUNK_BYTES
