"""NF4: bitwise identical to bitsandbytes, in torch and in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.triton_tools import interpreted

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels import nf4
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.nf4 import NF4Weight, ops, spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on 1/0, as intended
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills new memory with NaN (integers: the largest), so that elements that a kernel does not write show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def on_cpu() -> Any:
    """Triton's kernels of this operation, interpreted."""
    pytest.importorskip("triton")
    from trimtab.kernels.nf4 import impl_triton, impl_triton_matmul

    return interpreted(impl_triton, impl_triton_matmul)


def assert_same(a: NF4Weight, b: NF4Weight) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        other = b.tensors()[name].to(tensor.device)
        assert torch.equal(tensor, other), f"{name}: {(tensor != other).sum()} of {tensor.numel()} differ"


def bitwise_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def around(values: tuple[float, ...]) -> torch.Tensor:
    """Each value, the fp32 value below it and the one above."""
    at = torch.tensor(values)
    below = torch.nextafter(at, torch.full_like(at, -9.0))
    return torch.stack((below, at, torch.nextafter(at, torch.full_like(at, 9.0))), 1).flatten()


def test_thresholds_are_midpoints_but_for_four_last_bits() -> None:
    table, thresholds = torch.tensor(spec.TABLE), torch.tensor(spec.THRESHOLDS)
    apart = ((table[1:] + table[:-1]) / 2).view(torch.int32) - thresholds.view(torch.int32)
    assert apart.nonzero().flatten().tolist() == [0, 8, 12, 14]
    assert apart.abs().max() == 1


def test_no_quotient_of_bf16_numbers_comes_near_a_threshold() -> None:
    # so an ulp in the reciprocal, which differs between devices, cannot change a code of bf16 weights
    mantissa = torch.arange(128, 256, dtype=torch.float64)
    quotients = torch.cat([(mantissa[:, None] / mantissa).flatten() * 2.0**-shift for shift in range(8)])
    for threshold in spec.THRESHOLDS:
        assert ((quotients - abs(threshold)).abs() / abs(threshold) * 2**23).min() > 9


