"""Every attention implementation against a truth computed by loops, over the spec's cases."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

import functools
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import ModelError
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.attention import IMPLS, Layout, attention, choose_attention
from trimtab.kernels.attention.spec import CAPPED, CASES, Case, make_inputs

CPU_IMPLS = ("reference", "sdpa_math", "sdpa_flash")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def truth(q_BTHD, k_BSKD, v_BSKD, case):
    """The formula of the public function, one query at a time, sharing no code with any implementation."""
    (B, T, H, D), S = q_BTHD.shape, k_BSKD.shape[1]
    scale = D**-0.5 if case.scale is None else case.scale
    rows = []
    for b in range(B):
        ends = []
        for length in case.documents[b] if case.documents else ():
            ends.append(length + (ends[-1] if ends else 0))
        for t in range(T):
            i = t + S - T
            first = max([0] + [end for end in ends if end <= i])
            first = max(first, 0 if case.window is None else i - case.window + 1)
            for h in range(H):
                g = h * k_BSKD.shape[2] // H
                if i < first:
                    rows.append(q_BTHD[b, t, h] * 0)
                    continue
                s = scale * k_BSKD[b, first : i + 1, g] @ q_BTHD[b, t, h]
                p = (s if case.softcap is None else case.softcap * (s / case.softcap).tanh()).softmax(0)
                rows.append(p @ v_BSKD[b, first : i + 1, g])
    return torch.stack(rows).view(q_BTHD.shape) if rows else q_BTHD.clone()


def run(function, inputs, grad):
    """(output, dq, dk, dv); an unused input has a gradient of zeros."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)),
    ]


@functools.cache
def true_results(case):
    *exact, grad, _ = make_inputs(case, "fp64")
    return run(lambda q, k, v: truth(q, k, v, case), exact, grad)


def by_impl(case, documents_BT, impl):
    layout = Layout.causal() if documents_BT is None else Layout.packed(documents_BT)

    def call(q, k, v):
        return attention(
            q, k, v, layout=layout, window=case.window, scale=case.scale, softcap=case.softcap, impl=impl
        )

    return call


