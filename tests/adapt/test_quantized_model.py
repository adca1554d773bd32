"""A quantized decoder: created on meta, loaded from files one weight at a time, compared with transformers."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_world import SHAPE, empty, folder, plain, token_ids
from safetensors.torch import load_file, save_file
from test_model_gguf import write_gguf

from trimtab.adapt import spec_quantized
from trimtab.adapt.quantized import QuantizedLinear, quantized_layers
from trimtab.adapt.quantized_layout import describe, quantize_layout
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import uniform_shape
from trimtab.model import build, init_weights, load_weights
from trimtab.model.decoder import Decoder
from trimtab.trainer.memory import LiveBytes, storage_bytes

DEEP = dataclasses.replace(SHAPE, blocks=SHAPE.blocks[:1] * 40)


def all_tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}


def assert_same(a: Decoder, b: Decoder) -> None:
    mine, theirs = all_tensors(a), all_tensors(b)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_loading_a_folder_equals_quantizing_afterwards(kind: str, shard_bytes: int, tmp_path: Path) -> None:
    source = folder(tmp_path / "m", shard_bytes=shard_bytes)
    decoder = empty(kind=kind)
    seen: list[tuple[int, int]] = []
    load_weights(decoder, source, progress=lambda done, total, name: seen.append((done, total)))
    total = len(list(SHAPE.parameters()))
    assert seen[-1] == (total, total)
    assert_same(decoder, quantize_layout(plain(), kind))
    assert sum(1 for _ in quantized_layers(decoder)) == 14
    assert type(decoder.lm_head) is torch.nn.Linear


def test_loading_gguf_equals_quantizing_afterwards(tmp_path: Path) -> None:
    write_gguf(plain(), tmp_path / "m.gguf")
    decoder = empty()
    load_weights(decoder, tmp_path / "m.gguf")
    assert_same(decoder, quantize_layout(plain(), "nf4"))


def test_random_weights_equal_those_of_the_plain_model() -> None:
    assert_same(init_weights(empty(), 0), quantize_layout(plain(), "nf4"))


def test_other_parameters_keep_their_names_and_order() -> None:
    wanted = [name for name, _ in SHAPE.parameters() if name not in spec_quantized.linear_shapes(SHAPE)]
    found = [name for name, _ in empty().named_parameters()]
    packed = [name for name in found if name.endswith((".codes", ".scales"))]
    assert [name for name in found if name not in packed] == wanted
    linears = [name.removesuffix("weight") for name in spec_quantized.linear_shapes(SHAPE)]
    assert packed == [f"{name}{part}" for name in linears for part in ("codes", "scales")]


@pytest.mark.oracle
@pytest.mark.parametrize("double", [False, True])
def test_logits_match_transformers(double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    source = folder(tmp_path / "m")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.float32
    )
    decoder = empty(double=double)
    load_weights(decoder, source)
    ids = token_ids()
    theirs.train()
    theirs.enable_input_require_grads()  # without gradients its CPU code computes in lower precision
    with torch._dynamo.config.patch(disable=True):
        expected = theirs(ids).logits
    logits = decoder.logits(decoder(ids))
    unquantized = plain().logits(plain()(ids))
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, unquantized, rtol=1e-3, atol=1e-3), "the comparison can fail"


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "bf16"), ("nf4", "fp32"), ("int8", "bf16")])
def test_the_16_bit_model_is_never_materialized(kind: str, dtype: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "m", DEEP, dtype)
    decoder = build(DEEP, dtype=dtype, device="meta", attention="reference")
    quantize_layout(decoder, kind, device="cpu")
    with LiveBytes() as live:
        decoder.to_empty(device="cpu")
        allocated = live.now
        load_weights(decoder, source)
    size = storage_bytes(all_tensors(decoder).values())
    assert size == spec_quantized.weight_bytes(DEEP, kind, dtype) == allocated == live.now
    assert live.peak <= 1.3 * size
    unquantized = storage_bytes(plain(DEEP, dtype).parameters())
    assert 1.3 * size < unquantized, "the bound is meaningful"
    assert live.peak <= spec_quantized.loading_peak_bytes(DEEP, kind, dtype, impl="reference")


def assert_same_weight(on_gpu: QuantizedLinear, on_cpu: QuantizedLinear, name: str) -> None:
    """The same bytes; the mean of 8-bit scales is summed in the device's own order, and may be an ulp off."""
    if on_cpu.packed_layout.nested_block == 0:
        for a, b in zip(on_gpu.packed, on_cpu.packed, strict=True):
            assert a is b is None or torch.equal(a.cpu(), b), name  # type: ignore[union-attr,arg-type]
        return
    codes, scales, _, nested, _, offset = (None if t is None else t.cpu() for t in on_gpu.packed)
    assert torch.equal(codes, on_cpu.packed[0]), name  # type: ignore[arg-type]
    apart = (scales.int() - on_cpu.packed[1].int()).abs()  # type: ignore[union-attr]
    assert apart.max() <= 1, name
    assert apart.float().mean() < 1e-3, name
    assert torch.allclose(nested, on_cpu.packed[3], rtol=1e-4), name  # type: ignore[arg-type]
    assert torch.allclose(offset, on_cpu.packed[5], rtol=1e-6), name  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_peak_while_loading_on_a_gpu(kind: str, tmp_path: Path) -> None:
    shape = uniform_shape("llama", 32_000, 2048, 5632, 12, num_heads=16, num_kv_heads=8, head_dim=128)
    source = folder(tmp_path / "m", shape, "bf16")
    decoder = build(shape, dtype="bf16", device="meta", attention="sdpa_flash")
    quantize_layout(decoder, kind, device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    def asked_for(which: str) -> int:
        """Requested bytes; the allocator rounds each tensor up by up to 1 MiB."""
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])

    before = asked_for("current")
    decoder.to_empty(device="cuda")
    load_weights(decoder, source)
    torch.cuda.synchronize()
    peak, now = asked_for("peak") - before, asked_for("current") - before
    declared = spec_quantized.weight_bytes(shape, kind, "bf16")
    print(f"\n{kind}: {now:,} allocated, {peak:,} peak ({peak / now:.3f}), {declared:,} declared")
    assert now == pytest.approx(declared, rel=0.01)
    assert peak <= 1.3 * now
    other = build(shape, dtype="bf16", device="meta", attention="sdpa_flash")
    quantize_layout(other, kind, device="cpu").to_empty(device="cpu")
    load_weights(other, source)
    for (name, mine), (_, theirs) in zip(quantized_layers(decoder), quantized_layers(other), strict=True):
        assert_same_weight(mine, theirs, name)