def test_no_threshold_lies_near_the_edge_of_a_bin() -> None:
    # 15 x is rounded once more or once less than in exact arithmetic: about 1e-6 at most
    assert min(abs(15 * t - (round(15 * t - 0.5) + 0.5)) for t in spec.THRESHOLDS) > 0.01


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_ties_round_down_and_the_next_value_up(impl: str) -> None:
    values = torch.nn.functional.pad(around(spec.THRESHOLDS), (0, 19), value=1.0)
    with on_cpu():
        weight = nf4.quantize(values, block=64, double=False, impl=impl)
    pairs = torch.stack((weight.codes >> 4, weight.codes & 15), 1).flatten()[:45].view(15, 3)
    assert pairs.tolist() == [[k, k, k + 1] for k in range(15)]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_scales_take_the_nearest_of_the_256_values(impl: str) -> None:
    table = torch.tensor(spec.dynamic_map())
    x = torch.cat((around(spec.dynamic_map()), around(tuple(((table[1:] + table[:-1]) / 2).tolist()))))
    x = torch.nn.functional.pad(x.clamp(-1, 1), (0, -x.numel() % 256), value=1.0)
    x[::256] = 1.0
    zero = torch.tensor(0.0)
    with on_cpu():
        if impl == "triton":
            codes, absmax = torch.ops.trimtab.nf4_quantize_scales(x, zero, table, 256)
        else:
            codes, absmax = ops.impl_reference.quantize_scales(x, zero, table, 256)
    assert (absmax == 1).all()
    chosen = (table.double()[codes.int()] - x.double()).abs()
    best = (table.double()[None] - x.double()[:, None]).abs().amin(1)
    assert (chosen <= best + 3e-7 * x.abs().double()).all()  # an ulp where a midpoint is rounded


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", spec.CASES)
def test_bitsandbytes_is_bitwise_identical(case: tuple[tuple[int, ...], int], dtype: str) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = spec.make_inputs(case, dtype=dtype)
    for double in (False, True):
        ours = nf4.quantize(weight, block=case[1], double=double, zero_code=7)  # its CPU code for zeros
        codes, state = bnb.quantize_4bit(
            weight, blocksize=case[1], quant_type="nf4", compress_statistics=double
        )
        theirs = state.as_dict(packed=True)
        entries = ours.to_bitsandbytes()
        assert torch.equal(entries.pop("weight"), codes)
        assert list(entries) == [f"weight.{name}" for name in theirs]
        for name, tensor in theirs.items():
            assert torch.equal(entries[f"weight.{name}"], tensor), name
        with torch._dynamo.config.patch(disable=True):
            back = bnb.dequantize_4bit(codes, state)
        assert torch.equal(nf4.dequantize(ours), back.view(weight.shape))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    block=st.sampled_from(spec.BLOCKS),
    double=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp16"]),
    seed=st.integers(0, 99),
)
def test_triton_equals_the_reference(
    rows: int, columns: int, block: int, double: bool, dtype: str, seed: int
) -> None:
    weight = spec.make_inputs(((rows, columns), block), dtype=dtype, seed=seed)
    weight[0, : columns // 3] = 0.0
    before = weight.clone()
    expected = nf4.quantize(weight, block=block, double=double)
    with on_cpu():
        got = nf4.quantize(weight, block=block, double=double, impl="triton")
        assert_same(got, expected)
        for out in (torch.float32, torch.float16):
            value = nf4.dequantize(got, dtype=out, impl="triton")
            assert bitwise_identical(value, nf4.dequantize(expected, dtype=out))
            transposed_value = nf4.dequantize(got, dtype=out, transposed=True, impl="triton")
            assert transposed_value.is_contiguous()
            assert bitwise_identical(transposed_value, value.t())
    assert torch.equal(weight, before)


def test_many_programs_many_nested_blocks_and_three_dimensions() -> None:
    weight = spec.make_inputs(((3, 70, 160), 32))
    expected = nf4.quantize(weight, block=32)
    assert expected.nested_absmax is not None
    assert expected.nested_absmax.numel() == 5
    with on_cpu():
        got = nf4.quantize(weight, block=32, impl="triton")
        assert_same(got, expected)
        transposed_value = nf4.dequantize(got, transposed=True, impl="triton")
    assert torch.equal(transposed_value, nf4.dequantize(expected).transpose(1, 2))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_zero_blocks(impl: str) -> None:
    weight = torch.randn(4, 64)
    weight[1] = 0.0
    weight[2] = 1e-40  # subnormal: flushed, so zero as well
    with on_cpu():
        as_cuda = nf4.quantize(weight, double=False, impl=impl)
        exact = nf4.quantize(weight, double=True, zero_code=7, impl=impl)
        assert as_cuda.codes.view(4, 32)[1:3].unique().tolist() == [0]
        assert as_cuda.absmax[1:3].tolist() == [0.0, 0.0]
        assert (nf4.dequantize(as_cuda, impl=impl)[1:3] == 0).all()
        assert (nf4.dequantize(exact, impl=impl)[1:3] == 0).all()
        constant = nf4.quantize(
            torch.ones(600), block=32, impl=impl
        )  # all scales equal: zero differences from the mean
        assert (nf4.dequantize(constant, impl=impl) == 1).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_smallest_and_largest_numbers(impl: str) -> None:
    for size in (2.0**-126, 2.0**-124, 2.0**126, 3e38):
        weight = torch.randn(128).clamp(-1, 1) * size
        with on_cpu():
            got = nf4.quantize(weight, double=False, impl=impl)
            back = nf4.dequantize(got, impl=impl)
        assert_same(got, nf4.quantize(weight, double=False))
        assert back.isfinite().all()
        assert ((back == 0) | (back.abs() >= spec.SMALLEST_NORMAL)).all(), "subnormals are flushed"


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("double", [False, True])
def test_non_finite_values_raise(impl: str, bad: float, double: bool) -> None:
    weight = torch.randn(300)
    weight[257] = bad
    with on_cpu():
        with pytest.raises(ModelError, match="NaN or infinity"):
            nf4.quantize(weight, double=double, impl=impl)
        unchecked = nf4.quantize(weight, double=double, check=False, impl=impl)
    good = nf4.quantize(torch.randn(5), double=double)
    with pytest.raises(ModelError, match=r"layers\.7: NaN"):
        nf4.check_finite({"layers.6": good, "layers.7": unchecked})
    nf4.check_finite({"layers.6": good, "empty": nf4.quantize(torch.empty(0, 3), double=False)})


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_finite_weights_with_overflowing_scales_are_named(impl: str) -> None:
    weight = torch.randn(64, 64) * 5e37
    with on_cpu():
        with pytest.raises(
            ModelError, match=r"^weight: finite weights so large that the mean of their scales overf"
        ):
            nf4.quantize(weight, impl=impl)
        nf4.quantize(weight, double=False, impl=impl)


def test_empty_strided_and_wrong_arguments() -> None:
    weight = torch.randn(40, 30)
    with on_cpu():
        for impl in ("reference", "triton"):
            assert_same(nf4.quantize(weight.t(), impl=impl), nf4.quantize(weight.t().contiguous()))
            empty = nf4.quantize(torch.empty(3, 0), double=False, impl=impl)
            assert nf4.dequantize(empty, impl=impl).shape == (3, 0)
        odd = nf4.quantize(torch.randn(8, 8), double=False)
        shifted = torch.cat((odd.codes.new_zeros(1), odd.codes))[1:]  # starts at an odd address
        view = NF4Weight(shifted, odd.absmax, odd.quant_map, odd.shape, odd.dtype, odd.block)
        assert torch.equal(nf4.dequantize(view, impl="triton"), nf4.dequantize(odd))
    with pytest.raises(RecipeError, match="not support blocks of 48"):
        nf4.quantize(weight, block=48)
    with pytest.raises(RecipeError, match="not torch"):
        nf4.quantize(weight.double())
    with pytest.raises(RecipeError, match="no transpose"):
        nf4.dequantize(nf4.quantize(torch.randn(9)), transposed=True)
    with pytest.raises(ValueError, match="no impl"):
        nf4.quantize(weight, impl="fast")


def product_and_gradient(
    x: torch.Tensor, weight: NF4Weight, grad: torch.Tensor, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    out = nf4.matmul(x, weight, impl=impl)
    (gradient,) = torch.autograd.grad(out, x, grad)
    return out.detach(), gradient


def check_matmul(x: torch.Tensor, weight: NF4Weight, grad: torch.Tensor, dtype: str) -> None:
    """Output and gradient of the Triton version against fp64, allowing the reference's own error and a tolerance."""
    wide = nf4.dequantize(weight, dtype=x.dtype, impl="reference").double()
    truths = x.double() @ wide.t(), grad.double() @ wide
    references = product_and_gradient(x, weight, grad, "reference")
    results = product_and_gradient(x, weight, grad, "triton")
    for name, got, truth, reference in zip(("out", "grad"), results, truths, references, strict=True):
        checked = check_accuracy(name, got, truth=truth, reference=reference, tolerance=TOLERANCE[dtype])
        assert checked, checked
        assert not check_accuracy(
            name, reference * 1.01, truth=truth, reference=reference, tolerance=TOLERANCE[dtype]
        )


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 4),
    features=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    double=st.booleans(),
    block=st.sampled_from((32, 64, 256)),
    step=st.sampled_from((1, 8)),
)
def test_matmul_is_exact(rows: int, features: tuple[int, int], double: bool, block: int, step: int) -> None:
    out_features, in_features = features[0], features[1] * step
    weight = nf4.quantize(torch.randn(out_features, in_features), block=block, double=double)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator)
    with on_cpu():
        check_matmul(x, weight, torch.randn(rows, out_features, generator=generator), "fp32")


