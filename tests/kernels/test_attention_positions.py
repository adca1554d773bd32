"""Non-causal attention, and queries at any position among, before and after the keys."""

# B batch, T queries, S keys, L positions of a row, H query heads, K key/value heads, D head size

from __future__ import annotations

import pytest
import torch
from attention_options import PLACES, at, by_impl, compare, run, true_results
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_tools import SHARED_LIMIT

from trimtab.facts.errors import ModelError
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.attention import IMPLS, Layout, attention, spec
from trimtab.kernels.attention.spec import (
    BIDIRECTIONAL,
    OPTION_CASES,
    WITH_OFFSET,
    Case,
    make_inputs,
    make_lse_gradient,
)
from trimtab.kernels.attention.tiles import KERNELS

MASKED = ("sdpa_math", "sdpa_flash")
PLACED = [case for case in OPTION_CASES if not case.sinks]


@pytest.mark.parametrize("case", PLACED, ids=lambda c: c.name)
def test_the_reference_is_exact(case):
    for dtype in ("fp64", "fp32"):
        for checked in compare(case, "reference", dtype):
            assert checked, (dtype, checked)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", PLACED, ids=lambda c: c.name)
def test_triton_is_exact(case, place):
    with at(place) as device:
        for dtype in ("fp32",) if place == "interpreter" else ("fp32", "fp16", "bf16"):
            for checked in compare(case, "triton", dtype, device):
                assert checked, (dtype, checked)


def test_one_percent_error_fails():
    for case in PLACED[4], PLACED[7]:
        assert not any(compare(case, "reference", "fp32", factor=1.01))


@pytest.mark.parametrize("impl", [*MASKED, pytest.param("sdpa_efficient", marks=pytest.mark.gpu)])
def test_masks_are_exact(impl):
    """Without the log-sum-exp, which these do not return."""
    device = "cuda" if impl == "sdpa_efficient" else "cpu"
    for case in PLACED:
        *inputs, do, documents_BS = make_inputs(case, "fp32", device)
        got, own = (
            run(by_impl(case, documents_BS, name, return_lse=False), inputs, [do])
            for name in (impl, "reference")
        )
        true = run_without_lse(case)
        for name, x, t, r in zip(("o", "dq", "dk", "dv"), got, true, own, strict=True):
            floor = 0.1 * float(true[3].abs().max())
            checked = check_accuracy(
                name, x.cpu(), truth=t, reference=r.cpu(), tolerance=TOLERANCE["fp32"], floor=floor
            )
            assert checked, (case, checked)


def run_without_lse(case):
    """In fp64, by the reference, which the test above compares with the loops."""
    *inputs, do, documents_BS = make_inputs(case, "fp64")
    return run(by_impl(case, documents_BS, "reference", return_lse=False), inputs, [do])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sdpa_flash", "sdpa_cudnn"])
def test_backends_without_a_mask_attend_to_all_keys(impl):
    case = Case("gpu", B=2, T=100, S=130, H=4, K=2, D=64, causal=False)
    *inputs, do, _ = make_inputs(case, "bf16", "cuda")
    got, want = (run(by_impl(case, None, name, return_lse=False), inputs, [do]) for name in (impl, "triton"))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    window=st.none() | st.integers(1, 30),
    causal=st.booleans(),
    packed=st.booleans(),
    data=st.data(),
)
def test_random_positions(lengths, heads, window, causal, packed, data):
    S = sum(lengths)
    T = data.draw(st.integers(1, S))
    offset = data.draw(st.integers(0, S - T) if packed else st.integers(-10, S + 10))
    documents = (tuple(lengths),) if packed else None
    case = Case("drawn", 1, T, S, *heads, 8, window, documents, causal=causal, offset=offset)
    with at("interpreter"):
        for checked in compare(case, "triton", "fp32"):
            assert checked, checked