def compare(case, impl, dtype, device="cpu", factor=1.0, forward_only=False):
    """Verdicts for the output and each gradient."""
    true = true_results(case)
    *inputs, grad, documents_BT = make_inputs(case, dtype, device)
    own = run(by_impl(case, documents_BT, "reference"), inputs, grad)
    if impl == "reference" and dtype != "fp64":
        got = [x * factor for x in own]
    elif forward_only:
        got = [by_impl(case, documents_BT, impl)(*inputs)]
    else:
        got = [x * factor for x in run(by_impl(case, documents_BT, impl), inputs, grad)]
    assert all(x.dtype == getattr(torch, TORCH_NAMES[dtype]) for x in got)
    assert got[0].shape == inputs[0].shape
    # Without cancellation dq and dk are as large as dv.
    dv = true[3] if true[3].numel() else torch.zeros(1)
    floors = {"floor": 0.1 * float(dv.square().mean().sqrt()), "peak_floor": 0.1 * float(dv.abs().max())}
    return [
        check_accuracy(name, x.cpu(), truth=t, reference=r.cpu(), tolerance=TOLERANCE[dtype], **floors)
        for name, x, t, r in zip(("o", "dq", "dk", "dv"), got, true, own, strict=False)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_exact_in_fp32_and_fp64(impl, case):
    if case.softcap is not None and impl not in CAPPED:
        with pytest.raises(ModelError, match="does not support softcap"):
            compare(case, impl, "fp32")
        return
    for dtype in ("fp64", "fp32"):
        for checked in compare(case, impl, dtype):
            assert checked, (dtype, checked)


def test_the_reference_is_the_formula():
    """fp64 against the loops without a tolerance for the reference's own error."""
    for case in CASES:
        *exact, grad, documents_BT = make_inputs(case, "fp64")
        for got, true in zip(
            run(by_impl(case, documents_BT, "reference"), exact, grad),
            true_results(case),
            strict=True,
        ):
            torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("name", ["odd", "packed, window", "decode several"])
def test_exact_in_16_bits(name, impl, dtype):
    case = next(c for c in CASES if c.name == name)
    for checked in compare(case, impl, dtype):
        assert checked, checked


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "packed", "window", "decode several"])
def test_one_percent_error_fails(name, dtype):
    case = next(c for c in CASES if c.name == name)
    accuracy_checks = compare(case, "reference", dtype, factor=1.01)
    assert not any(accuracy_checks), accuracy_checks


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    window=st.none() | st.integers(1, 14),
    impl=st.sampled_from(CPU_IMPLS),
)
def test_packed_equals_each_document_alone(lengths, heads, window, impl):
    T = max(sum(row) for row in lengths)
    rows = [[*row, T - sum(row)] if sum(row) < T else row for row in lengths]
    case = Case("drawn", len(rows), T, T, *heads, 8, window, tuple(map(tuple, rows)))
    q, k, v, grad, documents_BT = make_inputs(case, "fp64", seed=T)
    documents_BT = documents_BT * 3 - 1  # ids need not be consecutive nor positive
    packed = run(by_impl(case, documents_BT, impl), (q, k, v), grad)
    alone = [torch.empty_like(x) for x in packed]
    for b, row in enumerate(rows):
        start = 0
        for length in row:
            part = (slice(b, b + 1), slice(start, start + length))
            results = run(by_impl(case, None, impl), [x[part] for x in (q, k, v)], grad[part])
            for whole, result in zip(alone, results, strict=True):
                whole[part] = result
            start += length
    for got, want in zip(packed, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_recurring_id_is_another_document():
    case = Case("runs", 1, 6, 6, 2, 2, 8, documents=((2, 2, 2),))
    q, k, v, _, documents_BT = make_inputs(case, "fp64")
    again = torch.tensor([[0, 0, 1, 1, 0, 0]])
    for impl in CPU_IMPLS:
        torch.testing.assert_close(
            by_impl(case, again, impl)(q, k, v), by_impl(case, documents_BT, impl)(q, k, v)
        )


def test_a_form_is_cached_and_old_ones_are_evicted():
    layout = Layout.packed(torch.tensor([[0, 0, 1, 1]]))
    first = layout.prepare("sdpa_flash", "cpu", 4)
    assert layout.prepare("sdpa_math", "cpu", 4) is first  # one mask is shared by every masked backend
    assert layout.prepare("sdpa_flash", "cpu", 4, window=1) is not first
    assert (
        layout.prepare("sdpa_flash", "cpu", 4, window=9) is first
    )  # a window beyond the sequence masks nothing
    cache = Layout.causal()
    for S in range(2, 100):
        cache.prepare("sdpa_flash", "cpu", 2, S=S)
    assert len(cache._forms) <= 8


def test_offsets_of_documents():
    layout = Layout.packed(torch.tensor([[0, 0, 0, 1], [5, 5, -1, -1]]))
    offsets = layout.prepare("varlen", "cpu", 4)
    assert offsets.starts_q.tolist() == [0, 3, 4, 6, 8]
    assert offsets.starts_q.dtype == torch.int32
    assert 3 <= offsets.longest_q <= 4
    offsets = Layout.causal().prepare("varlen", "cpu", 2, S=5, B=3)
    assert (offsets.starts_q.tolist(), offsets.starts_k.tolist()) == ([0, 2, 4, 6], [0, 5, 10, 15])


def test_left_padding_with_a_cache_in_every_form():
    """Rows of 5, 3 and 1 tokens after padding; the last two positions are queries."""
    layout, T, S = Layout.left_padded([0, 2, 4], 5), 2, 5
    expected = [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]]
    expected.append([[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]])  # its first query is padding and attends to padding
    assert layout.visible(T, S, None).int().tolist() == expected
    offsets = layout.prepare("varlen", "cpu", T, S=S, B=3)
    assert offsets.starts_k.tolist() == [0, 5, 7, 10, 14, 15]
    assert offsets.starts_q.tolist() == [0, 2, 2, 4, 5, 6]
    assert (offsets.longest_q, offsets.longest_k) == (2, 5)
    assert layout.prepare("triton", "cpu", T, S=S).first_BT.tolist() == [[0, 0], [2, 2], [0, 4]]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 2, 8, generator=generator, dtype=torch.float64) for n in (T, S, S))
    wanted = attention(q, k, v, layout=layout, impl="reference")
    for b, padding in enumerate((0, 2, 4)):
        alone = attention(
            q[b : b + 1, -1:], k[b : b + 1, padding:], v[b : b + 1, padding:], layout=Layout.causal(),
            impl="reference",
        )  # fmt: skip
        torch.testing.assert_close(wanted[b : b + 1, -1:], alone)
    t, s = torch.arange(T)[None, :, None], torch.arange(S)[None, None, :]
    for window in (None, 2):
        blocks, seen = layout.prepare("flex", "cpu", T, window, S=S), layout.visible(T, S, window)
        b = torch.arange(3)[:, None, None]
        assert torch.equal(blocks.mask_mod(b, torch.zeros_like(b), t, s), seen)
        for impl in ("sdpa_flash", "sdpa_math"):
            torch.testing.assert_close(
                attention(q.float(), k.float(), v.float(), layout=layout, window=window, impl=impl),
                attention(q, k, v, layout=layout, window=window, impl="reference").float(),
            )
    assert not Layout.left_padded([0, 0], 5).is_packed