def test_matmul_with_strides_and_broadcast_gradients() -> None:
    weight = nf4.quantize(torch.randn(24, 64))
    x = torch.randn(64, 3, 2).permute(2, 1, 0)
    grad = torch.randn(1, 1, 24).expand(2, 3, 24)
    with on_cpu():
        check_matmul(x, weight, grad, "fp32")
        check_matmul(torch.randn(64), weight, torch.ones(()).expand(24), "fp32")
        again = [nf4.matmul(x, weight, impl="triton") for _ in range(2)]
    assert torch.equal(*again)


def state(weight: NF4Weight) -> tuple[Any, ...]:
    return (*ops._state(weight)[:6], list(weight.shape))


def test_operators_pass_opcheck() -> None:
    value = torch.randn(16, 64)
    _table, nested_map, bins = ops.constants(value)
    library = torch.ops.trimtab
    with on_cpu():
        torch.library.opcheck(library.nf4_quantize, (value, bins, 64, 0))
        scales = torch.rand(300)
        torch.library.opcheck(library.nf4_quantize_scales, (scales, scales.mean(), nested_map, 256))
        for double in (False, True):
            weight = nf4.quantize(value, double=double)
            torch.library.opcheck(library.nf4_dequantize, (*state(weight), torch.float16, 64, 256, double))
            x = torch.randn(2, 64, requires_grad=True)
            torch.library.opcheck(library.nf4_matmul, (x, *state(weight), 64, 256))


def test_traces_without_a_graph_break() -> None:
    weight = nf4.quantize(torch.randn(16, 64))

    def step(x: torch.Tensor) -> torch.Tensor:
        transposed_value = nf4.dequantize(weight, transposed=True, impl="triton")
        return nf4.matmul(x.relu(), weight, impl="triton") @ transposed_value.t() + x

    with on_cpu():
        x = torch.randn(2, 64, requires_grad=True)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), step(x))
        (got,) = torch.autograd.grad(compiled(x).sum(), x)
        (expected,) = torch.autograd.grad(step(x).sum(), x)
    torch.testing.assert_close(got, expected)


def test_fake_tensors_leave_nothing_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ops._constants.clear()
    for impl in ("reference", "triton"):
        with FakeTensorMode():
            fake = nf4.quantize(torch.randn(7, 33), check=False, impl=impl)
            assert nf4.dequantize(fake, transposed=True, impl=impl).shape == (33, 7)
            assert nf4.matmul(torch.randn(4, 33), fake, impl=impl).shape == (4, 7)
        assert fake.codes.shape == (116,)
        assert nf4.dequantize(nf4.quantize(torch.ones(8))).tolist() == [1.0] * 8


