"""The Triton kernels of attention: exact in the interpreter and on a GPU, and within every GPU's resources.

The same tests run in both; bf16 is inaccurate in the interpreter, so it is tested on a GPU only.
"""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kernels_attention import by_impl, compare, run
from triton_tools import CHIPS, SHARED_LIMIT, interpreted

from trimtab.kernels.attention import Layout, attention, spec
from trimtab.kernels.attention.spec import CASES, Case, make_inputs
from trimtab.kernels.attention.tiles import KERNELS, Tiles, tiles

pytest.importorskip("triton")
from attention_compile import compiled

from trimtab.kernels.attention import impl_triton, kernels_backward, kernels_forward, launch_triton

PLACES = ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)]
SMALL = Case("small", B=2, T=40, S=40, H=4, K=2, D=16, documents=((40,), (7, 33)))


@contextlib.contextmanager
def at(place):
    """Yields the device; on the CPU every kernel is interpreted."""
    if place == "gpu":
        yield "cuda"
    else:
        with interpreted(kernels_forward, kernels_backward, launch_triton):
            yield "cpu"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_exact(case, place):
    with at(place) as device:
        for dtype in ("fp32", "fp16") if place == "interpreter" else ("fp32", "fp16", "bf16"):
            for checked in compare(case, "triton", dtype, device):
                assert checked, (dtype, checked)


@pytest.mark.parametrize("place", PLACES)
def test_one_percent_error_fails(place):
    with at(place) as device:
        assert not any(compare(SMALL, "triton", "fp32", device, factor=1.01))


HEADS = (16, 20, 64, 80, 96, 128, 160, 256)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("D", HEADS)
def test_head_sizes(D, place):
    case = Case("heads", B=1, T=70, S=70, H=3, K=1, D=D, window=50, documents=((41, 29),))
    with at(place) as device:
        for dtype in ("fp32",) if place == "interpreter" else ("fp32", "fp16", "bf16"):
            for checked in compare(case, "triton", dtype, device):
                assert checked, (dtype, checked)


lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=2)


@settings(max_examples=10, deadline=None)
@given(
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 1), (6, 2), (5, 5)]),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.sampled_from([1.0, 20.0]),
    D=st.sampled_from([8, 16, 24]),
)
def test_random_packed_shapes(lengths, heads, window, softcap, D):
    T = max(map(sum, lengths))
    rows = tuple((*row, T - sum(row)) if sum(row) < T else tuple(row) for row in lengths)
    case = Case("drawn", len(rows), T, T, *heads, D, window, rows, softcap=softcap)
    with at("interpreter") as device:
        for checked in compare(case, "triton", "fp32", device):
            assert checked, checked