def test_bounds_of_documents():
    layout = Layout.packed(torch.tensor([[0, 0, 0, 1], [5, 5, -1, -1]]))
    bounds = layout.prepare("triton", "cpu", 4)
    assert bounds.first_BT.tolist() == [[0, 0, 0, 3], [0, 0, 2, 2]]
    assert bounds.last_BT.tolist() == [[2, 2, 2, 3], [1, 1, 3, 3]]
    assert bounds.first_BT.dtype == bounds.last_BT.dtype == torch.int32
    assert layout.prepare("triton", "cpu", 4, window=2) is bounds  # the kernels apply the window
    assert Layout.causal().prepare("triton", "cpu", 2, S=5).first_BT is None


def test_block_mask_agrees_with_the_definition():
    documents_BT = torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(0)).sort(1).values
    for layout, T, S, window in (
        (Layout.packed(documents_BT), 300, 300, None),
        (Layout.packed(documents_BT), 300, 300, 40),
        (Layout.causal(), 130, 260, 100),
    ):
        blocks = layout.prepare("flex", "cpu", T, window, S=S)
        seen = layout.visible(T, S, window)
        b = torch.arange(seen.shape[0])[:, None, None]
        t, s = torch.arange(T)[None, :, None], torch.arange(S)[None, None, :]
        assert torch.equal(blocks.mask_mod(b, torch.zeros_like(b), t, s).expand_as(seen), seen)


def test_unsupported_calls_raise():
    q = torch.randn(1, 4, 2, 8)
    for impl in ("sdpa_efficient", "sdpa_cudnn", "varlen"):
        with pytest.raises(ModelError, match=r"use sdpa_flash on a CPU"):
            attention(q, q, q, layout=Layout.causal(), impl=impl)
    if importlib.util.find_spec("triton"):
        with pytest.raises(ModelError, match=r"requires a GPU, not cpu; use sdpa_flash on a CPU"):
            attention(q, q, q, layout=Layout.causal(), impl="triton")
    with pytest.raises(ModelError, match="no backward on a CPU"):
        attention(q.requires_grad_(), q, q, layout=Layout.causal(), impl="flex")
    with pytest.raises(ModelError, match=r"unknown attention implementation 'flsh'.*sdpa_flash"):
        attention(q, q, q, layout=Layout.causal(), impl="flsh")
    with pytest.raises(ModelError, match="key/value cache"):
        attention(
            q[:, :2], q, q, layout=Layout.packed(torch.zeros(1, 2, dtype=torch.int32)), impl="reference"
        )


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_traces_without_a_graph_break(impl):
    case = next(c for c in CASES if c.name == "packed, window")
    *inputs, grad, documents_BT = make_inputs(case, "fp32")
    layout = Layout.packed(documents_BT)
    layout.prepare(impl, "cpu", case.T, case.window)

    def call(q, k, v):
        return attention(q, k, v, layout=layout, window=case.window, impl=impl)

    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(run(traced, inputs, grad), run(call, inputs, grad), strict=True):
        torch.testing.assert_close(got, want)


def test_new_documents_do_not_recompile():
    counter = CompileCounter()

    def two_layers(q, layout):
        for _ in range(2):
            q = attention(q, q[:, :, :2], q[:, :, :2], layout=layout, impl="sdpa_flash")
        return q

    traced = torch.compile(two_layers, fullgraph=True, backend=counter)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        layout = Layout.packed(torch.randint(0, 3 + seed, (2, 30), generator=generator).sort(1).values)
        layout.prepare("sdpa_flash", "cpu", 30)
        q = torch.randn(2, 30, 4, 8, generator=generator)
        torch.testing.assert_close(traced(q, layout), two_layers(q, layout))
    assert counter.frame_count == 1