def test_a_non_finite_value_is_named_with_its_file(tmp_path: Path) -> None:
    source = folder(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight: .*infinity"):
        load_weights(empty(), source)


def test_a_model_on_meta_is_not_loaded(tmp_path: Path) -> None:
    decoder = build(SHAPE, dtype="fp32", device="meta", attention="reference")
    with pytest.raises(AssertionError, match="device="):
        quantize_layout(decoder, "nf4")
    quantize_layout(decoder, "nf4", device="cpu")
    with pytest.raises(AssertionError, match="parameters first"):
        load_weights(decoder, folder(tmp_path / "m"))


def test_layers_can_be_skipped() -> None:
    decoder = empty(skip=("down_proj", "model.layers.0.self_attn.q_proj"))
    names = [name for name, _ in quantized_layers(decoder)]
    assert len(names) == 14 - 2 - 1
    assert "model.layers.1.self_attn.q_proj" in names
    with pytest.raises(RecipeError, match=r"skip names 'down'.*down_proj"):
        empty(skip=("down",))


def test_the_implementation_is_chosen_once_and_described() -> None:
    assert describe(empty()) == "14 linear layers in nf4 (blocks of 64, scales in 8 bits), read by reference"
    assert describe(empty(kind="int8")) == "14 linear layers in int8, read by reference"
    assert describe(plain()) == "no quantized layers"
    on_gpu = quantize_layout(
        build(SHAPE, dtype="bf16", device="meta", attention="reference"), "nf4", device="cuda"
    )
    assert {layer.impl for _, layer in quantized_layers(on_gpu)} == {"triton"}
    with pytest.raises(RecipeError, match="require a CUDA device"):
        empty(impl="triton")
    with pytest.raises(RecipeError, match="no implementation 'fast'"):
        empty(impl="fast")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_loss_and_gradients_reach_the_embeddings_through_frozen_layers(kind: str) -> None:
    decoder = init_weights(empty(kind=kind), 0)
    twin = plain()
    for name, layer in quantized_layers(decoder):
        twin.get_submodule(name).weight.data.copy_(layer.dequantized())  # type: ignore[union-attr,operator]
    ids = token_ids()
    losses: list[Any] = []
    for model in (decoder, twin):
        losses.append(model.loss(ids, ids.roll(-1, 1), reduction="mean"))
        losses[-1].backward()
    assert torch.allclose(losses[0], losses[1], rtol=1e-6)
    mine, theirs = decoder.model.embed_tokens.weight.grad, twin.model.embed_tokens.weight.grad
    assert mine is not None
    assert theirs is not None
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)
    frozen = [layer.bias for _, layer in quantized_layers(decoder) if layer.bias is not None]
    assert frozen
    assert all(bias.grad is None for bias in frozen)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_on_a_gpu_as_on_a_cpu(kind: str, rows: int) -> None:
    weight = torch.randn(256, 512, dtype=torch.bfloat16) * 0.02
    made = {"bias": False, "kind": kind, "dtype": torch.bfloat16}
    for double in (True, False):
        layers = []
        for device, impl in (("cpu", "reference"), ("cuda", "reference"), ("cuda", "triton")):
            layers.append(QuantizedLinear(512, 256, double=double, impl=impl, device=device, **made))
            layers[-1].set_weight(weight)
        assert_same_weight(layers[1], layers[0], "reference")
        assert_same_weight(layers[2], layers[0], "triton")
        for a, b in zip(layers[1].packed, layers[2].packed, strict=True):
            assert a is b is None or torch.equal(a, b), "the same on one device"
    x = torch.randn(rows, 512, dtype=torch.bfloat16)
    weight_NK = layers[0].dequantized()
    for layer in layers[1:]:
        assert torch.equal(layer.dequantized().cpu(), weight_NK)
        on_gpu = x.cuda().requires_grad_(True)
        y = layer(on_gpu)
        y.sum().backward()
        exact = x.double() @ weight_NK.double().T
        assert (y.cpu().double() - exact).abs().max() <= 2**-7 * exact.abs().max()
        expected = torch.ones(rows, 256).double() @ weight_NK.double()
        assert (on_gpu.grad.cpu().double() - expected).abs().max() <= 2**-7 * expected.abs().max()
