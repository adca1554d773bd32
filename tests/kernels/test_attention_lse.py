"""The log-sum-exp that attention returns, and its gradient."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import pytest
import torch
from attention_options import PLACES, at, by_impl, compare, dtypes_at, run

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention import IMPLS, Layout, attention, spec
from trimtab.kernels.attention.spec import CASES, WITH_LSE, Case, make_inputs, make_lse_gradient

NAMES = ("decode several, window", "soft cap, packed", "queries before any key")
SMALL = Case("small", B=2, T=20, S=20, H=6, K=2, D=16, documents=((20,), (7, 13)), window=9)
CHOSEN = [case for case in CASES if case.name in NAMES] + [SMALL]


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
    """In each result, and in the summand of dq and dk from the log-sum-exp alone."""
    assert not any(compare(SMALL, "reference", dtype, factor=1.01))
    through_lse = compare(SMALL, "reference", dtype, dlse_factor=1.01)
    assert [v.name for v in through_lse if not v] == ["dq", "dk"]


@pytest.mark.parametrize("place", PLACES)
def test_the_log_sum_exp_alone_has_gradients(place):
    """The output is unused: it has no gradient."""
    with at(place) as device:
        *inputs, _, documents_BT = make_inputs(SMALL, "fp32", device)
        dlse = make_lse_gradient(SMALL, "fp32", device)
        found = []
        for impl in WITH_LSE:
            leaves = [x.clone().requires_grad_() for x in inputs]
            lse = by_impl(SMALL, documents_BT, impl)(*leaves)[1]
            found.append(torch.autograd.grad(lse, leaves[:2], dlse))
    for want, got in zip(*found, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", PLACES)
def test_without_lse_the_backward_gets_no_lse_gradient(place, monkeypatch):
    """The backward gets no tensor of zeros instead, and the output is bitwise identical."""
    from trimtab.kernels.attention import launch_triton

    seen = []
    plain = launch_triton.backward

    def watched(*arguments, **options):
        seen.append(options["dlse_BTH"])
        return plain(*arguments, **options)

    monkeypatch.setattr(launch_triton, "backward", watched)
    with at(place) as device:
        q, k, v, do, documents_BT = make_inputs(SMALL, "fp32", device)
        layout = Layout.packed(documents_BT)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = attention(*leaves, layout=layout, window=SMALL.window, impl="triton")
        o.backward(do)
        with_lse = by_impl(SMALL, documents_BT, "triton")(*leaves)
        with_lse[0].backward(do)
    assert seen == [None, None]
    assert torch.equal(o, with_lse[0])


@pytest.mark.parametrize("place", PLACES)
def test_lse_gradients_of_fully_masked_queries_are_ignored(place):
    """Query 0 is before the first key; `logaddexp` of two −∞ gives it NaN."""
    with at(place) as device:
        for impl in WITH_LSE:
            q, k, v = (torch.randn(1, n, 2, 16, device=device, requires_grad=True) for n in (4, 3, 3))
            o, lse = attention(q, k, v, layout=Layout.causal(), return_lse=True, impl=impl)
            dlse = torch.ones_like(lse)
            dlse[:, 0] = torch.nan
            torch.autograd.backward((o, lse), (torch.ones_like(o), dlse))
            assert lse[:, 0].isneginf().all()
            assert not q.grad[:, 0].any()
            assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_stays_in_its_document(place):
    """Through the second pass of the backward kernels, which reads the gradient of the log-sum-exp too."""
    case = Case("packed", B=1, T=20, S=20, H=1, K=1, D=16, documents=((8, 12),))
    with at(place) as device:
        *inputs, do, documents_BT = make_inputs(case, "fp32", device)
        grads = (do, make_lse_gradient(case, "fp32", device))
        call = by_impl(case, documents_BT, "triton")
        before = run(call, inputs, grads)
        inputs[2][0, 10] = torch.nan
        after = run(call, inputs, grads)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x[:, :8], y[:, :8], rtol=2e-5, atol=2e-5)
    assert after[2][0, 10:].isnan().any()


@pytest.mark.parametrize("place", PLACES)
def test_operators_pass_opcheck(place):
    with at(place) as device:
        q, k, v, do, documents_BT = make_inputs(SMALL, "fp32", device)
        bounds = Layout.packed(documents_BT).prepare("triton", device, SMALL.T)
        fixed = (bounds.first_BT, bounds.last_BT, 9, 0.25, 0.0, True)
        o, lse = torch.ops.trimtab.attention_forward(q, k, v, *fixed)
        dlse = make_lse_gradient(SMALL, "fp32", device)
        torch.library.opcheck(
            torch.ops.trimtab.attention_backward.default, (do, q, k, v, o, lse, *fixed, dlse)
        )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("impl", WITH_LSE)
def test_traces_without_a_graph_break(impl, place):
    with at(place) as device:
        *inputs, do, documents_BT = make_inputs(SMALL, "fp32", device)
        grads = (do, make_lse_gradient(SMALL, "fp32", device))
        call = by_impl(SMALL, documents_BT, impl)
        want = run(call, inputs, grads)
        traced = torch.compile(call, fullgraph=True, backend="aot_eager")
        for x, y in zip(run(traced, inputs, grads), want, strict=True):
            torch.testing.assert_close(x, y)


def test_the_readable_implementation():
    """Several tiles, and fully masked queries."""
    from trimtab.kernels.attention.impl_tiled import FlashAttentionWithLSE

    for n_q, n_k in ((70, 70), (70, 65), (5, 70)):
        case = Case("twin", B=2, T=n_q, S=n_k, H=1, K=1, D=16)
        q, k, v, do, _ = make_inputs(case, "fp64")
        dlse = make_lse_gradient(case, "fp64")
        got = run(
            lambda *qkv: FlashAttentionWithLSE.apply(*qkv, True),
            [x.squeeze(2) for x in (q, k, v)],
            [do.squeeze(2), dlse.squeeze(2)],
        )
        want = run(by_impl(case, None, "reference"), (q, k, v), (do, dlse))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.view_as(y), y, rtol=1e-10, atol=1e-10)


def test_other_backends_raise():
    q = torch.randn(1, 4, 2, 8)
    for impl in IMPLS:
        if impl not in WITH_LSE:
            with pytest.raises(ModelError, match=r"log-sum-exp; use one of reference, triton"):
                attention(q, q, q, layout=Layout.causal(), return_lse=True, impl=impl)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("impl", WITH_LSE)
def test_saved_bytes_match_autograd(impl, dtype):
    B, T, H, K, D = 1, 64, 4, 2, 32
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with at("interpreter"), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs = [x.requires_grad_() for x in make_inputs(Case("", B, T, T, H, K, D), dtype)[:3]]
        kept = attention(*inputs, layout=Layout.causal(), return_lse=True, impl=impl)
    measured = sum(storages.values())
    predicted = spec.saved_bytes(impl, B, T, T, H, K, D, dtype, lse=True)
    assert predicted == pytest.approx(measured, rel=0.15 if impl == "reference" else 0), kept[1].shape