def combined(one, other):
    """(o, lse) over all keys from those over two parts of them, as ring attention does."""
    (o, lse), (o_other, lse_other) = one, other
    most = torch.maximum(lse, lse_other).detach()
    most = most.masked_fill(most.isneginf(), 0.0)  # a query that is fully masked in both
    weight, weight_other = (lse - most).exp(), (lse_other - most).exp()
    total = weight + weight_other
    share = torch.where(total > 0, total, 1.0)[..., None]
    return (o * weight[..., None] + o_other * weight_other[..., None]) / share, total.log() + most


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", B=1, T=9, S=30, H=2, K=1, D=16, offset=7),
        Case("packed", B=1, T=12, S=30, H=4, K=2, D=16, documents=((11, 5, 14),), offset=10, window=9),
        Case("not causal", B=1, T=12, S=30, H=2, K=2, D=16, documents=((6, 9, 15),), offset=9, causal=False),
    ],
    ids=lambda c: c.name,
)
def test_results_over_two_halves_of_the_keys_combine(case, impl, place):
    """Including gradients, through both outputs and both log-sum-exps."""
    if impl == "reference" and place == "gpu":
        pytest.skip("the same on a CPU")
    with at(place) as device:
        *inputs, do, documents_BL = make_inputs(case, "fp32", device)
        dlse = make_lse_gradient(case, "fp32", device)
        rows = Layout.causal() if documents_BL is None else Layout.packed(documents_BL)

        def halves(q, k, v):
            parts = []
            for first, stop in ((0, 13), (13, case.S)):
                parts.append(
                    attention(
                        q, k[:, first:stop], v[:, first:stop], layout=rows.from_key(first), window=case.window,
                        causal=case.causal, offset=case.offset - first, return_lse=True, impl=impl,
                    )
                )  # fmt: skip
            return combined(*parts)

        got = run(halves, inputs, (do, dlse))
    for x, y in zip(got, true_results(case), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_nan_stays_in_its_document(causal, place):
    """Through the kernels' second pass, with fewer queries than keys."""
    case = Case("packed", B=1, T=12, S=24, H=2, K=1, D=16, documents=((10, 14),), offset=6, causal=causal)
    with at(place) as device:
        *inputs, do, documents_BS = make_inputs(case, "fp32", device)
        grads = (do, make_lse_gradient(case, "fp32", device))
        call = by_impl(case, documents_BS, "triton")
        before = run(call, inputs, grads)
        inputs[2][0, 12] = torch.nan
        after = run(call, inputs, grads)
    for n, (x, y) in enumerate(zip(before, after, strict=True)):
        end = 10 if n in (3, 4) else 4  # keys, or queries, of the first document
        torch.testing.assert_close(x[:, :end], y[:, :end], rtol=2e-5, atol=2e-5)
    assert after[0][:, 6:].isnan().all()


@pytest.mark.parametrize("place", PLACES)
def test_operators_pass_opcheck(place):
    case = Case("small", B=1, T=6, S=18, H=2, K=1, D=16, documents=((8, 10),), causal=False, offset=4)
    with at(place) as device:
        q, k, v, _, documents_BS = make_inputs(case, "fp32", device)
        bounds = Layout.packed(documents_BS).prepare(
            "triton", device, case.T, S=case.S, causal=False, offset=4
        )
        fixed = (bounds.first_BT, bounds.last_BS, 5, 0.25, 0.0, False, bounds.last_BT, bounds.first_BS, 4)
        torch.library.opcheck(
            torch.ops.trimtab.attention_forward.default, (q.requires_grad_(), k.requires_grad_(), v, *fixed)
        )


@pytest.mark.parametrize("place", PLACES)
def test_traces_without_a_graph_break(place):
    case = PLACED[4]
    with at(place) as device:
        *inputs, do, documents_BS = make_inputs(case, "fp32", device)
        grads = (do, make_lse_gradient(case, "fp32", device))
        call = by_impl(case, documents_BS, "triton")
        want = run(call, inputs, grads)
        traced = torch.compile(call, fullgraph=True, backend="aot_eager")
        for x, y in zip(run(traced, inputs, grads), want, strict=True):
            torch.testing.assert_close(x, y)


def test_kernels_with_every_option_fit():
    """Two-sided bounds, an offset, sinks and a gradient of the log-sum-exp, on one architecture: a second each."""
    pytest.importorskip("triton")
    from attention_compile import compiled

    for name in KERNELS:
        made = compiled(name, 90, "bf16", 128, tma=True, options=True)
        assert made.shared <= SHARED_LIMIT[90], (name, made.shared)
        assert "f64" not in made.ptx
        assert not made.spills or made.spills <= 96, (name, made.spills)


def test_other_backends_raise():
    q = torch.randn(1, 4, 2, 8)
    for impl in IMPLS:
        if impl not in BIDIRECTIONAL:
            with pytest.raises(ModelError, match="supports causal attention only; use one of reference"):
                attention(q, q, q, layout=Layout.causal(), causal=False, impl=impl)
        if impl not in WITH_OFFSET:
            with pytest.raises(
                ModelError, match="requires the queries to be the last positions; use one of reference"
            ):
                attention(q[:, :2], q, q, layout=Layout.causal(), offset=1, impl=impl)
    layout = Layout.packed(torch.tensor([[0, 0, 1, 1]]))
    with pytest.raises(ModelError, match="2 queries from position 3 on and 4 keys from position 0 on"):
        attention(q[:, :2], q, q, layout=layout, offset=3, impl="reference")


def test_attention_without_keys():
    q, k = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 0, 2, 8, requires_grad=True)
    o, lse = attention(q, k, k, layout=Layout.causal(), causal=False, return_lse=True, impl="reference")
    o.sum().backward()
    assert not o.any()
    assert lse.isneginf().all()
    assert not q.grad.any()


@given(
    T=st.integers(0, 12),
    S=st.integers(0, 12),
    window=st.none() | st.integers(1, 15),
    causal=st.booleans(),
    offset=st.none() | st.integers(-20, 20),
)
def test_visible_pairs_counts_the_mask(T, S, window, causal, offset):
    seen = Layout.causal().visible(T, S, window, causal=causal, offset=offset)
    assert spec.visible_pairs(T, S, window, causal=causal, offset=offset) == int(seen.sum())
