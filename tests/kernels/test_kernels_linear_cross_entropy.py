"""Linear cross-entropy: exact, in a tenth of the memory, and raising for invalid inputs."""

# N tokens, C hidden size, V vocabulary

import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.facts.errors import DataError, ModelError
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.linear_cross_entropy import REDUCTIONS, linear_cross_entropy, spec
from trimtab.kernels.linear_cross_entropy.spec import CASES, Case, make_inputs, make_token_weights

TORCH = ("reference", "chunked")

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def run(case, dtype, impl, reduction, device="cpu"):
    """(loss, gradients of hidden, weight and, where there is one, bias) for an uneven upstream gradient."""
    hidden_NC, weight_VC, bias_V, labels_N = make_inputs(case, dtype, device)
    leaves = [x.requires_grad_() for x in (hidden_NC, weight_VC, bias_V) if x is not None]
    loss = linear_cross_entropy(
        hidden_NC,
        weight_VC,
        labels_N,
        bias_V=bias_V,
        impl=impl,
        reduction=reduction,
        chunk_tokens=case.chunk_tokens,
        token_weights_N=make_token_weights(case, device),
        **case.options(),
    )
    upstream = torch.full_like(loss, 0.7)
    if reduction == "none":
        upstream = torch.linspace(-1, 2, case.N, device=device).to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def compare(case, dtype, impl, reduction, device="cpu", factor=1.0):
    true = run(case, "fp64", "reference", reduction)
    own = run(case, dtype, "reference", reduction, device)
    got = run(case, dtype, impl, reduction, device)
    assert got[0].dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert [x.dtype for x in got[1:]] == [x.dtype for x in own[1:]]
    names = ("loss", "hidden", "weight", "bias")
    return [
        check_accuracy(n, (g * factor).cpu(), truth=t, reference=r.cpu(), tolerance=TOLERANCE[dtype])
        for n, g, t, r in zip(names, got, true, own, strict=False)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_exact(dtype, reduction, case):
    for checked in compare(case, dtype, "chunked", reduction):
        assert checked, checked


@pytest.mark.parametrize("case", [pytest.param(c, marks=gpu, id=c.name) for c in CASES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_exact_on_a_gpu(dtype, reduction, case):
    for checked in compare(case, dtype, "chunked", reduction, "cuda"):
        assert checked, checked


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_one_percent_error_fails(dtype, reduction):
    accuracy_checks = compare(CASES[0], dtype, "reference", reduction, factor=1.01)
    assert not any(accuracy_checks), accuracy_checks


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_strategies_are_exact_and_used(dtype, reduction):
    """One entry more than a small vocabulary, and the logits are recomputed in the backward."""
    for V in (spec.SMALL_VOCABULARY, spec.SMALL_VOCABULARY + 1):
        case = Case("", N=9, C=4, V=V, ignored=0.3, bias=True, chunk_tokens=4)
        for checked in compare(case, dtype, "chunked", reduction):
            assert checked, (V, checked)
        hidden_NC, weight_VC, _, labels_N = make_inputs(case, dtype)
        loss = linear_cross_entropy(hidden_NC.requires_grad_(), weight_VC, labels_N, reduction="sum")
        name = loss.grad_fn.name()
        assert ("Summed" in name) == (V == spec.SMALL_VOCABULARY), name


def test_the_reference_equals_torch():
    hidden_NC, weight_VC, bias_V, labels_N = make_inputs(Case("", 30, 8, 20, ignored=0.3, bias=True), "fp64")
    logits_NV = hidden_NC @ weight_VC.T + bias_V
    for reduction in REDUCTIONS:
        want = F.cross_entropy(logits_NV, labels_N, reduction=reduction)
        got = linear_cross_entropy(
            hidden_NC, weight_VC, labels_N, bias_V=bias_V, impl="reference", reduction=reduction
        )
        torch.testing.assert_close(got, want)


@settings(max_examples=30, deadline=None)
@given(
    N=st.integers(1, 40),
    V=st.integers(2, 60),
    rows=st.integers(1, 50),
    ignored=st.floats(0, 1),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_results_do_not_depend_on_chunking(N, V, rows, ignored, reduction):
    case = Case("drawn", N, 7, V, ignored, bias=True, chunk_tokens=rows)
    for got, want in zip(
        run(case, "fp64", "chunked", reduction), run(case, "fp64", "reference", reduction), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", TORCH)
def test_all_ignored_is_zero_and_not_nan(impl):
    case = next(c for c in CASES if c.name == "all ignored")
    for reduction in REDUCTIONS:
        for value in run(case, "fp32", impl, reduction):
            assert torch.equal(value, torch.zeros_like(value))


def test_frozen_weight_gets_no_gradient_and_costs_none():
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "fp32")
    for reduction in REDUCTIONS:
        hidden = hidden_NC.clone().requires_grad_()
        with LiveBytes() as memory:
            linear_cross_entropy(
                hidden, weight_VC, labels_N, reduction=reduction, chunk_tokens=1
            ).sum().backward()
        assert weight_VC.grad is None
        assert hidden.grad is not None
        # Two rows of logits, hidden and its gradient; a gradient of the weight alone would be more.
        assert memory.peak < 4 * weight_VC.numel() + 4 * 4 * hidden_NC.numel() * 2


def test_no_grad_saves_nothing():
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "fp32")
    weight_VC.requires_grad_()
    with torch.no_grad(), LiveBytes() as memory:
        loss = linear_cross_entropy(hidden_NC, weight_VC, labels_N, chunk_tokens=4, reduction="sum")
    assert not loss.requires_grad
    assert memory.peak < 4 * weight_VC.numel()
    assert memory.now <= 8


def test_a_second_backward_gives_the_same():
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "bf16")
    weight_VC.requires_grad_()
    loss = linear_cross_entropy(hidden_NC, weight_VC, labels_N)
    first = torch.autograd.grad(loss, weight_VC, torch.tensor(3.0), retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight_VC, torch.tensor(3.0))[0])


def test_a_16_bit_weight_with_fp32_gradients_gets_them_unrounded():
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "bf16")
    weight = torch.nn.Parameter(weight_VC)
    weight.grad_dtype = torch.float32
    linear_cross_entropy(hidden_NC, weight, labels_N, chunk_tokens=16).backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_labels_outside_the_vocabulary_are_named():
    hidden_NC, weight_VC = torch.randn(4, 8), torch.randn(10, 8)
    for bad in (10, -1, 999):
        with pytest.raises(
            DataError, match=rf"label {bad} of token 2 is outside the vocabulary of 10;.*tokenizer"
        ):
            linear_cross_entropy(hidden_NC, weight_VC, torch.tensor([1, -100, bad, bad]))
    loss = linear_cross_entropy(hidden_NC, weight_VC, torch.tensor([1, 3, -1, -1]), ignore_index=-1)
    assert torch.isfinite(loss)
    with pytest.raises(ModelError, match=r"implementation 'fast'; use one of reference, chunked"):
        linear_cross_entropy(hidden_NC, weight_VC, torch.tensor([1, 2, 3, 4]), impl="fast")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_traces_without_a_graph_break(reduction):
    case = Case("", 20, 8, 30, ignored=0.3, chunk_tokens=6)
    hidden_NC, weight_VC, _, labels_N = make_inputs(case, "fp32")

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels_N, reduction=reduction, chunk_tokens=6).sum()

    results = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (hidden_NC, weight_VC)]
        results.append(torch.autograd.grad(call(*leaves), leaves))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)


