"""Stochastic rounding: unbiased, deterministic, the same on every shard and in every implementation."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.triton_tools import CHIPS, compile_for, interpreted
from trimtab.kernels.stochastic_rounding import random_bits, spec, stochastic_round_

WHERE = {"seed": 11, "step": 3, "param_index": 5}


def rounded(value: torch.Tensor, **where: int) -> torch.Tensor:
    out = torch.full(value.shape, torch.nan, dtype=torch.bfloat16)
    return stochastic_round_(out, value, **{**WHERE, **where})


@pytest.mark.parametrize("offset", [0, 17, 2**31 - 5, 2**32 - 40, 5 * 2**32 - 40])
def test_torch_words_equal_the_definition(offset: int) -> None:
    words = random_bits(100, **WHERE, offset=offset).tolist()
    keys = spec.keys(**WHERE)
    assert [word & 0xFFFFFFFF for word in words] == [spec.word(*keys, offset + i) for i in range(100)]


def test_hashed_words_are_unbiased_and_uncorrelated() -> None:
    count = 1 << 18
    a, b = random_bits(count, **WHERE), random_bits(count, **{**WHERE, "step": 4})
    limit = 5 / math.sqrt(count)  # five standard deviations of a mean of ±1
    for bit in range(32):
        one, other = (a >> bit & 1) * 2.0 - 1, (b >> bit & 1) * 2.0 - 1
        assert abs(one.mean()) < limit
        assert abs((one * other).mean()) < limit, "steps are correlated"
        assert abs((one[1:] * one[:-1]).mean()) < limit, "neighbours are correlated"


def test_steps_are_not_permutations_of_one_sequence() -> None:
    count = 1 << 12
    a, b = random_bits(count, **WHERE), random_bits(count, **{**WHERE, "step": 4})
    assert len(set(a.tolist()) & set(b.tolist())) < 10


@pytest.mark.parametrize("case", spec.CASES)
def test_result_is_one_of_the_two_neighbours(case: tuple[int, ...]) -> None:
    value = spec.make_inputs(case)["value_N"]
    out = rounded(value)
    low = (value.view(torch.int32) & -65536).view(torch.float32)  # toward zero
    high = ((value.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((out.float() == low) | (out.float() == high)).all()


@pytest.mark.parametrize("size", [1.0, -3.7, 1e-3, 2.0**-130])
def test_unbiased(size: float) -> None:
    count = 200_000
    value = torch.full((count,), size) * (1 + torch.arange(count) / count * 2**-7)
    error = rounded(value).double() - value.double()
    ulp = (error.abs().max()).item()
    assert ulp > 0
    assert abs(error.mean().item()) < 5 * ulp * 0.41 / math.sqrt(count)
    nearest = (value.bfloat16().double() - value.double()).abs().max().item()
    assert ulp > 1.5 * nearest, "rounding to nearest would pass the bias test on these inputs"


def test_exact_and_special_values_are_unchanged() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-133, torch.inf, -torch.inf, 3.3895313892515355e38])
    for step in range(50):
        out = rounded(exact, step=step).float()
        assert torch.equal(out.view(torch.int32), exact.view(torch.int32))


def test_nan_stays_nan_and_finite_stays_finite() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x7FFFFF, -1], dtype=torch.int32)
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    for step in range(20):
        assert rounded(patterns.view(torch.float32), step=step).isnan().all()
    assert rounded(largest).isfinite().all()
    assert rounded(-largest).isfinite().all()


def test_a_shard_rounds_as_the_whole() -> None:
    value = torch.randn(1000)
    whole = rounded(value)
    parts = [rounded(value[start : start + 137], offset=start) for start in range(0, 1000, 137)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "change", [{"seed": 12}, {"step": 4}, {"param_index": 6}, {"stream": 1}, {"offset": 1}]
)
def test_every_component_of_the_key_matters(change: dict[str, int]) -> None:
    value = torch.randn(100_000)
    assert torch.equal(rounded(value), rounded(value))
    # A third on average: 2 p (1 − p) over all positions p between two values.
    assert (rounded(value) != rounded(value, **change)).float().mean() == pytest.approx(1 / 3, abs=0.01)


def test_strided_values_and_unknown_impl() -> None:
    value = torch.randn(40, 50)
    out = torch.empty(50, 40, dtype=torch.bfloat16)
    assert torch.equal(stochastic_round_(out, value.t(), **WHERE), rounded(value.t().contiguous()))
    with pytest.raises(ValueError, match="no impl"):
        stochastic_round_(out, value.t(), **WHERE, impl="fast")


def test_triton_is_bitwise_identical_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    from trimtab.kernels.stochastic_rounding import impl_triton

    value = spec.make_inputs((3000,))["value_N"]
    value[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0])
    patterns = [0x7F800001, 0x7FFFFFFF, 0x7FA12345, -0x7FFFFF, -1, 0x7F7F0000, 0x7F7F0001, -0x80FFFF]
    value[6:14] = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    for offset in (0, 2**32 - 1500):
        out = torch.full((3000,), 7.0, dtype=torch.bfloat16)
        with interpreted(impl_triton):
            stochastic_round_(out, value, **WHERE, offset=offset, impl="triton")
        expected = rounded(value, offset=offset)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), "NaN's sign and payload too"


@pytest.mark.parametrize("chip", CHIPS)
def test_triton_compiles_for_every_chip(chip: int) -> None:
    pytest.importorskip("triton")
    from trimtab.kernels.stochastic_rounding import impl_triton

    types = {
        "out_ptr": "*i16",
        "value_ptr": "*fp32",
        "count": "i64",
        "offset": "i64",
        "key0": "i32",
        "key1": "i32",
    }
    compiled = compile_for(chip, impl_triton._round_kernel, types, {"BLOCK": impl_triton.BLOCK})
    assert compiled.shared == 0
    assert compiled.spills in (0, None)
    assert "cvt.rn.bf16" not in compiled.ptx, "the hardware would round a second time"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_gpu_is_bitwise_identical_to_the_cpu(impl: str) -> None:
    for case in spec.CASES:
        value = spec.make_inputs(case)["value_N"]
        out = torch.empty(case, dtype=torch.bfloat16, device="cuda")
        for offset in (0, 2**32 - 100):
            stochastic_round_(out, value.cuda(), **WHERE, offset=offset, impl=impl)
            assert torch.equal(out.cpu(), rounded(value, offset=offset))
