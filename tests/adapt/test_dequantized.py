"""Dequantized copies of packed weights: bitwise identical with and without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_world import SHAPE, adapted, empty, plain, results, token_ids

from trimtab.adapt import compile_regions, merge_adapters, quantized_ops, recompute, set_dequantized_copies
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.quantized import QuantizedLinear, quantized_layers
from trimtab.adapt.spec_quantized import dequantized_bytes
from trimtab.facts.errors import RecipeError
from trimtab.model.decoder import Decoder
from trimtab.trainer.memory import storage_bytes

PACKINGS: dict[str, Any] = {
    "NF4": {"kind": "nf4"},
    "NF4, plain scales": {"kind": "nf4", "packing": {"double": False}},
    "INT8": {"kind": "int8"},
}


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def kept(decoder: Decoder) -> list[torch.Tensor]:
    found = (layer.dequantized_copy for _, layer in quantized_layers(decoder))
    return [tensor for tensor in found if tensor is not None]


def nothing_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantize(*_: Any) -> None:
        raise AssertionError("a weight was dequantized")

    monkeypatch.setattr(quantized_ops, "dequantize", dequantize)


@pytest.mark.parametrize("policy", ["none", "pointwise", "selective", "block", "offload"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PACKINGS)
def test_bitwise_identical_with_and_without(
    name: str, dtype: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = adapted(dtype=dtype, **PACKINGS[name])
    recompute.apply(decoder, [policy] * 2)
    expected = results(decoder)
    assert same(results(set_dequantized_copies(decoder, 1)), expected)
    set_dequantized_copies(decoder, 2)
    nothing_dequantized(monkeypatch)
    assert same(results(decoder), expected)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.2}], ids=str)
def test_adapters_that_run_separately(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = adapted(**settings)
    if masks := create_dropout_masks(decoder, torch.device("cpu")):
        masks.set(0, 1, 0, 12)
    expected = results(decoder)
    set_dequantized_copies(decoder, 2)
    nothing_dequantized(monkeypatch)
    assert same(results(decoder), expected)


def test_dequantized_copies_with_tiles() -> None:
    decoder = recompute.apply(adapted(), ["none"] * 2, mlp_tiles=2)
    expected = results(decoder)
    assert same(results(set_dequantized_copies(decoder, 2)), expected)


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dequantized_copies_in_compiled_blocks(backend: str, policy: str) -> None:
    torch._dynamo.reset()
    decoder = recompute.apply(adapted(), [policy] * 2)
    compile_regions(decoder, backend=backend)
    expected = results(decoder)
    assert same(results(set_dequantized_copies(decoder, 1)), expected)
    assert same(results(set_dequantized_copies(decoder, 2)), expected)


def test_under_autocast_the_copy_has_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(decoder)
        set_dequantized_copies(decoder, 2, dtype=torch.bfloat16)
        nothing_dequantized(monkeypatch)
        assert same(results(decoder), expected)


def test_products_in_another_dtype_read_the_packed_weight() -> None:
    decoder = adapted()
    expected = results(decoder)
    assert same(results(set_dequantized_copies(decoder, 2, dtype=torch.bfloat16)), expected)


def test_few_rows_read_the_packed_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = next(layer for _, layer in quantized_layers(set_dequantized_copies(adapted(), 1)))
    monkeypatch.setattr(quantized_ops, "is_fused", lambda packing, rows: 0 < rows <= 2)
    assert layer.operand(torch.zeros(2, 1, layer.in_features))[1] == layer.text
    tensors, text = layer.operand(torch.zeros(3, 1, layer.in_features))
    assert text == layer.plain_text
    assert tensors[0] is layer.dequantized_copy


def test_layers_without_adapters() -> None:
    decoder, ids = empty(), token_ids()
    for (_, layer), (_, linear) in zip(quantized_layers(decoder), linears(plain()), strict=True):
        layer.set_weight(linear.weight)
    for name, parameter in plain().named_parameters():
        if not any(name == f"{layer}.weight" for layer, _ in quantized_layers(decoder)):
            decoder.get_parameter(name).data.copy_(parameter)
    expected = decoder(ids)
    assert torch.equal(set_dequantized_copies(decoder, 2)(ids), expected)


def linears(decoder: Decoder) -> list[tuple[str, torch.nn.Linear]]:
    found = [(n, m) for n, m in decoder.named_modules() if type(m) is torch.nn.Linear]
    return [(name, module) for name, module in found if name != "lm_head"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_match_the_declaration(dtype: str) -> None:
    for layers in (0, 1, 2):
        decoder = set_dequantized_copies(adapted(dtype=dtype), layers)
        assert storage_bytes(kept(decoder)) == dequantized_bytes(SHAPE, layers, dtype)
    assert not kept(set_dequantized_copies(decoder, 0))


def test_dequantized_copies_are_neither_saved_nor_trained() -> None:
    decoder, other = adapted(), set_dequantized_copies(adapted(), 2)
    assert other.state_dict().keys() == decoder.state_dict().keys()
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in decoder.named_parameters()]
    assert not any(tensor.requires_grad for tensor in kept(other))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merge_is_the_same_with_dequantized_copies(dtype: str) -> None:
    decoder, other = adapted(), set_dequantized_copies(adapted(), 2)
    assert merge_adapters(other, dtype=dtype) == merge_adapters(decoder, dtype=dtype)
    mine, theirs = other.state_dict(), decoder.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_dequantized_copy_moves_with_the_layer() -> None:
    layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.bfloat16)
    weight = torch.randn(8, 64)
    layer.set_weight(weight)
    expected = layer.dequantized()
    layer.set_dequantized_copy(torch.bfloat16)
    layer.to(torch.float32)
    assert layer.dequantized_copy is not None
    assert layer.dequantized_copy.dtype == torch.bfloat16
    assert torch.equal(layer.dequantized_copy, expected)
    layer.to("meta")
    assert layer.dequantized_copy.is_meta
    layer.to_empty(device="cpu")
    layer.set_weight(weight)
    assert torch.equal(layer.dequantized_copy, expected)


def test_the_dequantized_copy_is_updated_with_the_packed_weight() -> None:
    decoder = set_dequantized_copies(adapted(), 2)
    twin = copy.deepcopy(decoder)
    for _, layer in quantized_layers(twin):
        layer.set_weight(torch.randn(layer.packed_layout.shape))
        assert layer.dequantized_copy is not None
        assert torch.equal(layer.dequantized_copy, fresh(layer))
    assert not same(kept(twin), kept(decoder)), "a deep copy has its own"
    twin.load_state_dict(decoder.state_dict())
    assert same(kept(twin), kept(decoder))


def fresh(layer: QuantizedLinear) -> torch.Tensor:
    made: torch.Tensor = torch.ops.trimtab.packed_weight(*layer.packed, layer.text, layer.dtype)
    return made


def test_invalid_arguments_raise() -> None:
    with pytest.raises(RecipeError, match="copies of 3 layers: the model has 2"):
        set_dequantized_copies(adapted(), 3)
    with pytest.raises(RecipeError, match="the model has no quantized weight"):
        set_dequantized_copies(plain(), 1)
    set_dequantized_copies(plain(), 0)
