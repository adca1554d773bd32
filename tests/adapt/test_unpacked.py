"""Packed weights that are kept unpacked as well: the same bits with and without, whatever else a layer does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_world import SHAPE, adapted, empty, plain, results, token_ids

from trimtab.adapt import compile_regions, keep_unpacked, merge_adapters, quantized_ops, recompute
from trimtab.adapt.lora import set_masks
from trimtab.adapt.quantized import QuantizedLinear, quantized_layers
from trimtab.adapt.spec_quantized import unpacked_bytes
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
    found = (layer.unpacked for _, layer in quantized_layers(decoder))
    return [tensor for tensor in found if tensor is not None]


def nothing_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def dequantize(*_: Any) -> None:
        raise AssertionError("a weight was dequantized")

    monkeypatch.setattr(quantized_ops, "dequantize", dequantize)


@pytest.mark.parametrize("policy", ["none", "pointwise", "selective", "block", "offload"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PACKINGS)
def test_bits_are_the_same_with_and_without(
    name: str, dtype: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = adapted(dtype=dtype, **PACKINGS[name])
    recompute.apply(decoder, [policy] * 2)
    expected = results(decoder)
    assert same(results(keep_unpacked(decoder, 1)), expected)
    keep_unpacked(decoder, 2)
    nothing_dequantized(monkeypatch)
    assert same(results(decoder), expected)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.2}], ids=str)
def test_adapters_that_go_one_by_one(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = adapted(**settings)
    if masks := set_masks(decoder, torch.device("cpu")):
        masks.set(0, 1, 0, 12)
    expected = results(decoder)
    keep_unpacked(decoder, 2)
    nothing_dequantized(monkeypatch)
    assert same(results(decoder), expected)


def test_tiles() -> None:
    decoder = recompute.apply(adapted(), ["none"] * 2, mlp_tiles=2)
    expected = results(decoder)
    assert same(results(keep_unpacked(decoder, 2)), expected)


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, policy: str) -> None:
    torch._dynamo.reset()
    decoder = recompute.apply(adapted(), [policy] * 2)
    compile_regions(decoder, backend=backend)
    expected = results(decoder)
    assert same(results(keep_unpacked(decoder, 1)), expected)
    assert same(results(keep_unpacked(decoder, 2)), expected)


def test_under_autocast_the_copy_is_in_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(decoder)
        keep_unpacked(decoder, 2, dtype=torch.bfloat16)
        nothing_dequantized(monkeypatch)
        assert same(results(decoder), expected)


def test_products_in_another_format_read_the_packed_weight() -> None:
    decoder = adapted()
    expected = results(decoder)
    assert same(results(keep_unpacked(decoder, 2, dtype=torch.bfloat16)), expected)


def test_so_few_rows_that_nothing_is_dequantized_read_the_packed_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = next(layer for _, layer in quantized_layers(keep_unpacked(adapted(), 1)))
    monkeypatch.setattr(quantized_ops, "is_fused", lambda packing, rows: 0 < rows <= 2)
    assert layer.operand(torch.zeros(2, 1, layer.in_features))[1] == layer.text
    tensors, text = layer.operand(torch.zeros(3, 1, layer.in_features))
    assert text == layer.plain_text
    assert tensors[0] is layer.unpacked


def test_layers_without_adapters() -> None:
    decoder, ids = empty(), token_ids()
    for (_, layer), (_, linear) in zip(quantized_layers(decoder), linears(plain()), strict=True):
        layer.take(linear.weight)
    for name, parameter in plain().named_parameters():
        if not any(name == f"{layer}.weight" for layer, _ in quantized_layers(decoder)):
            decoder.get_parameter(name).data.copy_(parameter)
    expected = decoder(ids)
    assert torch.equal(keep_unpacked(decoder, 2)(ids), expected)


def linears(decoder: Decoder) -> list[tuple[str, torch.nn.Linear]]:
    found = [(n, m) for n, m in decoder.named_modules() if type(m) is torch.nn.Linear]
    return [(name, module) for name, module in found if name != "lm_head"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_are_those_declared(dtype: str) -> None:
    for layers in (0, 1, 2):
        decoder = keep_unpacked(adapted(dtype=dtype), layers)
        assert storage_bytes(kept(decoder)) == unpacked_bytes(SHAPE, layers, dtype)
    assert not kept(keep_unpacked(decoder, 0))


def test_nothing_of_it_is_saved_or_trained() -> None:
    decoder, other = adapted(), keep_unpacked(adapted(), 2)
    assert other.state_dict().keys() == decoder.state_dict().keys()
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in decoder.named_parameters()]
    assert not any(tensor.requires_grad for tensor in kept(other))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merge_is_the_same(dtype: str) -> None:
    decoder, other = adapted(), keep_unpacked(adapted(), 2)
    assert merge_adapters(other, dtype=dtype) == merge_adapters(decoder, dtype=dtype)
    mine, theirs = other.state_dict(), decoder.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_it_goes_where_the_layer_goes() -> None:
    layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.bfloat16)
    weight = torch.randn(8, 64)
    layer.take(weight)
    expected = layer.dequantized()
    layer.keep_unpacked(torch.bfloat16)
    layer.to(torch.float32)
    assert layer.unpacked is not None
    assert layer.unpacked.dtype == torch.bfloat16
    assert torch.equal(layer.unpacked, expected)
    layer.to("meta")
    assert layer.unpacked.is_meta
    layer.to_empty(device="cpu")
    layer.take(weight)
    assert torch.equal(layer.unpacked, expected)


def test_it_follows_what_is_packed() -> None:
    decoder = keep_unpacked(adapted(), 2)
    twin = copy.deepcopy(decoder)
    for _, layer in quantized_layers(twin):
        layer.take(torch.randn(layer.packing.shape))
        assert layer.unpacked is not None
        assert torch.equal(layer.unpacked, fresh(layer))
    assert not same(kept(twin), kept(decoder)), "a deep copy has its own"
    twin.load_state_dict(decoder.state_dict())
    assert same(kept(twin), kept(decoder))


def fresh(layer: QuantizedLinear) -> torch.Tensor:
    made: torch.Tensor = torch.ops.trimtab.packed_weight(*layer.packed, layer.text, layer.dtype)
    return made


def test_what_cannot_be() -> None:
    with pytest.raises(RecipeError, match="3 layers cannot be kept unpacked: the model has 2"):
        keep_unpacked(adapted(), 3)
    with pytest.raises(RecipeError, match="no weight of the model is packed"):
        keep_unpacked(plain(), 1)
    keep_unpacked(plain(), 0)
