"""Edge cases of the loss: large weights in fp16, logits that overflow, autocast, any number of chunks."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.kernels import parity
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy, schedule, spec
from trimtab.kernels.linear_cross_entropy.spec import Case, make_inputs

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PLACES = ["cpu", pytest.param("cuda", marks=gpu)]


def kernels(device, impl="triton"):
    """Runs Triton's kernels on the device: interpreted on a CPU."""
    if impl != "triton":
        return nullcontext()
    pytest.importorskip("triton")
    from trimtab.kernels.linear_cross_entropy import kernels_triton

    return parity.interpreter(kernels_triton) if device == "cpu" else nullcontext()


def gradients(leaves, labels_N, **options):
    """[loss, gradient of each leaf] for hidden, weight and maybe bias."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    bias_V = leaves[2] if len(leaves) > 2 else None
    loss = linear_cross_entropy(*leaves[:2], labels_N, bias_V=bias_V, **options)
    upstream = torch.ones_like(loss)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def accuracy_checks(got, own, true, dtype):
    return [
        check_accuracy(name, g.cpu(), truth=t.cpu(), reference=o.cpu(), tolerance=TOLERANCE[dtype])
        for name, g, o, t in zip(("loss", "hidden", "weight"), got, own, true, strict=True)
    ]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("largest", [1.0, 63.0, 64.0, 1000.0])
def test_large_token_weights_in_fp16(largest, reduction, device):
    case = Case("", N=24, C=32, V=70, ignored=0.2)
    *leaves, _, labels_N = make_inputs(case, "fp16", device)
    weights_N = torch.linspace(0, largest, case.N, device=device)
    options = {"token_weights_N": weights_N, "reduction": reduction}
    with kernels(device):
        got = gradients(leaves, labels_N, impl="triton", **options)
    own = gradients(leaves, labels_N, impl="reference", **options)
    true = gradients([x.double() for x in leaves], labels_N, impl="reference", **options)
    for checked in accuracy_checks(got, own, true, "fp16"):
        assert checked, checked


@pytest.mark.parametrize("device", PLACES)
def test_a_nan_weight_affects_only_its_own_token(device):
    *leaves, _, labels_N = make_inputs(Case("", N=12, C=16, V=40), "fp16", device)
    weights_N = torch.ones(12, device=device)
    weights_N[4] = torch.nan
    with kernels(device):
        _, hidden_NC, _ = gradients(leaves, labels_N, impl="triton", token_weights_N=weights_N)
    assert hidden_NC.isfinite().all(1).tolist() == [n != 4 for n in range(12)]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("impl", ["reference", "chunked", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_bias_under_autocast(reduction, impl, device):
    """Autocast casts it like hidden states and weight; gradients are fp32."""
    if device == "cpu" and impl == "triton":
        kind = torch.float16  # bf16 is inaccurate in the interpreter
    else:
        kind = torch.bfloat16
    *leaves, labels_N = make_inputs(Case("", N=20, C=16, V=33, bias=True, ignored=0.2), "fp32", device)
    options = {"impl": impl, "reduction": reduction}
    with kernels(device, impl):
        with torch.autocast(device, kind):
            got = gradients(leaves, labels_N, **options)
        want = gradients([x.to(kind) for x in leaves], labels_N, **options)
    assert all(x.dtype == torch.float32 for x in got)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y.float())


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("V", [60, spec.SMALL_VOCABULARY + 1])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_an_ignored_token_whose_logits_overflow_has_no_effect(impl, reduction, V, device):
    if impl == "triton" and device == "cpu" and V > 1000:
        pytest.skip("the interpreter takes a second per row")
    case = Case("", N=10, C=8, V=V, bias=True, chunk_tokens=4)
    *leaves, labels_N = make_inputs(case, "fp16", device)
    labels_N[3] = -100
    options = {"impl": impl, "reduction": reduction, "chunk_tokens": 4}
    overflowing = [x.clone() for x in leaves]
    overflowing[0][3] = 6e4
    with kernels(device, impl):
        want = gradients(leaves, labels_N, **options)
        got = gradients(overflowing, labels_N, **options)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("N", [1, 100, 300, 4095, 4096, 4097])
def test_one_chunk_where_memory_holds_all_logits(N):
    C, V = 1024, 151_936
    plan = schedule.schedule(N, C, V, 2, 2, memory_bytes=N * schedule.row_stride(V) * 2)
    assert (plan.strategy, plan.rows) == ("rows", N)
    assert spec.flops(N, C, V, impl="triton", memory_bytes=2**34) == 3 * 2 * N * C * V


@pytest.mark.parametrize("N", [4096, 8192, 12_800])
def test_multiples_of_a_tile_keep_their_chunks(N):
    """A resumed run is bitwise identical."""
    V = 151_936
    row = schedule.row_stride(V) * 2
    for most in range(384, N + 300, 37):
        most = min(most, N)
        even = -(-N // -(-N // most))
        stepped = -(-even // 128) * 128
        expected = stepped if stepped <= most else most // 128 * 128
        assert schedule.schedule(N, 64, V, 2, 4, memory_bytes=most * row).rows == expected


@pytest.mark.parametrize("N", [300, 4095, 4100, 10_001])
def test_other_token_counts_use_the_fewest_chunks(N):
    for most in range(1, N + 200, 13):
        rows = schedule._even_rows(N, most)
        assert rows <= min(most, N)
        assert -(-N // rows) == -(-N // min(most, N))


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=gpu)])
def test_many_chunks_round_weights_gradient_once(dtype, device):
    """`chunk_tokens` may make more chunks than a 16-bit sum tolerates."""
    if dtype == "bf16" and device == "cpu":
        pytest.skip("bf16 is inaccurate in the interpreter")
    case = Case("", N=2 * schedule.MAX_CHUNKS, C=8, V=16)
    *leaves, _, labels_N = make_inputs(case, dtype, device)
    true = gradients([x.double() for x in leaves], labels_N, impl="reference", reduction="sum")
    own = gradients(leaves, labels_N, impl="reference", reduction="sum")
    with kernels(device):
        got = gradients(leaves, labels_N, impl="triton", reduction="sum", chunk_tokens=1)
        few = gradients(leaves, labels_N, impl="triton", reduction="sum", chunk_tokens=case.N)
    for checked in accuracy_checks(got, own, true, dtype):
        assert checked, checked

    def distance(found):
        return (found[2].double() - true[2]).square().mean().sqrt()

    assert got[2].dtype == leaves[1].dtype
    assert distance(got) <= 1.1 * distance(few)
