"""NF4 of very small and very large weights, where CUDA's fast math differs from plain fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_nf4 import GPU, on_cpu

from trimtab.kernels import nf4
from trimtab.kernels.nf4 import ops, spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on 1/0, as intended

SIZES = (1e-44, 1e-39, 1e-38, 1e-37, 1e-36, 1e-35, 1.0, 4e37, 1e38, 3e38)
"""Magnitudes of weights: from subnormal to those whose scales have a subnormal reciprocal, or no finite sum."""


def spread(size: float) -> torch.Tensor:
    """Blocks of 64 over two decades up to `size`: scales, their differences and values all come close to the limits."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(16, 64, generator=generator).clamp(-3, 3) / 3
    return weight * size * torch.logspace(-2, 0, 16)[:, None]


@pytest.mark.parametrize("double", [False, True])
def test_triton_equals_the_reference_at_any_size(double: bool) -> None:
    for size in SIZES:
        weight = spread(size)
        expected = nf4.quantize(weight, double=double, check=False)
        with on_cpu():
            got = nf4.quantize(weight, double=double, check=False, impl="triton")
            back = nf4.dequantize(got, impl="triton")
        for name, tensor in expected.tensors().items():
            assert torch.equal(tensor.nan_to_num(), got.tensors()[name].nan_to_num()), (size, name)
        assert torch.equal(back.nan_to_num(), nf4.dequantize(expected).nan_to_num()), size


@GPU
@pytest.mark.gpu
@pytest.mark.oracle
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_on_a_gpu_is_bitwise_identical_at_any_size(double: bool, impl: str) -> None:
    """bf16 values, whose codes do not depend on the last bit of the reciprocal."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    for size in SIZES:
        weight = spread(size).bfloat16().cuda()
        ours = nf4.quantize(weight, double=double, check=False, impl=impl)
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        assert torch.equal(ours.codes, codes.view(-1)), size
        scales = {"absmax": state.absmax}
        if double:
            scales["nested_absmax"] = state.state2.absmax
        for name, theirs in scales.items():
            assert torch.equal(ours.tensors()[name].nan_to_num(), theirs.nan_to_num()), (size, name)
        back = bnb.dequantize_4bit(codes, state)
        assert torch.equal(nf4.dequantize(ours, impl=impl).nan_to_num(), back.nan_to_num()), size


def flushing(a: Any, b: Any) -> Any:
    """fp32 a · b as code compiled with fast math multiplies: subnormal factors and results are zeros."""

    def flush(x: Any) -> Any:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0) * x, x)

    with np.errstate(all="ignore"):
        return flush(flush(a) * flush(b))


def test_scales_are_coded_as_bitsandbytes_searches_them() -> None:
    """Its bisection over the 256 values, one scale at a time, in arithmetic that flushes subnormals."""
    table = np.array(spec.dynamic_map(), dtype=np.float32)

    def code_of(x: float) -> int:
        pivot, upper, lower = 127, 255, 0
        for step in (64, 32, 16, 8, 4, 2, 1):
            if x > table[pivot]:
                lower, pivot = pivot, pivot + step
            else:
                upper, pivot = pivot, pivot - step
        if x > table[pivot]:
            return upper if x > (table[upper] + table[pivot]) * np.float32(0.5) else pivot
        return lower if x < (table[lower] + table[pivot]) * np.float32(0.5) else pivot

    for size in (1e-37, 1e-36, 1e-30, 1.0, 1e37):
        absmax = torch.cat((torch.rand(250) - 0.4, torch.tensor([1e-3, 1e-2, -1e-3, -1e-2, 0.0, 1.0])))
        absmax = (absmax * size).float()
        zero = torch.tensor(0.0)
        codes, largest = ops.impl_reference.quantize_scales(absmax, zero, torch.tensor(table), 256)
        inverse = np.float32(1.0) / largest.numpy()
        scaled = flushing(absmax.numpy(), inverse)
        assert codes.tolist() == [code_of(x) for x in scaled], size
    codes, _ = ops.impl_reference.quantize_scales(
        torch.full((256,), 3e38), torch.tensor(torch.inf), torch.tensor(table), 256
    )
    assert codes.tolist() == [code_of(float("nan"))] * 256