class LiveBytes(TorchDispatchMode):
    """Bytes of storages allocated inside the block: `now` and at the `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage()._cdata
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.seen and storage._cdata not in inputs:
                    self.grew(storage)
        return out

    def grew(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone():
            self.seen.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def test_live_bytes_sees_a_peak():
    with LiveBytes() as memory:
        x = torch.zeros(1000) + 1
        del x
        torch.zeros(10)
    assert memory.peak == 8000
    assert memory.now == 0


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_tenth_of_the_memory_at_a_vocabulary_of_151936(reduction):
    case = Case("", N=512, C=16, V=151_936)
    peaks = {}
    for impl in TORCH:
        hidden_NC, weight_VC, _, labels_N = make_inputs(case, "fp32")
        leaves = [hidden_NC.requires_grad_(), weight_VC.requires_grad_()]
        with LiveBytes() as memory:
            loss = linear_cross_entropy(hidden_NC, weight_VC, labels_N, impl=impl, reduction=reduction)
            torch.autograd.grad(loss.sum(), leaves)
        peaks[impl] = memory.peak
    assert peaks["reference"] > 4 * case.N * case.V
    assert peaks["chunked"] < peaks["reference"] / 10, peaks
    predicted = spec.saved_bytes("chunked", case.N, case.C, case.V, "fp32", reduction=reduction)
    predicted += spec.scratch_bytes("chunked", case.N, case.C, case.V, "fp32", reduction=reduction)
    gradients = 4 * (case.N + case.V) * case.C
    # Gradients add to the backward but do not exist in the forward; the peak may be in either.
    assert predicted <= peaks["chunked"] * 1.1
    assert peaks["chunked"] <= (predicted + gradients) * 1.1, (peaks, predicted)