@settings(max_examples=10, deadline=None)
@given(
    T=st.integers(1, 70),
    S=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 60),
)
@example(T=55, S=1, heads=(1, 1), window=None)  # a single key: dq and dk cancel to zero
@example(T=2, S=1, heads=(4, 2), window=None)
def test_random_lengths(T, S, heads, window):
    case = Case("drawn", 2, T, S, *heads, 16, window)
    with at("interpreter") as device:
        for checked in compare(case, "triton", "fp32", device):
            assert checked, checked


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chosen", [Tiles(16, 32, 4, 1), Tiles(64, 16, 4, 2), Tiles(32, 64, 8, 1)])
def test_results_do_not_depend_on_tiling(chosen, place):
    """Tiles larger and smaller than documents, windows and groups."""
    case = Case("tiles", B=1, T=150, S=150, H=6, K=2, D=16, window=77, documents=((20, 100, 30),))
    *inputs, grad, documents_BT = make_inputs(case, "fp32")
    arguments = launch_triton.KernelArguments(case.window, 0.25, 0.0, True)
    with at(place) as device:
        inputs, grad = [x.to(device) for x in inputs], grad.to(device)
        bounds = Layout.packed(documents_BT).prepare("triton", device, case.T)
        o, lse = launch_triton.forward(*inputs, bounds.first_BT, arguments, with_tiles=chosen)
        grads = launch_triton.backward(
            grad, *inputs, o, lse, bounds.first_BT, bounds.last_BT, arguments, with_tiles=(chosen, chosen)
        )
        want = run(by_impl(case, documents_BT, "reference"), inputs, grad)
    for x, y in zip((o, *grads), want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", PLACES)
def test_strided_inputs_and_gradients(place):
    """Views of one projection, heads before tokens, a broadcast upstream gradient, heads that are not contiguous."""
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(SMALL, "fp32", device)
        call = by_impl(SMALL, documents_BT, "triton")
        want = run(call, inputs, grad)
        wide = torch.full((2, 40, 8, 20), torch.nan, device=device)
        q, k, v = wide[:, :, :4, :16], wide[:, :, 4:6, :16], wide[:, :, 6:, :16]
        swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
        for view, x in zip((q, k, v), inputs, strict=True):
            view.copy_(x)
        for views in ((q, k, v), swapped, apart):
            leaves = [x.detach().requires_grad_() for x in views]
            out = call(*leaves)
            assert torch.equal(out, want[0])
            strided_grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
            for got, true in zip(torch.autograd.grad(out, leaves, strided_grad), want[1:], strict=True):
                assert torch.equal(got, true)
        for expanded in (torch.ones((), device=device), torch.randn(16, device=device)):
            upstream = expanded.expand_as(grad)
            got, true = run(call, inputs, upstream), run(call, inputs, upstream.contiguous())
            assert all(torch.equal(x, y) for x, y in zip(got, true, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_outputs_are_fully_written_and_inputs_unchanged(place, monkeypatch):
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    case = Case("rows fully masked", B=2, T=33, S=33, H=2, K=1, D=24, documents=((1, 32), (30, 3)), window=5)
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(case, "fp32", device)
        before = [x.clone() for x in (*inputs, grad)]
        monkeypatch.setattr(launch_triton.torch, "empty", poisoned)
        results = run(by_impl(case, documents_BT, "triton"), inputs, grad)
        monkeypatch.undo()
    assert all(x.isfinite().all() for x in results)
    assert all(torch.equal(x, y) for x, y in zip((*inputs, grad), before, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_deterministic(place):
    case = (
        SMALL
        if place == "interpreter"
        else Case("b", 2, 2000, 2000, 8, 2, 64, documents=((2000,), (700, 1300)))
    )
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(case, "fp16", device)
        once, again = (run(by_impl(case, documents_BT, "triton"), inputs, grad) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_operators_pass_opcheck(place):
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(SMALL, "fp32", device)
        bounds = Layout.packed(documents_BT).prepare("triton", device, SMALL.T)
        numbers = (launch_triton.NO_WINDOW, 0.25, 0.0, True)
        q, k, v = (x.requires_grad_() for x in inputs)
        torch.library.opcheck(
            torch.ops.trimtab.attention_forward.default,
            (q, k, v, bounds.first_BT, bounds.last_BT, *numbers),
        )
        torch.library.opcheck(
            torch.ops.trimtab.attention_forward.default, (q[:, :1], k, v, None, None, *numbers)
        )
        with torch.no_grad():
            o, lse = torch.ops.trimtab.attention_forward(q, k, v, None, None, *numbers)
            torch.library.opcheck(
                torch.ops.trimtab.attention_backward.default,
                (grad, q.detach(), k.detach(), v.detach(), o, lse, None, None, *numbers),
            )


@pytest.mark.parametrize("place", PLACES)
def test_traces_without_a_graph_break(place):
    with at(place) as device:
        *inputs, grad, documents_BT = make_inputs(SMALL, "fp32", device)
        layout = Layout.packed(documents_BT)
        layout.prepare("triton", device, SMALL.T)

        def call(q, k, v):
            return attention(q, k, v, layout=layout, window=9, softcap=3.0, impl="triton")

        traced = torch.compile(call, fullgraph=True, backend="aot_eager")
        for got, want in zip(run(traced, inputs, grad), run(call, inputs, grad), strict=True):
            torch.testing.assert_close(got, want)


def test_saved_bytes_match_autograd():
    B, T, H, K, D = 2, 128, 4, 2, 32
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with at("interpreter"), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs = [x.requires_grad_() for x in make_inputs(Case("", B, T, T, H, K, D), "fp16")[:3]]
        attention(*inputs, layout=Layout.causal(), impl="triton")
    assert sum(storages.values()) == spec.saved_bytes("triton", B, T, T, H, K, D, "fp16")


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 300, 8, 96, requires_grad=True), torch.empty(2, 300, 2, 96, requires_grad=True)
        o = attention(q, k, k, layout=Layout.causal(), impl="triton")
        o.sum().backward()
    assert o.shape == q.grad.shape == q.shape
    assert k.grad.shape == k.shape
    assert impl_triton.NO_WINDOW > 300


@pytest.mark.parametrize("chip", CHIPS)
def test_every_configuration_fits_every_chip(chip):
    """Tiles depend only on the padded head size and the element width: three sizes, two widths, three kernels."""
    for D in (64, 128, 256):
        assert chip != 90 or tiles("key", D, 2, 90) == tiles("key", D, 2, 90, packed=True)
        for dtype in ("fp16", "fp32") if chip < 80 else ("bf16", "fp32"):
            if dtype == "fp32" and chip not in (75, 90):
                assert tiles("key", D, 4, chip) == tiles("key", D, 4, 75)  # compiled once, for 75
                continue
            for name in KERNELS:
                made = compiled(name, chip, dtype, D, softcap=D == 64, packed=D != 128)
                assert made.shared <= SHARED_LIMIT[chip], (name, D, dtype, made.shared)
                assert "f64" not in made.ptx, (name, D, dtype)
                assert ("wgmma" in made.ptx) == (chip == 90 and dtype == "bf16"), (name, D)


@pytest.mark.parametrize("name", KERNELS)
def test_padded_heads_and_odd_groups_compile(name):
    for D, G in ((80, 3), (96, 1)):
        made = compiled(name, 90, "bf16", D, G=G)
        assert made.shared <= SHARED_LIMIT[90]


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """A batch whose queries have more than 2³¹ elements; its last row is compared with itself alone."""
    B, T, H, K, D = 33, 16384, 32, 4, 128
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16, generator=generator)
    assert q.numel() > 2**31
    k, v = (
        torch.randn(B, T, K, D, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, layout=Layout.causal(), window=300, impl="triton")
    grads = torch.autograd.grad(out, leaves, out.detach())
    alone = [x[-1:].detach().requires_grad_() for x in leaves]
    true = attention(*alone, layout=Layout.causal(), window=300, impl="triton")
    assert torch.equal(out[-1:], true)
    for got, want in zip(grads, torch.autograd.grad(true, alone, true.detach()), strict=True):
        assert torch.equal(got[-1:], want)


def test_descriptors_and_pointers_are_bitwise_identical(monkeypatch):
    """Hopper's TMA against pointers with the same tiles, ragged ends included."""
    case = Case("descriptors", B=2, T=75, S=75, H=4, K=2, D=24, window=50, documents=((75,), (7, 68)))
    monkeypatch.setattr(launch_triton, "_capability", lambda x: 90)
    with at("interpreter") as device:
        *inputs, grad, documents_BT = make_inputs(case, "fp16", device)
        described = run(by_impl(case, documents_BT, "triton"), inputs, grad)
        for checked in compare(case, "triton", "fp16", device):
            assert checked, checked
        monkeypatch.setattr(launch_triton, "_supports_tma", lambda x: False)
        pointed = run(by_impl(case, documents_BT, "triton"), inputs, grad)
    assert all(torch.equal(x, y) for x, y in zip(described, pointed, strict=True))


@pytest.mark.parametrize("chip", [90, 100, 120])
def test_descriptors_fit_too(chip):
    for D in (64, 128, 256):
        for name in KERNELS:
            made = compiled(name, chip, "bf16", D, tma=True)
            assert made.shared <= SHARED_LIMIT[chip], (name, D, made.shared)
            assert "cp.async.bulk.tensor" in made.ptx
            # dk and dv of heads of 256: the fastest tiles on an H200 spill, see the README's sweep
            limit = 320 if (name, D) == ("key", 256) else 96
            assert chip != 90 or not made.spills or made.spills <= limit, (name, D, made.spills)
