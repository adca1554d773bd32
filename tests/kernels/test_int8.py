"""8-bit quantization: the formulas, their error, and Triton bitwise identical to torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels import int8
from trimtab.kernels.accuracy import check_accuracy
from trimtab.kernels.int8 import Int8Tensor, spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN, as intended
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with NaN (integers: the largest), so that elements that a kernel does not write show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def on_cpu() -> Any:
    pytest.importorskip("triton")
    from trimtab.kernels.int8 import impl_triton

    return interpreted(impl_triton)


def assert_same(a: Int8Tensor, b: Int8Tensor) -> None:
    for name in ("codes", "scale", "zero_point"):
        assert torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()), name


@pytest.mark.parametrize("scheme", spec.SCHEMES)
@pytest.mark.parametrize("granularity", spec.GRANULARITIES)
@pytest.mark.parametrize("case", spec.CASES)
def test_error_is_at_most_half_a_step(
    case: tuple[tuple[int, ...], int], granularity: str, scheme: str
) -> None:
    x = spec.make_inputs(case)
    tensor = int8.quantize(x, granularity=granularity, group=case[1], scheme=scheme)
    assert tensor.scale.numel() == spec.num_scales(case[0], tensor.length)
    num_bytes = sum(t.numel() * t.element_size() for t in (tensor.codes, tensor.scale, tensor.zero_point))
    assert num_bytes == spec.tensor_bytes(case[0], tensor.length, scheme == "affine")
    back = int8.dequantize(tensor)
    if not x.numel():
        assert back.shape == x.shape
        return
    step = int8.dequantize(
        Int8Tensor(torch.ones_like(tensor.codes), tensor.scale, tensor.scale[:0], tensor.length, x.dtype)
    )
    # affine: the zero point is rounded as well, so the ends of the range may be clipped by half a step more
    limit = 0.5 if scheme == "absmax" else 1.0
    assert ((back - x).abs() <= step * limit * 1.0001 + 1e-12).all()
    rms = (back - x).double().square().mean().sqrt()
    assert rms < 0.35 * step.double().square().mean().sqrt(), "uniform rounding has 0.289 of a step"


def test_by_hand() -> None:
    x = torch.tensor([[0.0, 1.27, -0.635], [2.55, 0.0, 1.0]])
    absmax = int8.quantize(x)
    assert absmax.codes.tolist() == [[0, 127, -64], [127, 0, 50]]  # −63.5 and 49.8: half to even
    affine = int8.quantize(x[1:], scheme="affine")
    assert affine.codes.tolist() == [[127, -128, -28]]
    assert affine.zero_point.tolist() == [-128]
    torch.testing.assert_close(affine.scale, torch.tensor([0.01]))
    assert int8.dequantize(affine)[0, 1] == 0, "zero is exact"


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 200),
    group=st.integers(1, 300),
    granularity=st.sampled_from(spec.GRANULARITIES),
    scheme=st.sampled_from(spec.SCHEMES),
    dtype=st.sampled_from(["fp32", "fp16"]),
    seed=st.integers(0, 99),
)
def test_triton_equals_the_reference(
    rows: int, columns: int, group: int, granularity: str, scheme: str, dtype: str, seed: int
) -> None:
    x = spec.make_inputs(((rows, columns), group), dtype=dtype, seed=seed)
    before = x.clone()
    expected = int8.quantize(x, granularity=granularity, group=group, scheme=scheme)
    with on_cpu():
        got = int8.quantize(x, granularity=granularity, group=group, scheme=scheme, impl="triton")
        assert_same(got, expected)
        for out in (torch.float32, torch.float16):
            assert torch.equal(
                int8.dequantize(got, dtype=out, impl="triton"), int8.dequantize(expected, dtype=out)
            )
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", [((2, 5000), 4500), ((0, 8), 4), ((), 4), ((3, 2, 40), 7)])
@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_long_rows_and_strange_shapes(case: tuple[tuple[int, ...], int], scheme: str) -> None:
    x = spec.make_inputs(case) if case[0] else torch.tensor(3.5)
    for granularity in spec.GRANULARITIES:
        expected = int8.quantize(x, granularity=granularity, group=case[1], scheme=scheme)
        with on_cpu():
            got = int8.quantize(x, granularity=granularity, group=case[1], scheme=scheme, impl="triton")
            assert_same(got, expected)
            back = int8.dequantize(got, impl="triton")
        assert torch.equal(back, int8.dequantize(expected))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_zeros_constants_extremes_and_non_finite_values(scheme: str, impl: str) -> None:
    x = torch.zeros(5, 16)
    x[1], x[2], x[3] = 7.0, -7.0, 1e-40
    x[4, :2] = torch.tensor([3e38, -3e38])
    with on_cpu():
        for granularity in ("row", "group"):
            tensor = int8.quantize(x, granularity=granularity, group=16, scheme=scheme, impl=impl)
            assert_same(tensor, int8.quantize(x, granularity=granularity, group=16, scheme=scheme))
            back = int8.dequantize(tensor, impl=impl)
            assert (back[[0, 3]] == 0).all()
            torch.testing.assert_close(back[[1, 2]], x[[1, 2]])
            assert back.isfinite().all()
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[2, 3] = bad
            for granularity in spec.GRANULARITIES:
                with pytest.raises(ModelError, match="NaN or infinity"):
                    int8.quantize(x, granularity=granularity, group=16, scheme=scheme, impl=impl)


def test_strides_and_wrong_arguments() -> None:
    x = torch.randn(40, 30)
    with on_cpu():
        assert_same(int8.quantize(x.t(), impl="triton"), int8.quantize(x.t().contiguous()))
    with pytest.raises(RecipeError, match="column"):
        int8.quantize(x, granularity="column")
    with pytest.raises(RecipeError, match="group is 0"):
        int8.quantize(x, granularity="group", group=0)
    with pytest.raises(RecipeError, match="float64"):
        int8.quantize(x.double())
    with pytest.raises(ValueError, match="no impl"):
        int8.quantize(x, impl="fast")


def test_one_percent_error_fails() -> None:
    x = spec.make_inputs(((64, 128), 32))
    back = int8.dequantize(int8.quantize(x))
    assert check_accuracy("x", back, truth=x.double(), reference=back, tolerance=4e-6)
    assert not check_accuracy("x", back * 1.01, truth=x.double(), reference=back, tolerance=4e-6)


def test_operators_pass_opcheck_and_trace_without_a_graph_break() -> None:
    x = torch.randn(6, 40)
    library = torch.ops.trimtab
    with on_cpu():
        for length, affine in ((0, True), (16, False)):
            torch.library.opcheck(library.int8_quantize, (x, length, affine))
            codes, scale, zero = library.int8_quantize(x, length, affine)
            torch.library.opcheck(library.int8_dequantize, (codes, scale, zero, length, torch.float16))

        def there_and_back(x: torch.Tensor) -> torch.Tensor:
            return int8.dequantize(int8.quantize(x.relu(), check=False, impl="triton"), impl="triton")

        compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), there_and_back(x))


def compiled_kernels(chip: int) -> Iterator[Any]:
    from trimtab.kernels.int8 import impl_triton

    value = "*fp16" if chip == 75 else "*bf16"
    outputs = {"codes_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i8"}
    sizes = {"columns": "i32:16", "length": "i32:16", "groups": "i32"}
    tile = impl_triton.TILE
    for width in (1, 128, tile):
        yield compile_for(
            chip,
            impl_triton._groups_kernel,
            {"x_ptr": value, **outputs, "num_scales": "i32", **sizes},
            {"S": min(tile // width, 256), "G": width, "AFFINE": True},
        )
    yield compile_for(
        chip, impl_triton._long_kernel, {"x_ptr": value, **outputs, **sizes}, {"TILE": tile, "AFFINE": True}
    )
    extremes = {"x_ptr": value, "low_ptr": value, "high_ptr": value}
    yield compile_for(
        chip,
        impl_triton._tensor_kernel,
        {**extremes, **outputs, "count": "i32"},
        {"TILE": tile, "AFFINE": True},
    )
    yield compile_for(
        chip,
        impl_triton._dequantize_kernel,
        {**outputs, "out_ptr": value, "count": "i32", **sizes},
        {"TILE": tile, "AFFINE": True, "WHOLE": False},
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_every_configuration_fits_every_chip(chip: int) -> None:
    pytest.importorskip("triton")
    for compiled in compiled_kernels(chip):
        assert compiled.shared <= SHARED_LIMIT[chip]
        assert not compiled.spills


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", spec.SCHEMES)
@pytest.mark.parametrize("granularity", spec.GRANULARITIES)
def test_gpu_is_bitwise_identical_to_the_cpu(granularity: str, scheme: str, dtype: str) -> None:
    for case in (*spec.CASES, ((1000, 4096), 128)):
        x = spec.make_inputs(case, dtype=dtype)
        expected = int8.quantize(x, granularity=granularity, group=case[1], scheme=scheme)
        got = int8.quantize(x.cuda(), granularity=granularity, group=case[1], scheme=scheme, impl="triton")
        assert_same(got, expected)
        assert torch.equal(int8.dequantize(got, impl="triton").cpu(), int8.dequantize(expected))


@pytest.mark.gpu
@GPU
def test_gpu_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of device memory")
    x = torch.randn(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda")
    tensor = int8.quantize(x, granularity="group", scheme="affine", impl="triton")
    tail = int8.quantize(x[-4:], granularity="group", scheme="affine", impl="triton")
    assert torch.equal(tensor.codes[-4:], tail.codes)
    back = int8.dequantize(tensor, impl="triton")
    assert torch.equal(back[-4:], int8.dequantize(tail, impl="triton"))
