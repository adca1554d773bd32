"""Attention sinks: learned logits in every softmax without a value."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import pytest
import torch
from attention_options import PLACES, at, by_impl, compare, dtypes_at, make_all_inputs, run

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention import IMPLS, Layout, attention, spec
from trimtab.kernels.attention.spec import OPTION_CASES, WITH_SINKS, Case, make_inputs, make_lse_gradient

CHOSEN = [case for case in OPTION_CASES if case.sinks]
SMALL = Case("small", B=1, T=10, S=10, H=2, K=1, D=16, documents=((4, 6),), sinks=True)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: c.name)
def test_the_reference_is_exact(case):
    for dtype in ("fp64", "fp32"):
        for checked in compare(case, "reference", dtype):
            assert checked, (dtype, checked)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: c.name)
def test_triton_is_exact(case, place):
    with at(place) as device:
        for dtype in dtypes_at(place):
            for checked in compare(case, "triton", dtype, device):
                assert checked, (dtype, checked)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_one_percent_error_fails(dtype):
    accuracy_checks = compare(CHOSEN[2], "reference", dtype, factor=1.01)
    assert len(accuracy_checks) == 6
    assert not any(accuracy_checks), accuracy_checks


@pytest.mark.parametrize("place", PLACES)
def test_a_sink_is_a_factor_on_the_output(place):
    """o · sigmoid(lse − sink) from a call without sinks, by its differentiable log-sum-exp."""
    case = CHOSEN[0]
    with at(place) as device:
        (q, k, v, sinks), do, _ = make_all_inputs(case, "fp32", device)

        def factored(q, k, v, sinks):
            o, lse = attention(q, k, v, layout=Layout.causal(), return_lse=True, impl="triton")
            return o * (lse - sinks).sigmoid()[..., None]

        got = run(by_impl(case, None, "triton", return_lse=False), (q, k, v, sinks), [do])
        want = run(factored, (q, k, v, sinks), [do])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", PLACES)
def test_a_sink_of_minus_infinity_is_none(place):
    case = Case("rows fully masked", B=1, T=30, S=9, H=2, K=1, D=16, offset=-9, window=5, causal=False)
    with at(place) as device:
        *inputs, do, _ = make_inputs(case, "fp32", device)
        grads = (do, make_lse_gradient(case, "fp32", device))
        call = by_impl(case, None, "triton")
        want = run(call, inputs, grads)
        got = run(call, [*inputs, torch.full((2,), -torch.inf, device=device)], grads)
    assert not got[-1].any()
    for x, y in zip(got[:-1], want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_stays_in_its_document(place):
    with at(place) as device:
        inputs, do, documents_BT = make_all_inputs(SMALL, "fp32", device)
        grads = (do, make_lse_gradient(SMALL, "fp32", device))
        call = by_impl(SMALL, documents_BT, "triton")
        before = run(call, inputs, grads)
        inputs[2][0, 5] = torch.nan
        after = run(call, inputs, grads)
    for x, y in zip(before[:5], after[:5], strict=True):
        torch.testing.assert_close(x[:, :4], y[:, :4], rtol=2e-5, atol=2e-5)
    assert after[5].isnan().all()


@pytest.mark.parametrize("place", PLACES)
def test_operators_pass_opcheck(place):
    with at(place) as device:
        (q, k, v, sinks), do, _ = make_all_inputs(SMALL, "fp32", device)
        fixed = (None, None, 5, 0.25, 0.0, True, None, None, None)
        leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
        torch.library.opcheck(torch.ops.trimtab.attention_forward.default, (*leaves[:3], *fixed, leaves[3]))
        with torch.no_grad():
            o, lse = torch.ops.trimtab.attention_forward(q, k, v, *fixed, sinks)
        q, k, v, sinks = (x.detach() for x in leaves)
        torch.library.opcheck(
            torch.ops.trimtab.attention_backward.default,
            (do, q, k, v, o, lse, *fixed, sinks, make_lse_gradient(SMALL, "fp32", device)),
        )


@pytest.mark.parametrize("place", PLACES)
def test_traces_without_a_graph_break(place):
    with at(place) as device:
        inputs, do, documents_BT = make_all_inputs(SMALL, "fp32", device)
        call = by_impl(SMALL, documents_BT, "triton", return_lse=False)
        want = run(call, inputs, [do])
        traced = torch.compile(call, fullgraph=True, backend="aot_eager")
        for x, y in zip(run(traced, inputs, [do]), want, strict=True):
            torch.testing.assert_close(x, y)


def test_other_backends_raise():
    q = torch.randn(1, 4, 2, 8)
    for impl in IMPLS:
        if impl not in WITH_SINKS:
            with pytest.raises(ModelError, match="does not support sinks; use one of reference, triton"):
                attention(q, q, q, layout=Layout.causal(), sinks_H=torch.zeros(2), impl=impl)


def test_attention_without_keys():
    """The sink is the only logit."""
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 2, 8)
    sinks = torch.randn(2, requires_grad=True)
    o, lse = attention(q, k, k, layout=Layout.causal(), sinks_H=sinks, return_lse=True, impl="reference")
    lse.sum().backward()
    assert not o.any()
    assert torch.equal(lse, sinks.detach().expand(1, 3, 2))
    assert torch.equal(sinks.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("impl", WITH_SINKS)
def test_saved_bytes_match_autograd(impl, dtype):
    case = Case("", B=1, T=64, S=64, H=4, K=2, D=32, sinks=True)
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with at("interpreter"), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs = [x.requires_grad_() for x in make_all_inputs(case, dtype)[0]]
        kept = by_impl(case, None, impl, return_lse=False)(*inputs)
    predicted = spec.saved_bytes(impl, 1, 64, 64, 4, 2, 32, dtype, sinks=True)
    assert predicted == pytest.approx(sum(storages.values()), rel=0.15 if impl == "reference" else 0), (
        kept.shape
    )
