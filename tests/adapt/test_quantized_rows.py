"""Quantized weights as frozen parameters with a row for each row of the weight, and slices of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels.triton_tools import interpreted
from quantized_world import SHAPE, adapted, empty, plain
from torch import nn

from trimtab.adapt import spec_quantized
from trimtab.adapt.packed_layout import NAMES, PackedLayout
from trimtab.adapt.quantized import QuantizedLinear, int8_tensor, nf4_weight, packed_state, quantized_layers
from trimtab.adapt.quantized_layout import check_row_layout, quantize_layout
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import uniform_shape
from trimtab.kernels import int8, nf4
from trimtab.model import build, init_weights, save_folder

KINDS: list[dict[str, Any]] = [
    {"kind": "nf4", "double": True},
    {"kind": "nf4", "double": False, "block": 128},
    {"kind": "int8"},
]


def layer_of(rows: int, columns: int, *, bias: bool = False, **options: Any) -> QuantizedLinear:
    """Rows of very different magnitudes, so that their scales differ."""
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) * torch.arange(1.0, rows + 1)[:, None]
    layer = QuantizedLinear(columns, rows, bias=bias, dtype=torch.float32, **options)
    layer.set_weight(weight)
    if layer.bias is not None:
        layer.bias.data.normal_(generator=generator)
    return layer


@pytest.mark.parametrize(
    ("options", "codes", "scales"),
    [
        ({"kind": "nf4"}, (torch.uint8, (6, 128)), (6, 4)),
        ({"kind": "nf4", "block": 128}, (torch.uint8, (6, 128)), (6, 2)),
        ({"kind": "nf4", "double": False}, (torch.uint8, (6, 128)), (6, 16)),
        ({"kind": "int8"}, (torch.int8, (6, 256)), (6, 4)),
    ],
    ids=str,
)
def test_codes_and_scales_are_frozen_parameters_with_a_row_each(
    options: dict[str, Any], codes: tuple[torch.dtype, tuple[int, int]], scales: tuple[int, int]
) -> None:
    layer = layer_of(6, 256, bias=True, **options)
    found = dict(layer.named_parameters())
    assert list(found) == ["codes", "scales", "bias"]
    assert not any(parameter.requires_grad for parameter in found.values())
    assert (found["codes"].dtype, tuple(found["codes"].shape)) == codes
    assert (found["scales"].dtype, tuple(found["scales"].shape)) == (torch.uint8, scales)
    tables = [] if layer.kind == "int8" else ["quant_map"]
    if layer.packed_layout.nested_block:
        tables = list(NAMES[2:])
    assert [name for name, _ in layer.named_buffers()] == tables


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("columns", [96, 100, 33])
def test_blocks_that_span_rows_are_flat_and_raise_where_rows_are_needed(columns: int, double: bool) -> None:
    layer = layer_of(7, columns, kind="nf4", double=double)
    assert not list(layer.parameters())
    assert all(tensor.ndim == 1 for tensor in layer.packed if tensor is not None)
    generator = torch.Generator().manual_seed(7 * columns)
    weight = torch.randn(7, columns, generator=generator) * torch.arange(1.0, 8.0)[:, None]
    assert torch.equal(layer.dequantized(), nf4.dequantize(nf4.quantize(weight, double=double)))
    with pytest.raises(
        RecipeError, match=rf"rows of {columns} elements, and NF4 blocks of 64 span several.*INT8"
    ):
        layer.slice_rows(0, 3)


def test_a_model_whose_rows_cannot_be_sliced_raises_with_the_layer() -> None:
    shape = uniform_shape("llama", 64, 64, 96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    for options in ({"kind": "nf4", "block": 32}, {"kind": "int8"}):
        check_row_layout(quantize_layout(plain(shape), **options))  # type: ignore[arg-type]
    words = r"model.layers.0.mlp.down_proj has rows of 96 elements, and NF4 blocks of 64 .*block=32\)"
    with pytest.raises(RecipeError, match=words):
        check_row_layout(quantize_layout(plain(shape), "nf4"))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, int, int, bool]:
    """Options, rows, columns, start, stop, bias; often more than one nested block of 256 scales."""
    kind = draw(st.sampled_from(["nf4", "int8"]))
    options: dict[str, Any] = {"kind": kind}
    rows, columns = draw(st.integers(1, 120)), draw(st.integers(1, 80))
    if kind == "nf4":
        options |= {"double": draw(st.booleans()), "block": draw(st.sampled_from([32, 64, 128]))}
        columns = options["block"] * draw(st.integers(1, 6))
    start = draw(st.integers(0, rows))
    return options, rows, columns, start, draw(st.integers(start, rows)), draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(cases())
@example(({"kind": "int8"}, 102, 27, 101, 102, False))
def test_a_slice_is_bitwise_identical_to_its_rows(
    case: tuple[dict[str, Any], int, int, int, int, bool],
) -> None:
    options, rows, columns, start, stop, bias = case
    layer = layer_of(rows, columns, bias=bias, **options)
    part = layer.slice_rows(start, stop)
    weight_NK = layer.dequantized()[start:stop]
    assert torch.equal(part.dequantized(), weight_NK)
    assert torch.equal(part.dequantized(torch.bfloat16), layer.dequantized(torch.bfloat16)[start:stop])
    # A unit vector's product is a column of the weight, whatever the order of summation.
    unit = torch.eye(columns)
    assert torch.equal(part(unit), layer(unit)[:, start:stop])
    x = torch.randn(5, columns, requires_grad=True)
    y = part(x)
    # A copy: with another alignment a library sums in another order.
    aligned_NK = weight_NK.clone()
    expected = nn.functional.linear(x, aligned_NK)
    assert torch.equal(y, expected if part.bias is None else expected + part.bias)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.ones_like(y) @ aligned_NK)
    middle = (stop - start) // 2
    assert torch.equal(part.slice_rows(middle, stop - start).dequantized(), weight_NK[middle:])


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_slice_shares_the_memory_of_the_layer(options: dict[str, Any]) -> None:
    layer = layer_of(40, 128, bias=True, **options)
    layer.set_dequantized_copy(torch.float32)
    part = layer.slice_rows(3, 11)
    for mine, theirs in zip([*part.packed, part.bias], [*layer.packed, layer.bias], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    assert part.dequantized_copy is not None
    layer.set_weight(torch.randn(40, 128))
    assert torch.equal(part.dequantized(), layer.dequantized()[3:11])
    assert torch.equal(part(torch.eye(128)), layer(torch.eye(128))[:, 3:11])
    assert torch.equal(part.to(torch.bfloat16).dequantized(torch.float32), layer.dequantized()[3:11])


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_slices_are_one_operator_under_compilation(options: dict[str, Any]) -> None:
    part = layer_of(150, 128, **options).slice_rows(77, 150)
    x = torch.randn(3, 128, requires_grad=True)
    torch.library.opcheck(torch.ops.trimtab.packed_linear, (x, *part.packed, part.text))
    compiled = torch.compile(lambda x: part(x).relu(), fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x), part(x).relu())


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_triton_reads_slices(options: dict[str, Any], rows: int) -> None:
    pytest.importorskip("triton")
    from trimtab.kernels.int8 import impl_triton as int8_triton
    from trimtab.kernels.nf4 import impl_triton, impl_triton_matmul

    with interpreted(impl_triton, impl_triton_matmul, int8_triton):
        layer = layer_of(150, 128, impl="triton", **options)  # 300 scales, or 150
        part = layer.slice_rows(129, 141)
        assert torch.equal(part.dequantized(), layer.dequantized()[129:141])
        x = torch.randn(rows, 128)
        whole = layer(x)[:, 129:141]
        if options["kind"] == "nf4" and rows <= 2:
            assert torch.equal(part(x), whole), "one sum per output feature, in a fixed order"
        assert torch.allclose(part(x), whole, rtol=1e-5, atol=1e-4)


def test_a_slice_cannot_be_loaded_or_saved() -> None:
    part = layer_of(40, 128, kind="nf4").slice_rows(0, 8)
    for refused in (
        lambda: part.set_weight(torch.randn(8, 128)),
        lambda: part.set_packed_weight(nf4.quantize(torch.randn(8, 128))),
        lambda: packed_state(part),
    ):
        with pytest.raises(ModelError, match=r"a slice of 8 rows.*; use the full layer"):
            refused()


def test_the_packed_weight_round_trips() -> None:
    weight = torch.randn(40, 128)
    for double in (True, False):
        given_NK = nf4.quantize(weight, double=double)
        layer = QuantizedLinear(128, 40, bias=False, kind="nf4", double=double, dtype=torch.float32)
        layer.set_packed_weight(given_NK)
        found = nf4_weight(layer)
        for name, tensor in given_NK.tensors().items():
            assert torch.equal(found.tensors()[name], tensor), name
    codes = int8.quantize(weight)
    layer = QuantizedLinear(128, 40, bias=False, kind="int8", dtype=torch.float32)
    layer.set_packed_weight(codes)
    assert torch.equal(int8_tensor(layer).codes, codes.codes)
    assert torch.equal(int8_tensor(layer).scale, codes.scale)


def test_a_packing_has_the_first_block_of_a_slice() -> None:
    layout = PackedLayout("nf4", 300, 192, 64, 256, "reference")
    part = layout.rows(100, 200).rows(1, 3)
    assert (part.first_block, part.out_features) == (303, 2)
    assert PackedLayout.from_text(part.text) == part
    assert PackedLayout("nf4", 300, 192, 64, 0, "reference").rows(100, 200).first_block == 0, (
        "no nested scales"
    )


def test_nothing_else_of_a_model_changes(tmp_path: Path) -> None:
    """Adapters train as before, and a model saved in one dtype contains no codes."""
    decoder = adapted()
    trained = [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert [name for name, p in decoder.named_parameters() if not p.is_floating_point()] == [
        f"{name}.{part}" for name, _ in quantized_layers(decoder) for part in ("codes", "scales")
    ]
    for file in save_folder(init_weights(empty(), seed=0), tmp_path / "m", dtype="fp32"):
        assert b".codes" not in file.read_bytes()[:100_000]
    assert next(empty().parameters()).dtype == torch.float32


def test_layers_on_meta_allocate_nothing_and_keep_their_parameters() -> None:
    decoder = build(SHAPE, dtype="bf16", device="meta", attention="reference")
    quantize_layout(decoder, "nf4", device="cpu")
    before = {name: (p.shape, p.dtype) for name, p in decoder.named_parameters()}
    assert all(parameter.is_meta for parameter in decoder.parameters())
    decoder.to_empty(device="cpu").to(torch.float32)
    after = {name: (p.shape, p.dtype) for name, p in decoder.named_parameters()}
    assert before.keys() == after.keys()
    linear = spec_quantized.linear_shapes(SHAPE)
    for name, (shape, dtype) in after.items():
        packed = f"{name.rpartition('.')[0]}.weight" in linear and not name.endswith(".bias")
        assert (shape, dtype) == (before[name][0], torch.uint8 if packed else torch.float32)
