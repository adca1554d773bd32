"""The Triton loss: both strategies, on the CPU in the interpreter, and compiled on a GPU; vocabulary shards."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import parity
from tests.kernels.parity import poisoned
from tests.kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.kernels.accuracy import TOLERANCE, AccuracyCheck, check_accuracy
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy, schedule, shards, spec
from trimtab.kernels.linear_cross_entropy.objective import Objective
from trimtab.kernels.linear_cross_entropy.spec import CASES, Case, make_inputs, make_token_weights

pytest.importorskip("triton")
from trimtab.kernels.linear_cross_entropy import impl_triton, kernels_triton

STRATEGIES = ("rows", "blocks", "none")
"""Gradients with the loss; logits recomputed in the backward; the same for losses per token."""
NAMES = ("loss", "hidden", "weight", "bias")


interpreter = partial(parity.interpreter, kernels_triton)


def options(case: Case, strategy: str) -> dict[str, object]:
    if strategy == "rows":
        return {"reduction": "mean", "chunk_tokens": case.chunk_tokens or max(case.N, 1)}
    # A budget of one byte: vocabulary blocks, in the unwritten part of weight's gradient or the minimal workspace.
    return {"reduction": "none" if strategy == "none" else "sum", "memory_bytes": 1}


def run(case: Case, dtype: str, impl: str, strategy: str, device: str = "cpu") -> list[torch.Tensor]:
    hidden_NC, weight_VC, bias_V, labels_N = make_inputs(case, dtype, device)
    leaves = [x.requires_grad_() for x in (hidden_NC, weight_VC, bias_V) if x is not None]
    before = [x.detach().clone() for x in leaves]
    loss = linear_cross_entropy(
        hidden_NC,
        weight_VC,
        labels_N,
        bias_V=bias_V,
        impl=impl,
        token_weights_N=make_token_weights(case, device),
        **case.options(),
        **options(case, strategy),
    )
    upstream = torch.tensor(0.7, device=device, dtype=loss.dtype)
    if strategy == "none":
        upstream = torch.linspace(-1, 2, case.N, device=device).to(loss.dtype)
    found = torch.autograd.grad(loss, leaves, upstream)
    assert all(torch.equal(x, old) for x, old in zip(leaves, before, strict=True)), "wrote into an input"
    return [loss.detach(), *found]


def compare(
    case: Case, dtype: str, strategy: str, device: str = "cpu", factor: float = 1.0
) -> list[AccuracyCheck]:
    true = run(case, "fp64", "reference", strategy)
    own = run(case, dtype, "reference", strategy, device)
    if device == "cpu":
        with interpreter():
            got = run(case, dtype, "triton", strategy)
    else:
        with poisoned():
            got = run(case, dtype, "triton", strategy, device)
    assert [x.dtype for x in got] == [x.dtype for x in own]
    return [
        check_accuracy(n, (g * factor).cpu(), truth=t, reference=r.cpu(), tolerance=TOLERANCE[dtype])
        for n, g, t, r in zip(NAMES, got, true, own, strict=False)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exact(dtype: str, strategy: str, case: Case) -> None:
    if case.V > 1000:  # the interpreter takes a second per row
        case = replace(case, N=6)
    for checked in compare(case, dtype, strategy):
        assert checked, checked


ON_A_GPU = (
    *CASES,
    Case(
        "rows of many blocks", N=300, C=64, V=40_001, ignored=0.1, bias=True, chunk_tokens=128, weighted=True
    ),
    Case("peaked, large", N=300, C=64, V=50_257, spread=20.0, chunk_tokens=299),
    Case("pointing, large", N=512, C=256, V=32_000, spread=3.0, aligned=1.0, chunk_tokens=256),
    Case("flat, large", N=512, C=128, V=65_536, spread=0.1, label_smoothing=0.1, z_loss=1e-4, softcap=30.0),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=lambda c: c.name)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(dtype: str, strategy: str, case: Case) -> None:
    for checked in compare(case, dtype, strategy, "cuda"):
        assert checked, checked


NEARLY_CERTAIN = Case("", N=24, C=32, V=70, spread=4.0, aligned=1.0, chunk_tokens=16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exact_where_the_model_is_nearly_certain(strategy: str) -> None:
    """Losses of 1e-6 and gradients of 1e-7: p − 1 loses all precision, expm1 does not."""
    assert run(NEARLY_CERTAIN, "fp64", "reference", "none")[0].median() < 1e-5
    for checked in compare(NEARLY_CERTAIN, "fp32", strategy):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_where_the_model_is_nearly_certain_on_a_gpu(dtype: str, strategy: str) -> None:
    for checked in compare(NEARLY_CERTAIN, dtype, strategy, "cuda"):
        assert checked, checked


@settings(max_examples=20, deadline=None)
@given(
    N=st.integers(1, 20),
    C=st.integers(1, 40),
    V=st.integers(1, 90),
    rows=st.integers(1, 25),
    ignored=st.floats(0, 1),
    bias=st.booleans(),
    weighted=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
    label_smoothing=st.sampled_from([0.0, 0.3]),
    softcap=st.sampled_from([None, 3.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
)
def test_any_shape(N, C, V, rows, ignored, bias, weighted, strategy, **extras) -> None:  # type: ignore[no-untyped-def]
    case = Case("drawn", N, C, V, ignored, bias=bias, weighted=weighted, chunk_tokens=rows, **extras)
    for checked in compare(case, "fp32", strategy):
        # one entry: loss and gradients are 0 up to the rounding of logits
        assert checked or V == 1, checked


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_percent_error_fails(strategy: str) -> None:
    assert not any(compare(CASES[0], "fp16", strategy, factor=1.01))


def test_blocks_use_weights_gradient_then_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in the unwritten gradient, then in the workspace, with a ragged last one; fp32 gradients too."""
    monkeypatch.setattr(schedule, "MIN_BYTES", 8 * 2 * 1024)
    monkeypatch.setattr(schedule, "MAX_ENTRIES", 96)
    case = Case("", N=16, C=64, V=600, ignored=0.2, chunk_tokens=5)
    sizes = schedule.blocks(16, 64, 600, 4, 4, 2048)
    assert [b for *_, b in sizes].count(True) > 2
    assert not sizes[-1][2]
    assert sizes[-1][1] == 600
    for checked in compare(case, "fp32", "blocks"):
        assert checked, checked


