"""Adapters on quantized layers in a whole decoder: fused and separate, compiled, recomputed, merged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_world import SHAPE, adapted, empty, results, token_ids

from trimtab.adapt import (
    LoRALinear,
    LoraSettings,
    add_adapters,
    create_dropout_masks,
    init_adapters,
    merge_adapters,
    quantize_layout,
    quantized_ops,
    recompute,
)
from trimtab.adapt.packed_layout import PackedLayout
from trimtab.adapt.quantized import quantized_layers
from trimtab.adapt.quantized_layout import describe
from trimtab.facts.errors import RecipeError
from trimtab.model import Decoder, build, init_weights


def assert_close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-9


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_fused_layers_equal_separate_layers(kind: str) -> None:
    decoder = adapted(kind)
    fused = results(decoder)
    calls: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in decoder.named_modules()
        if name.endswith("_proj")
    ]
    watched = results(decoder)
    assert len(calls) == 14, "hooks on a layer run"
    for handle in handles:
        handle.remove()
    assert_close(fused, watched)
    assert_close(results(decoder), fused)


def dequantized_twin(decoder: Decoder) -> Decoder:
    """The same model and adapters on plain layers with the dequantized weights."""
    twin = copy.deepcopy(decoder)
    for name, layer in quantized_layers(decoder):
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
        if layer.bias is not None:
            plain.bias = torch.nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        there = twin.get_submodule(name)
        object.__setattr__(there, "base", plain)
        there._parameters, there._buffers = plain._parameters, plain._buffers
    assert describe(twin) == "no quantized layers"
    return twin


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_match_the_dequantized_model(kind: str) -> None:
    decoder = adapted(kind)
    assert_close(results(decoder), results(dequantized_twin(decoder)))


@pytest.mark.parametrize("policy", ["pointwise", "selective", "block"])
@pytest.mark.parametrize("tiles", [1, 2])
def test_the_last_product_of_a_block_is_not_recomputed(
    policy: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = adapted()
    expected = results(decoder)
    recompute.apply(decoder, [policy, policy], mlp_tiles=tiles)
    shapes: list[tuple[int, int]] = []
    dequantize = quantized_ops.dequantize

    def counted(layout: PackedLayout, *rest: Any) -> torch.Tensor:
        shapes.append(layout.shape)
        return dequantize(layout, *rest)

    monkeypatch.setattr(quantized_ops, "dequantize", counted)
    assert_close(results(decoder), expected)
    down = shapes.count((SHAPE.hidden_size, SHAPE.intermediate_size))
    assert down == 2 * 2 * tiles, "once in the forward and once in the backward of each layer"


def test_blocks_compile_to_full_graphs() -> None:
    decoder = adapted()
    expected = results(decoder)
    torch._dynamo.reset()
    for block in decoder.model.layers:
        block.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(results(decoder), expected)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_other_adapters_run_separately(settings: dict[str, Any]) -> None:
    decoder = adapted(**settings)
    twin = dequantized_twin(decoder)
    for model in (decoder, twin):
        if (masks := create_dropout_masks(model, torch.device("cpu"))) is not None:
            masks.set(seed=0, step=1, first_sequence=0, tokens=12)
        assert not any(layer.can_fuse for layer in model.modules() if isinstance(layer, LoRALinear))
    assert_close(results(decoder), results(twin))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_doras_norms_are_of_the_weight_used_in_products(kind: str) -> None:
    """Weights rounded to bf16 before quantization, products in fp32, as in merging."""
    decoder = build(SHAPE, dtype="fp32", device="cpu", attention="reference")
    init_weights(decoder, seed=0)
    weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    quantize_layout(decoder, kind, dtype=torch.bfloat16)
    add_adapters(decoder, LoraSettings(r=4, use_dora=True))
    for name, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            module.set_weight(weights[f"{name}.weight"])
    init_adapters(decoder, seed=1)
    for name, parameter in decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(2))
    ids_BT = token_ids()
    with torch.no_grad():
        want = decoder.logits(decoder(ids_BT))
        merge_adapters(decoder, dtype="fp32")
        assert (decoder.logits(decoder(ids_BT)) - want).abs().max() <= 1e-4 * want.square().mean().sqrt()


def test_no_name_changes() -> None:
    named = [name for name, _ in empty().named_parameters()]
    kept = [name for name, _ in adapted().named_parameters() if "lora_" not in name]
    assert sorted(kept) == sorted(named)


def test_quantized_modules_cannot_be_fully_trained() -> None:
    with pytest.raises(RecipeError, match=r"q_proj, which is quantized"):
        add_adapters(empty(), LoraSettings(r=4, target_modules=("v_proj",), modules_to_save=("q_proj",)))


def test_a_deep_copy_is_a_second_model() -> None:
    decoder = adapted()
    twin = copy.deepcopy(decoder)
    layer = dict(quantized_layers(twin))["model.layers.0.mlp.up_proj"]
    layer.set_weight(torch.zeros(layer.packed_layout.shape))
    ids = token_ids(SHAPE)
    assert not torch.equal(twin(ids), decoder(ids))
    assert torch.equal(adapted()(ids), decoder(ids))
