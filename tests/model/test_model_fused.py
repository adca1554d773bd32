"""Models with fused q, k, v and gate, up matrices: parity, files, kernels' strides, saved activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_family import STACKED, copy_stacked, fused, load, phi3_model, register, stacked
from kernels.triton_tools import interpreted
from safetensors.torch import load_file, save_file

from trimtab.facts.blocks import AttentionShape, FeedForwardShape
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.generate.cache import KVCache
from trimtab.kernels.attention import Layout
from trimtab.model import build, check_weights, init_weights, load_weights, read_shape, save_folder
from trimtab.model.decoder import Decoder
from trimtab.model.weights_gguf import stored_rows
from trimtab.trainer.memory import LiveBytes

PLAIN = uniform_shape("llama", 96, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
BIASED = uniform_shape(
    "llama", 96, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    qkv_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
IDS_BT = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def phi3(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def pair(shape: ModelShape = PLAIN, **options: Any) -> tuple[Decoder, Decoder]:
    """(separate, fused) with the same values."""
    options = {"dtype": "fp32", "device": "cpu", "attention": "reference", **options}
    plain = init_weights(build(shape, **options), seed=0)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith((".bias", "norm.weight")):
                parameter.uniform_(0.5, 1.0, generator=torch.Generator().manual_seed(len(name)))
            else:
                parameter.mul_(8)
    return plain, copy_stacked(plain, build(fused(shape), **options))


def trained(decoder: Decoder, layout: Layout | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = decoder.loss(IDS_BT, IDS_BT.roll(-1, 1), None, layout)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return loss.detach(), grads  # type: ignore[return-value]


def assert_alike(plain: Decoder, other: Decoder, layout: Layout | None = None) -> None:
    (loss, want), (found, got) = trained(plain, layout), trained(other, layout)
    assert torch.allclose(found, loss, rtol=1e-6)
    for name, grad in got.items():
        expected = stacked(want, name)
        assert (grad - expected).abs().max() <= 2e-5 * expected.abs().max(), name


def test_the_shape_lists_the_fused_matrices() -> None:
    attention, feed_forward = (
        AttentionShape(4, 2, 8, fused_qkv=True),
        FeedForwardShape(32, fused_gate_up=True),
    )
    qkv, o = attention.linears(16)
    assert (qkv.name, qkv.out_features, qkv.parts) == ("self_attn.qkv_proj", 64, attention.qkv_sizes)
    assert attention.qkv_sizes == (32, 16, 16)
    assert (o.short_name, o.parts) == ("o_proj", ())
    gate_up, down = feed_forward.linears(16)
    assert (gate_up.name, gate_up.out_features, gate_up.parts) == ("mlp.gate_up_proj", 64, (32, 32))
    assert down.in_features == 32
    shape = fused(PLAIN)
    assert shape.num_parameters == PLAIN.num_parameters
    assert dict(shape.parameters())["model.layers.1.self_attn.qkv_proj.weight"] == (128, 64)


@pytest.mark.oracle
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("attention", ["reference", "sdpa_flash"])
def test_logits_and_gradients_match_transformers(window: int | None, attention: str, tmp_path: Path) -> None:
    oracle = phi3_model(sliding_window=window)
    oracle.save_pretrained(tmp_path)
    decoder = load(tmp_path, attention=attention)
    assert decoder.shape.window(0) == window
    assert (decoder.logits(decoder(IDS_BT)) - oracle(input_ids=IDS_BT).logits).abs().max() <= 1e-5
    labels_BT = torch.cat([IDS_BT[:, 1:], torch.full_like(IDS_BT[:, :1], -100)], dim=1)
    oracle(input_ids=IDS_BT, labels=IDS_BT).loss.backward()
    (decoder.loss(IDS_BT, labels_BT) / int((labels_BT != -100).sum())).backward()
    theirs = dict(oracle.named_parameters())
    ours = dict(decoder.named_parameters())
    assert set(ours) == set(theirs)
    for name, parameter in ours.items():
        grad, other = parameter.grad, theirs[name].grad
        assert grad is not None
        assert other.abs().max() > 1e-7, f"{name} is not exercised"
        assert (grad - other).abs().max() <= 1e-5, name


@pytest.mark.oracle
def test_saved_folder_gives_transformers_identical_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = phi3_model()
    oracle.save_pretrained(tmp_path / "theirs")
    decoder = load(tmp_path / "theirs")
    save_folder(decoder, tmp_path / "ours", dtype="fp32", max_shard_bytes=100_000)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=IDS_BT).logits, oracle(input_ids=IDS_BT).logits)
    assert read_shape(tmp_path / "ours") == decoder.shape
    again = load(tmp_path / "ours")
    pairs = zip(decoder.named_parameters(), again.named_parameters(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize(
    ("module", "rows", "wanted", "origin"),
    [
        ("self_attn.qkv_proj", 112, 128, "(query heads + 2 · key/value heads) × head_dim is 128"),
        ("mlp.gate_up_proj", 128, 256, "2 · intermediate_size is 256"),
    ],
)
def test_a_fused_tensor_of_another_width_raises(
    module: str, rows: int, wanted: int, origin: str, tmp_path: Path
) -> None:
    decoder = pair()[1]
    save_folder(decoder, tmp_path / "model", dtype="fp32")
    file = tmp_path / "model/model.safetensors"
    tensors, name = load_file(file), f"model.layers.1.{module}.weight"
    tensors[name] = tensors[name][:rows].clone()
    save_file(tensors, file, {"format": "pt"})
    for attempt in (
        lambda: check_weights(decoder.shape, tmp_path / "model"),
        lambda: load_weights(decoder, tmp_path / "model"),
    ):
        with pytest.raises(ModelError) as caught:
            attempt()
        assert f"{name} has shape [{rows}, 64], but the model has [{wanted}, 64]" in caught.value.cause
        assert origin in caught.value.cause


def test_separate_tensors_raise_where_the_model_fuses_them(tmp_path: Path) -> None:
    plain, decoder = pair()
    save_folder(plain, tmp_path / "model", dtype="fp32")
    with pytest.raises(
        ModelError, match=r"is missing 4 of 15 tensors: model\.layers\.0\.self_attn\.qkv_proj\.weight"
    ):
        load_weights(decoder, tmp_path / "model")


@pytest.mark.parametrize("shape", [PLAIN, BIASED], ids=["plain", "biases and norms"])
@pytest.mark.parametrize("attention", ["reference", "sdpa_math", "sdpa_flash"])
def test_the_values_of_separate_matrices(shape: ModelShape, attention: str) -> None:
    packed = Layout.packed((torch.arange(24).expand(2, 24) >= 10).int())
    assert_alike(*pair(shape, attention=attention))
    assert_alike(*pair(shape, attention=attention), packed)


@pytest.mark.parametrize("shape", [PLAIN, BIASED], ids=["plain", "biases and norms"])
def test_triton_kernels_accept_views(shape: ModelShape) -> None:
    """q, k, gate and up are views with row strides; so is v where there is a QK-norm."""
    pytest.importorskip("triton")
    from trimtab.kernels import partial_sums
    from trimtab.kernels.attention import kernels_backward, kernels_forward, launch_triton
    from trimtab.kernels.gated_mlp import impl_triton as gated
    from trimtab.kernels.rms_norm import impl_triton as norm
    from trimtab.kernels.rope import impl_triton as rope

    with interpreted(kernels_forward, kernels_backward, launch_triton, gated, norm, rope, partial_sums):
        assert_alike(*pair(shape, attention="triton", pointwise="triton"))


@pytest.mark.parametrize("shape", [PLAIN, BIASED], ids=["plain", "biases and norms"])
def test_a_cache_gives_the_same_hidden_states(shape: ModelShape) -> None:
    plain, decoder = pair(shape)
    cache, parts = KVCache(num_layers=2, block=4), []
    with torch.no_grad():
        for start, end in ((0, 10), (10, 11), (11, 24)):
            parts.append(decoder(IDS_BT[:, start:end], cache=cache))
        assert (torch.cat(parts, dim=1) - plain(IDS_BT)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("shape", "dtype"), [(PLAIN, "bf16"), (PLAIN, "fp32"), (BIASED, "fp32")], ids=["bf16", "fp32", "normed"]
)
def test_nothing_more_is_saved_for_the_backward_pass(shape: ModelShape, dtype: str) -> None:
    """A view of v would keep q and k before RoPE alive as well; norms save those in any case."""
    kept = []
    for decoder in pair(shape, attention="sdpa_flash", dtype=dtype):
        with LiveBytes() as live:
            hidden_BTC = decoder(IDS_BT)
            kept.append(live.now - hidden_BTC.untyped_storage().nbytes())
        del hidden_BTC
    assert kept[1] <= kept[0]


def test_hooks_get_the_fused_output() -> None:
    decoder, seen = pair()[1], []
    block = decoder.model.layers[0]
    for layer in (block.self_attn.qkv_proj, *block.mlp.gate_up_layers):
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    decoder(IDS_BT)
    assert seen == [128, 256]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_gguf_rows_of_q_and_k_are_unpaired_within_the_stack(kind: str) -> None:
    shape, generator = fused(PLAIN), np.random.default_rng(0)
    dims = (64,) if kind == "weight" else ()
    parts = [generator.normal(size=(size, *dims)) for size in shape.attention.qkv_sizes]
    names = [f"model.layers.0.self_attn.{part}.{kind}" for part in STACKED["qkv_proj"]]
    apart = [array[stored_rows(name, PLAIN, 0, len(array))] for array, name in zip(parts, names, strict=True)]
    whole = np.concatenate(parts)
    found = whole[stored_rows(f"model.layers.0.self_attn.qkv_proj.{kind}", shape, 0, len(whole))]
    assert np.array_equal(found, np.concatenate(apart))
    assert not np.array_equal(found, np.concatenate(parts))
