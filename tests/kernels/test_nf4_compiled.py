"""NF4's kernels compiled for every supported GPU architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for

from trimtab.kernels.nf4 import spec


def compiled_kernels(chip: int, start: int = 0) -> Iterator[Any]:
    """`start`: index of a slice's first scale within its nested block."""
    from trimtab.kernels.nf4 import impl_triton, impl_triton_matmul

    value = "*fp16" if chip == 75 else "*bf16"  # Turing has no bf16
    pointers = {
        "map_ptr": "*fp32",
        "nested_absmax_ptr": "*fp32",
        "nested_map_ptr": "*fp32",
        "offset_ptr": "*fp32",
        "out_ptr": value,
    }
    shifts = {"LOG_BLOCK": 6, "LOG_NESTED": 8, "NESTED_START": start, "ON_GPU": True}
    cut = impl_triton.dequantize_configuration()
    for by_word, even, nested in (
        (True, True, True),
        (True, False, True),
        (False, False, False),
    ):
        yield compile_for(
            chip,
            impl_triton._dequantize_kernel,
            {
                "codes_ptr": "*i32" if by_word else "*u8",
                "absmax_ptr": "*u8" if nested else "*fp32",
                **pointers,
                "count": "i32",
            },
            {**shifts, "NESTED": nested, "TILE": cut.tile, "EVEN": even, "BY_WORD": by_word},
            num_warps=cut.num_warps,
        )
    transposed_signature = {
        "codes_ptr": "*i32",
        "absmax_ptr": "*u8",
        **pointers,
        "rows": "i32:16",
        "columns": "i32:16",
    }
    yield compile_for(
        chip,
        impl_triton._dequantize_transposed_kernel,
        transposed_signature,
        {
            **shifts,
            "NESTED": True,
            "R": impl_triton.TRANSPOSE_TILE,
            "C": impl_triton.TRANSPOSE_TILE,
            "BY_WORD": True,
        },
    )
    quantizer = {
        "bins_ptr": "*fp32",
        "codes_ptr": "*u8",
        "absmax_ptr": "*fp32",
        "count": "i32",
        "zero_code": "i32",
    }
    for block in (32, 64, 4096):
        cut = impl_triton.quantize_configuration(block)
        fixed = {"BLOCK": block, "TILE": cut.tile, "EVEN": block != 32, "ON_GPU": True}
        pointer = "*fp32" if block == 32 else value
        yield compile_for(
            chip,
            impl_triton._quantize_kernel,
            {"value_ptr": pointer, **quantizer},
            fixed,
            num_warps=cut.num_warps,
        )
    scales = {"absmax_ptr": "*fp32", "offset_ptr": "*fp32", "map_ptr": "*fp32", "codes_ptr": "*u8"}
    yield compile_for(
        chip,
        impl_triton._quantize_scales_kernel,
        {**scales, "nested_absmax_ptr": "*fp32", "count": "i32"},
        {"BLOCK": 256, "ON_GPU": True},
    )
    for kind in (value, "*fp32"):
        operands = {"x_ptr": kind, "codes_ptr": "*i32", "absmax_ptr": "*u8", **pointers, "out_ptr": kind}
        sizes = {"num_n": "i32:16", "num_k": "i32:16", "x_stride": "i32:16"}
        for rows in range(1, spec.FUSED_ROWS + 1):
            fixed = {"M": rows, "N": impl_triton_matmul.NUM_N[rows], "K": impl_triton_matmul.NUM_K}
            yield compile_for(
                chip,
                impl_triton_matmul._rows_kernel,
                {**operands, **sizes},
                {**shifts, "NESTED": True, **fixed},
                num_warps=impl_triton_matmul.NUM_WARPS,
            )


@pytest.mark.parametrize(("chip", "start"), [*((chip, 0) for chip in CHIPS), (90, 3)])
def test_every_configuration_fits_every_chip(chip: int, start: int) -> None:
    pytest.importorskip("triton")
    for compiled in compiled_kernels(chip, start):
        assert compiled.shared <= SHARED_LIMIT[chip]
        assert not compiled.spills


def test_dequantize_stores_sixteen_bytes_and_fuses_no_sum() -> None:
    pytest.importorskip("triton")
    compiled = next(compiled_kernels(90))
    assert compiled.ptx.count("st.global.v4.b32") == 2
    assert "fma.rn.f32" not in compiled.ptx
    assert compiled.shared == 64, "only the table: no value passes through shared memory"