@given(
    st.sampled_from([1, 5, 127, 128, 129, 256, 300, 641]),
    st.sampled_from([None, 1, 50, 128, 129, 200]),
    st.sampled_from([0, 3, 128, 200]),
    st.integers(0, 20),
    st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_flex_blocks_are_those_that_torch_finds_by_looking_at_every_pair(T, window, more, documents, seed):
    if documents:
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.randint(0, documents, (2, T), generator=generator).sort(1).values
        layout, S = Layout.packed(ids_BT), T
    else:
        layout, S = Layout.causal(), T + more
    seen_BTS = layout.visible(T, S, window)
    got = layout.prepare("flex", "cpu", T, window, S=S)
    want = create_block_mask(lambda b, h, t, s: seen_BTS[b, t, s], len(seen_BTS), None, T, S, device="cpu")
    for numbers, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        ours, theirs = (_chosen(getattr(m, numbers), getattr(m, indices)) for m in (got, want))
        assert ours == theirs
    b, t, s = torch.meshgrid(*(torch.arange(n) for n in seen_BTS.shape), indexing="ij")
    assert torch.equal(got.mask_mod(b, None, t, s), seen_BTS)


def _chosen(numbers, indices):
    """The valid blocks of each row of blocks."""
    rows = zip(numbers.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
    return [sorted(row[:number]) for number, row in rows]


def test_flex_compiles_once_for_all_lengths():
    counter = CompileCounter()

    def two_layers(q, layout):
        for _ in range(2):
            q = attention(q, q[:, :, :2], q[:, :, :2], layout=layout, impl="flex")
        return q

    traced = torch.compile(two_layers, fullgraph=True, dynamic=True, backend=counter)
    for T in (777, 300, 130, 256):  # 7 blocks first: 2 would be confused with the number of rows
        generator = torch.Generator().manual_seed(T)
        layout = Layout.packed(torch.randint(0, 9, (2, T), generator=generator).sort(1).values)
        q = torch.randn(2, T, 4, 16, generator=generator)
        with torch.no_grad():
            got = traced(q, layout.as_prepared("flex", "cpu", T))
            want = attention(q, q[:, :, :2], q[:, :, :2], layout=layout, impl="reference")
            want = attention(want, want[:, :, :2], want[:, :, :2], layout=layout, impl="reference")
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longer than a tile", "packed, window", "decode several"])
def test_flex_forward_on_a_cpu(name):
    case = next(c for c in CASES if c.name == name)
    for checked in compare(case, "flex", "fp32", forward_only=True):
        assert checked, checked


GPU_CASES = (
    Case("gpu plain", B=2, T=300, S=300, H=4, K=4, D=64),
    Case("gpu grouped", B=2, T=257, S=257, H=8, K=2, D=128),
    Case("gpu packed", B=2, T=300, S=300, H=4, K=2, D=64, documents=((300,), (1, 128, 129, 42))),
    Case("gpu packed, window", B=1, T=400, S=400, H=2, K=1, D=64, window=50, documents=((150, 250),)),
    Case("gpu window", B=2, T=300, S=300, H=2, K=2, D=64, window=33),
    Case("gpu decode", B=2, T=1, S=200, H=4, K=2, D=64),
    Case("gpu decode several", B=2, T=9, S=200, H=4, K=2, D=64),
    Case("gpu decode several, window", B=2, T=9, S=200, H=4, K=2, D=64, window=20),
    Case("gpu queries before any key", B=2, T=340, S=200, H=2, K=2, D=64),
    Case("gpu soft cap", B=2, T=150, S=150, H=4, K=2, D=64, scale=0.5, softcap=5.0),
)


@pytest.mark.parametrize("case", [pytest.param(c, marks=gpu, id=c.name) for c in GPU_CASES])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("impl", IMPLS)
def test_exact_on_a_gpu(impl, dtype, case):
    """Backends that `choose_attention` accepts are exact, and those that it rejects raise."""
    if impl == "flex":
        if dtype != "bf16":
            pytest.skip("flex compiles for some ten seconds per case: one dtype is enough")
        torch._dynamo.reset()
    facts = {
        "device": "cuda",
        "capability": torch.cuda.get_device_capability(),
        "dtype": dtype,
        "head_dim": case.D,
        "packed": case.documents is not None,
        "window": case.window,
        "training": True,
        "tokens": case.T,
        "softcap": case.softcap,
    }
    try:
        choose_attention(**facts, requested=impl)
    except ModelError:
        with pytest.raises((ModelError, RuntimeError)):
            compare(case, impl, dtype, "cuda")
        return
    for checked in compare(case, impl, dtype, "cuda"):
        assert checked, checked
