"""NaN and infinity in packed rows: the Triton kernels keep them in their document, masks do not."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels_attention import by_impl, run

from trimtab.kernels.attention import Layout, attention, choose_attention
from trimtab.kernels.attention.spec import Case, make_inputs

pytest.importorskip("triton")
from test_attention_triton import PLACES, at

from trimtab.kernels.attention import launch_triton

LENGTHS = (9, 14, 14)
PACKED = Case("packed", B=2, T=37, S=37, H=2, K=1, D=16, documents=(LENGTHS, (37,)))
LONGER = Case("packed", B=2, T=700, S=700, H=8, K=2, D=64, documents=((9, 14, 677), (700,)))
"""For a GPU, whose tiles are larger; the bad token is at the same position."""
SECOND = slice(9, 23)
BAD_TOKEN = 14
NAMES = ("q", "k", "v", "do")


def poisoned(name, bad, case=PACKED, dtype="fp32", device="cpu", impl="triton"):
    """(o, dq, dk, dv) without and with one bad value, in the second document of the first row."""
    *inputs, grad, documents_BT = make_inputs(case, dtype, device)
    call = by_impl(case, documents_BT, impl)
    before = run(call, inputs, grad)
    tensors = dict(zip(NAMES, (x.clone() for x in (*inputs, grad)), strict=True))
    tensors[name][0, BAD_TOKEN, 0, 3] = bad
    *inputs, grad = tensors.values()
    return before, run(call, inputs, grad)


TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}
"""A tile that contains a bad value is summed in another order."""


def assert_others_keep(before, after, dtype):
    for what, x, y in zip(("o", "dq", "dk", "dv"), before, after, strict=True):
        x, y, tolerance = others(x), others(y), TOLERANCE[dtype]
        torch.testing.assert_close(y, x, rtol=tolerance, atol=tolerance, msg=lambda m, w=what: f"{w}: {m}")


def others(x):
    """Everything but the second document of the first row."""
    return torch.cat([x[0, : SECOND.start], x[0, SECOND.stop :], x[1]])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "bad", "softcap"),
    [*((name, torch.nan, None) for name in NAMES), ("k", torch.inf, None), ("v", torch.inf, 5.0)],
)
def test_other_documents_are_unaffected(name, bad, softcap, place):
    case = replace(PACKED if place == "interpreter" else LONGER, softcap=softcap)
    with at(place) as device:
        for dtype in ("fp32",) if place == "interpreter" else ("fp32", "fp16", "bf16"):
            before, after = poisoned(name, bad, case, dtype, device)
            assert_others_keep(before, after, dtype)
            # It is not masked either: a bad query, key or value shows in the output, a bad gradient in a gradient.
            seen = after[0] if name != "do" else after[1]
            assert not seen[0, BAD_TOKEN : SECOND.stop].isfinite().all(), dtype


@pytest.mark.parametrize("place", PLACES)
def test_earlier_tokens_of_the_document_are_unaffected(place):
    """A query does not attend to later keys, whatever their values."""
    with at(place) as device:
        before, after = poisoned("v", torch.nan, device=device)
        torch.testing.assert_close(before[0][0, :BAD_TOKEN], after[0][0, :BAD_TOKEN], rtol=2e-5, atol=2e-5)
        # for all heads that share the key/value head, from this token to the document's end, the bad entry alone
        bad = after[0].isnan()
        assert bad[0, BAD_TOKEN : SECOND.stop, :, 3].all()
        assert bad.sum() == PACKED.H * (SECOND.stop - BAD_TOKEN)


@pytest.mark.parametrize("name", ["v", "do"])
def test_tiles_read_through_descriptors_too(name, monkeypatch):
    """As on Hopper: larger tiles, and rows past the end filled with zeros."""
    monkeypatch.setattr(launch_triton, "_capability", lambda x: 90)
    with at("interpreter"):
        before, after = poisoned(name, torch.nan, dtype="fp16")
    assert_others_keep(before, after, "fp16")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scale", [0.0, 1e-46, -0.5])
@pytest.mark.parametrize("impl", ["triton", "sdpa_math", "reference"])
def test_any_scale(impl, scale, place):
    """0 weights all visible keys equally; a masked score of −∞ times 0 would be NaN."""
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(PACKED, "fp32", device)
        layout = Layout.packed(documents_BT)

        def call(q, k, v):
            return attention(q, k, v, layout=layout, scale=scale, impl=impl)

        got = run(call, inputs, grad)
        want = run(
            lambda q, k, v: attention(q * scale, k, v, layout=layout, scale=1.0, impl="reference"),
            inputs,
            grad,
        )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


MASKED = ["reference", "sdpa_math", "sdpa_flash", pytest.param("sdpa_efficient", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("impl", MASKED)
def test_a_mask_does_not_stop_nan(impl):
    """The weight 0 of a masked key times NaN is NaN, as the choice's reason states."""
    device = "cuda" if impl == "sdpa_efficient" else "cpu"
    before, after = poisoned("v", torch.nan, device=device, impl=impl)
    assert before[0].isfinite().all()
    assert not others(after[0]).isfinite().all()
    choice = choose_attention(
        device=device, capability=(8, 0) if device == "cuda" else None, dtype="fp32", head_dim=16, packed=True,
        window=None, training=True,
    )  # fmt: skip
    assert "a NaN in one document affects the others of its row" in choice.reason


@pytest.mark.gpu
def test_varlen_stops_nan():
    before, after = poisoned("v", torch.nan, dtype="bf16", device="cuda", impl="varlen")
    assert torch.equal(others(before[0]), others(after[0]))


@pytest.mark.parametrize("impl", ["reference", "sdpa_flash"])
@pytest.mark.parametrize(("B", "T", "S"), [(2, 0, 5), (0, 3, 3), (2, 4, 0)])
def test_no_queries_give_gradients_of_zeros(B, T, S, impl):
    q = torch.randn(B, T, 4, 8, requires_grad=True)
    k, v = (torch.randn(B, S, 2, 8, requires_grad=True) for _ in range(2))
    attention(q, k, v, layout=Layout.causal(), impl=impl).sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))