@given(
    N=st.integers(1, 40_000),
    C=st.integers(1, 9000),
    V=st.integers(1, 300_000),
    gradient_width=st.sampled_from([2, 4]),
    scratch=st.integers(0, 2**28),
    weight_grad=st.booleans(),
)
def test_blocks_cover_the_vocabulary_and_fit(N, C, V, gradient_width, scratch, weight_grad) -> None:  # type: ignore[no-untyped-def]
    found = schedule.blocks(N, C, V, 2, gradient_width, max(scratch, N * V // 200), weight_grad=weight_grad)
    assert [start for start, *_ in found] == [0, *(stop for _, stop, _ in found[:-1])]
    assert found[-1][1] == V
    for start, stop, borrowed in found:
        assert stop > start
        if borrowed:
            assert N * schedule.row_stride(stop - start) * 2 <= (V - stop) * C * gradient_width


@given(
    N=st.integers(1, 40_000), C=st.integers(1, 9000), V=st.integers(1, 300_000), memory=st.integers(0, 2**33)
)
def test_a_schedule_stays_within_its_budget(N: int, C: int, V: int, memory: int) -> None:
    plan = schedule.schedule(N, C, V, 2, 2, memory_bytes=memory)
    row = schedule.row_stride(V) * 2
    if plan.strategy == "rows":
        assert plan.rows * row <= max(memory, row)
    else:
        assert plan.rows * row <= max(memory + schedule.gradient_bytes(N, C, V, 2, 2), row)
    assert 1 <= plan.rows <= N


def test_a_larger_budget_needs_fewer_products() -> None:
    low, fast = (spec.flops(4096, 1024, 151_936, impl="triton", memory_bytes=m * 2**20) for m in (24, 1200))
    assert low * 3 == fast * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deterministic(strategy: str) -> None:
    case = next(c for c in CASES if c.name == "all options")
    with interpreter():
        first, second = (run(case, "fp16", "triton", strategy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_losses_per_token_without_gradients_equal_the_sum_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation reads losses per token, and its reported loss must not depend on that."""
    rows: list[int] = []
    losses = impl_triton.losses
    monkeypatch.setattr(impl_triton, "losses", lambda *given: (rows.append(given[-1]), losses(*given))[1])
    hidden_NC, weight_VC, _, labels_N = make_inputs(Case("long", N=160, C=64, V=40), "fp32")
    budget = 128 * schedule.row_stride(40) * 4
    with torch.no_grad(), interpreter():
        total, by_token = (
            linear_cross_entropy(
                hidden_NC, weight_VC, labels_N, impl="triton", reduction=reduction, memory_bytes=budget
            )
            for reduction in ("sum", "none")
        )
    assert rows == [128, 128]
    assert torch.equal(total, by_token.sum())


def test_a_second_backward_over_a_retained_graph_gives_the_same() -> None:
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "fp32")
    weight_VC.requires_grad_()
    with interpreter():
        loss = linear_cross_entropy(hidden_NC, weight_VC, labels_N, impl="triton", chunk_tokens=64)
        three = torch.tensor(3.0)
        first = torch.autograd.grad(loss, weight_VC, three, retain_graph=True)[0]
        again = torch.autograd.grad(loss, weight_VC, three, retain_graph=True)[0]
        last = torch.autograd.grad(loss, weight_VC, three)[0]  # scaled in place, after two copies
    assert torch.equal(first, again)
    assert torch.equal(first, last)


@pytest.mark.parametrize("strategy", ["rows", "blocks"])
def test_frozen_weight(strategy: str) -> None:
    case = CASES[0]
    hidden_NC, weight_VC, _, labels_N = make_inputs(case, "fp32")
    hidden_NC.requires_grad_()
    with interpreter():
        loss = linear_cross_entropy(hidden_NC, weight_VC, labels_N, impl="triton", **options(case, strategy))
        (found,) = torch.autograd.grad(loss, hidden_NC)
    want = linear_cross_entropy(
        hidden_NC, weight_VC, labels_N, reduction=options(case, strategy)["reduction"]
    )
    torch.testing.assert_close(found, torch.autograd.grad(want, hidden_NC)[0])
    with interpreter(), torch.no_grad():
        evaluated = linear_cross_entropy(
            hidden_NC, weight_VC, labels_N, impl="triton", **options(case, strategy)
        )
    torch.testing.assert_close(evaluated, loss.detach())


@pytest.mark.parametrize("strategy", ["rows", "blocks"])
def test_a_16_bit_weight_with_fp32_gradients_gets_them_unrounded(strategy: str) -> None:
    hidden_NC, weight_VC, _, labels_N = make_inputs(CASES[0], "fp16")
    weight = torch.nn.Parameter(weight_VC)
    weight.grad_dtype = torch.float32
    with interpreter():
        linear_cross_entropy(
            hidden_NC,
            weight,
            labels_N,
            impl="triton",
            **options(replace(CASES[0], chunk_tokens=16), strategy),
        ).backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.half().float())


def test_operators_pass_opcheck() -> None:
    """Schema, fake, autograd and tracing agree."""
    case = Case("", 5, 8, 19, ignored=0.2, bias=True)
    hidden, weight, bias, labels = make_inputs(case, "fp32")
    scale = (labels != -100).float()
    ops, numbers = torch.ops.trimtab, (0.1, 0.01, 4.0)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    lse, nll = torch.full((5,), 3.0), torch.ones(5)
    wanted = (True, True, True, torch.float32)
    with interpreted(kernels_triton):
        torch.library.opcheck(ops.linear_cross_entropy_summed, (*leaves, labels, scale, *numbers, 3, *wanted))
        torch.library.opcheck(
            ops.linear_cross_entropy_losses, (*leaves, labels, scale, *numbers, 3, 4096, torch.float32)
        )
        torch.library.opcheck(
            ops.linear_cross_entropy_gradients,
            (scale, hidden, weight, bias, labels, lse, nll, *numbers, 0, 19, 4096, *wanted),
        )
        torch.library.opcheck(ops.linear_cross_entropy_partials, (hidden, weight, bias, labels, 0.0, 0, 3))
        torch.library.opcheck(ops.linear_cross_entropy_scale_, (torch.ones(7), torch.tensor(2.0)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traces_without_a_graph_break(strategy: str) -> None:
    case = Case("", 20, 8, 30, ignored=0.3, chunk_tokens=6)
    hidden_NC, weight_VC, _, labels_N = make_inputs(case, "fp32")

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels_N, impl="triton", **options(case, strategy)).sum()

    results = []
    with interpreted(kernels_triton):
        for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            leaves = [x.clone().requires_grad_() for x in (hidden_NC, weight_VC)]
            results.append(torch.autograd.grad(call(*leaves), leaves, torch.tensor(0.5)))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)


def test_invalid_arguments_raise() -> None:
    hidden_NC, weight_VC, labels_N = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1])
    with pytest.raises(ResourceError, match="require a CUDA device"):
        linear_cross_entropy(hidden_NC, weight_VC, labels_N, impl="triton")
    with pytest.raises(ModelError, match="supports bf16, fp16 and fp32"):
        linear_cross_entropy(hidden_NC.double(), weight_VC.double(), labels_N, impl="triton")
    with pytest.raises(ModelError, match="unknown sharded loss implementation 'fast'"):
        shards.shard_partials(hidden_NC, weight_VC, labels_N, first=0, impl="fast")


CUTS = ((0, 75), (0, 30, 75), (0, 1, 2, 74, 75))


@pytest.mark.parametrize("impl", shards.IMPLS)
@pytest.mark.parametrize("cuts", CUTS)
def test_shards_combine_to_the_whole_vocabulary(cuts: tuple[int, ...], impl: str) -> None:
    case = next(c for c in CASES if c.name == "all options")
    assert cuts[-1] == case.V
    hidden_NC, weight_VC, bias_V, labels_N = make_inputs(case, "fp32")
    objective = Objective(case.label_smoothing, case.z_loss, case.softcap or 0.0)
    weights_N = make_token_weights(case)
    truth, own = (run(case, dtype, "reference", "none") for dtype in ("fp64", "fp32"))
    upstream_N = torch.where(labels_N == -100, 0.0, torch.linspace(-1, 2, case.N) * weights_N)
    edges = list(pairwise(cuts))

    def shard(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        return weight_VC[a:b], bias_V[a:b]

    with interpreter():
        parts = [
            shards.shard_partials(
                hidden_NC, w, labels_N, first=a, bias_V=c, objective=objective, impl=impl, chunk_tokens=8
            )
            for a, b in edges
            for w, c in [shard(a, b)]
        ]
        numbers = shards.combine_partials(torch.stack(parts))
        found = [
            shards.shard_gradients(
                upstream_N,
                hidden_NC,
                w,
                labels_N,
                numbers,
                first=a,
                vocabulary=case.V,
                bias_V=c,
                objective=objective,
                impl=impl,
            )
            for a, b in edges
            for w, c in [shard(a, b)]
        ]
    losses_N = torch.where(labels_N == -100, 0.0, numbers.losses(case.V, objective) * weights_N)
    hidden, weight, bias = zip(*found, strict=True)
    got = [losses_N, torch.stack(hidden).sum(0), torch.cat(weight), torch.cat(bias)]
    for name, g, t, r in zip(NAMES, got, truth, own, strict=True):
        checked = check_accuracy(name, g, truth=t, reference=r, tolerance=TOLERANCE["fp32"])
        assert checked, checked


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    pointers = {"labels_ptr": "*i64", "scale_ptr": "*fp32", "losses_ptr": "*fp32", "partials_ptr": "*fp32"}
    pointers |= {"lse_ptr": "*fp32", "nll_ptr": "*fp32"}
    names = {
        "rows": kernels_triton.loss_and_gradient_kernel,
        "statistics": kernels_triton.row_statistics_kernel,
        "gradient": kernels_triton.gradient_kernel,
    }
    whole = ("columns", "part_blocks", "first", "parts", "plane", "vocabulary")
    for dtype in ("fp16", "fp32") if chip == 75 else ("bf16", "fp32"):
        width = 4 if dtype == "fp32" else 2
        shapes = (("rows", 1000), ("rows", 200_000), ("statistics", 1000), ("gradient", 1000))
        for (name, columns), optional in product(shapes, (False, True)):
            kernel, chosen = names[name], impl_triton.configuration(name, width, columns)
            types = {"logits_ptr": f"*{dtype}", "stride": "i32:16"}
            for argument in kernel.arg_names:
                if argument in pointers:
                    types[argument] = pointers[argument]
                elif argument in whole:
                    types[argument] = "i32"
                elif argument in ("softcap", "smoothing", "z_loss", "gradient_scale"):
                    types[argument] = "fp32"
            constants = {"CAPPED": optional, "L": chosen.L, "E": chosen.E}
            constants |= {"SMOOTHED": optional} if name == "rows" else {}
            constants |= {"BLOCKS": impl_triton.GRADIENT_BLOCKS} if name == "gradient" else {}
            compiled = compile_for(chip, kernel, types, constants, num_warps=chosen.warps)
            assert compiled.shared <= SHARED_LIMIT[chip], (name, chosen)
            # Triton 3.6 spills eight values of a tanh
            assert (compiled.spills or 0) <= (32 if optional else 0), (name, chosen, compiled.spills)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """70,000 × 32,768 logits: the last rows' offsets need 64 bits."""
    N, C, V = 70_000, 16, 32_768
    hidden_NC = torch.randn(N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VC = torch.randn(V, C, device="cuda", dtype=torch.bfloat16)
    labels_N = torch.randint(0, V, (N,), device="cuda")
    results = []
    for impl, rows, dtype in (("triton", N, None), ("chunked", 1000, None), ("chunked", 1000, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype) for x in (hidden_NC, weight_VC)]
        leaves[0].requires_grad_()
        loss = linear_cross_entropy(*leaves, labels_N, impl=impl, reduction="sum", chunk_tokens=rows)
        results.append((loss.detach(), torch.autograd.grad(loss, leaves[0])[0][-100:]))
    for name, got, own, truth in zip(("loss", "gradient of the last rows"), *results, strict=True):
        checked = check_accuracy(name, got, truth=truth, reference=own, tolerance=TOLERANCE["bf16"])
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize(("budget", "strategy"), [(40, "rows"), (2, "blocks")])
def test_memory_matches_the_spec(budget: int, strategy: str) -> None:
    N, C, V = 512, 256, 32_000
    dims = (N, C, V, "bf16")
    hidden_NC = torch.randn(N, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VC = torch.randn(V, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels_N = torch.randint(0, V, (N,), device="cuda")
    assert schedule.schedule(N, C, V, 2, 2, memory_bytes=budget * 2**20).strategy == strategy

    def step() -> None:
        loss = linear_cross_entropy(
            hidden_NC, weight_VC, labels_N, impl="triton", memory_bytes=budget * 2**20
        )
        torch.autograd.grad(loss, (hidden_NC, weight_VC))

    step()  # cuBLAS allocates its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (N + V) * C
    said = gradients + spec.scratch_bytes("triton", *dims, memory_bytes=budget * 2**20)
    assert 0.8 * said <= peak <= 1.02 * said + 2**20, (peak, said)
