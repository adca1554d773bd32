"""Rows of an NF4 tensor dequantized from their own codes and scales: bitwise identical to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.triton_tools import interpreted

from trimtab.kernels import nf4
from trimtab.kernels.nf4 import impl_reference
from trimtab.kernels.nf4.weight import NF4Weight


def made(rows: int, columns: int, block: int, double: bool) -> NF4Weight:
    scale = torch.exp2(torch.rand(rows, 1, generator=torch.Generator().manual_seed(1)) * 6)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * scale
    return nf4.quantize(weight, block=block, double=double, impl="reference")


def sliced(weight: NF4Weight, start: int, stop: int) -> tuple[Any, ...]:
    """Codes and scales of these rows, as matrices; tables and nested scales of the whole."""
    rows = weight.shape[0]
    tables = (weight.quant_map, weight.nested_absmax, weight.nested_quant_map, weight.offset)
    return weight.codes.view(rows, -1)[start:stop], weight.absmax.view(rows, -1)[start:stop], *tables


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """rows, columns, block, start, stop; often more than one nested block of 256 scales."""
    rows, block = draw(st.integers(1, 150)), draw(st.sampled_from([32, 64, 256]))
    columns = block * draw(st.integers(1, 7))
    start = draw(st.integers(0, rows - 1))
    return rows, columns, block, start, draw(st.integers(start + 1, rows))


@settings(max_examples=60, deadline=None)
@given(slices(), st.booleans(), st.booleans())
def test_rows_of_a_tensor(case: tuple[int, int, int, int, int], double: bool, transposed: bool) -> None:
    rows, columns, block, start, stop = case
    weight = made(rows, columns, block, double)
    whole_NK = nf4.dequantize(weight, impl="reference")
    state = (*sliced(weight, start, stop), (stop - start, columns), torch.float32, block, weight.nested_block)
    first_block = start * columns // block
    found = impl_reference.dequantize(*state, transposed=transposed, first_block=first_block)
    expected = whole_NK[start:stop]
    assert torch.equal(found, expected.T if transposed else expected)


CASES = [(200, 192, 64, 0, 200), (200, 192, 64, 0, 7), (200, 192, 64, 86, 200), (90, 192, 32, 64, 65)]
"""With 600 and 540 scales. The third slice begins at scale 258, two into a nested block; the last at 384, in the middle
of one."""


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("case", [*CASES, (300, 128, 64, 128, 300)], ids=str)
def test_rows_of_a_tensor_in_triton(case: tuple[int, int, int, int, int], double: bool) -> None:
    pytest.importorskip("triton")
    from trimtab.kernels.nf4 import impl_triton, impl_triton_matmul

    rows, columns, block, start, stop = case
    weight = made(rows, columns, block, double)
    expected_NK = nf4.dequantize(weight, impl="reference")[start:stop]
    shape, first_block = (stop - start, columns), start * columns // block
    state = sliced(weight, start, stop)
    sizes = (block, weight.nested_block)
    with interpreted(impl_triton, impl_triton_matmul):
        for transposed in (False, True):
            found = impl_triton.dequantize(
                *state, shape, torch.float32, *sizes, transposed=transposed, first_block=first_block
            )
            assert torch.equal(found, expected_NK.T if transposed else expected_NK)
        for num_x in (1, 2, 3):
            x = torch.randn(num_x, columns, generator=torch.Generator().manual_seed(2))
            whole = impl_triton_matmul.matmul(x, *sliced(weight, 0, rows), (rows, columns), *sizes)
            found = impl_triton_matmul.matmul(x, *state, shape, *sizes, first_block)
            if num_x < 3:
                assert torch.equal(found, whole[:, start:stop])
            else:
                assert torch.equal(found, x @ expected_NK.T)


def test_a_wrong_first_block_fails() -> None:
    """Blocks of scales differ enough for these tests to fail."""
    weight = made(200, 192, 64, double=True)
    state = (*sliced(weight, 86, 200), (114, 192), torch.float32, 64, weight.nested_block)
    found = impl_reference.dequantize(*state, first_block=0)
    assert not torch.equal(found, nf4.dequantize(weight, impl="reference")[86:])