def test_costs_match_allocations() -> None:
    for shape in ((128, 64), (7, 33)):
        for double in (False, True):
            weight = nf4.quantize(torch.randn(shape), double=double)
            assert weight.num_bytes == spec.weight_bytes(shape, double=double)
    assert spec.scratch_bytes((64, 64), 2) == 0 < spec.scratch_bytes((64, 64), 3)


ON_A_GPU = [
    *((case, "bf16") for case in spec.CASES),
    (((4096, 1024), 64), "bf16"),
    (((4096, 1024), 64), "fp32"),
    (((1023, 1001), 64), "fp32"),
    (((512, 4096), 1024), "fp16"),
]
"""Not every dtype with every block: each pair is compiled, half a second per kernel."""


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("case", "dtype"), ON_A_GPU)
def test_gpu_is_bitwise_identical_to_bitsandbytes(case: tuple[tuple[int, ...], int], dtype: str) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = spec.make_inputs(case, dtype=dtype, device="cuda")
    weight.view(-1)[: case[1]] = 0.0
    for double in (False, True):
        ours = nf4.quantize(weight, block=case[1], double=double, impl="triton")
        codes, theirs = bnb.quantize_4bit(
            weight, blocksize=case[1], quant_type="nf4", compress_statistics=double
        )
        entries = ours.to_bitsandbytes()
        assert torch.equal(entries["weight"], codes)
        for name, tensor in theirs.as_dict(packed=True).items():
            assert torch.equal(entries[f"weight.{name}"].cpu(), tensor.cpu()), name
        back = bnb.dequantize_4bit(codes, theirs).view(weight.shape)
        got = nf4.dequantize(ours, impl="triton")
        assert bitwise_identical(got, back)
        assert bitwise_identical(nf4.dequantize(ours, impl="triton"), back), (
            "launched without Triton's own launcher"
        )
        if weight.ndim > 1:
            transposed_value = nf4.dequantize(ours, transposed=True, impl="triton")
            assert bitwise_identical(transposed_value, back.transpose(-1, -2).contiguous())
        assert bitwise_identical(got, nf4.dequantize(ours.to("cpu")).cuda())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gpu_matmul_is_exact(rows: int, dtype: str) -> None:
    weight = nf4.quantize(torch.randn(1000, 1096, device="cuda", dtype=DTYPES[dtype]))
    x = torch.randn(rows, 1096, device="cuda", dtype=DTYPES[dtype])
    check_matmul(x, weight, torch.randn(rows, 1000, device="cuda", dtype=DTYPES[dtype]), dtype)


@pytest.mark.gpu
@GPU
def test_gpu_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of device memory")
    shape, block = spec.LARGE_CASE
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    packed = nf4.quantize(weight, block=block, impl="triton")
    assert packed.numel > 2**31
    assert weight[:-1].numel() % block == 0  # so that the last row begins a block
    tail = nf4.quantize(weight[-1:], block=block, double=False, impl="triton")
    assert torch.equal(packed.codes[-tail.codes.numel() :], tail.codes)
    del weight
    back = nf4.dequantize(packed, impl="triton")
    scales = ops.impl_reference.scales(*(ops._state(packed)[i] for i in (1, 3, 4, 5)), packed.nested_block)
    last = NF4Weight(
        tail.codes, scales[-tail.absmax.numel() :].contiguous(), tail.quant_map, tail.shape, tail.dtype, block
    )
    assert bitwise_identical(back[-1:], nf4.dequantize(last, impl="reference"))


@pytest.mark.parametrize("impl", spec.IMPLS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_dequantize_into_out(impl: str, transposed: bool, double: bool) -> None:
    weight = nf4.quantize(torch.randn(10, 24), double=double)
    expected = nf4.dequantize(weight, dtype=torch.float16, transposed=transposed)
    out = torch.empty_like(expected)
    with on_cpu() if impl == "triton" else nullcontext():
        assert nf4.dequantize(weight, transposed=transposed, out=out, impl=impl) is out
    assert bitwise_identical(out, expected)
    with pytest.raises(AssertionError):
        nf4.dequantize(weight, out=torch.empty(24, 11))


def test_written_into_given_memory_under_compilation() -> None:
    weight = nf4.quantize(torch.randn(8, 64))

    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return x @ nf4.dequantize(weight, out=out, impl="triton").T

    with on_cpu():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        x, out = torch.randn(3, 64), torch.empty(8, 64)
        assert torch.equal(compiled(x, out), x @ nf4.dequantize(weight).T)
    assert torch.equal(out, nf4.dequantize(weight))
