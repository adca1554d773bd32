"""Adapters and quantized weights on fused projections (Phi-3's): peft, bitsandbytes, recompute policies, compile."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_family import TINY, copy_stacked, fused, load, phi3_model, register
from lora_cases import distance, scatter

from trimtab.adapt import (
    LoraSettings,
    add_adapters,
    init_adapters,
    load_adapter,
    quantize_layout,
    recompute,
    save_adapter,
    set_dequantized_copies,
    trained_parameters,
)
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.merging import merge_adapters
from trimtab.adapt.peft_files import adapter_tensors
from trimtab.adapt.quantized import packed_state, quantized_layers
from trimtab.adapt.recompute import compile_block
from trimtab.adapt.spec_quantized import check_not_quantized
from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights, load_weights, read_shape, save_folder
from trimtab.model.decoder import Decoder

PLAIN = uniform_shape(
    "llama", 96, 64, 128, num_layers=len(POLICIES), num_heads=4, num_kv_heads=2, head_dim=16
)
BIASED = dataclasses.replace(
    PLAIN,
    blocks=tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, qkv_bias=True))
        for block in PLAIN.blocks
    ),
)
IDS_BT = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
NAMES = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "some": {"target_modules": ("qkv_proj", "down_proj"), "rank_pattern": {"down_proj": 3}},
}


@pytest.fixture(autouse=True)
def phi3(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def base(attention: str = "reference", shape: ModelShape = PLAIN) -> Decoder:
    return init_weights(build(fused(shape), dtype="fp32", device="cpu", attention=attention), seed=0)


def adapted(decoder: Decoder, **settings: Any) -> Decoder:
    add_adapters(decoder, LoraSettings(**{"r": 4, "lora_alpha": 8, **settings}))
    init_adapters(decoder, seed=3)
    return scatter(decoder)


def logits(decoder: Decoder) -> torch.Tensor:
    exact = copy.deepcopy(decoder).double()
    with torch.no_grad():
        return exact.logits(exact(IDS_BT))


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.double()(IDS_BT).logits


def results(decoder: Decoder) -> list[torch.Tensor]:
    """The loss and every gradient."""
    create_dropout_masks(decoder, torch.device("cpu"))
    loss = decoder.loss(IDS_BT, IDS_BT.roll(-1, 1), reduction="mean")
    loss.backward()
    found = trained_parameters(decoder)
    assert found
    return [loss.detach(), *(parameter.grad for parameter in found.values())]  # type: ignore[misc]


def test_one_adapter_per_fused_matrix() -> None:
    decoder = adapted(base(), r=4)
    sizes = {
        name: tuple(tensor.shape) for name, tensor in adapter_tensors(decoder).items() if "layers.0" in name
    }
    prefix = "model.layers.0.self_attn.qkv_proj"
    assert sizes[f"{prefix}.lora_A.default.weight"] == (4, 64)
    assert sizes[f"{prefix}.lora_B.default.weight"] == (128, 4)
    assert len(sizes) == 2 * len(NAMES)
    layer = decoder.model.layers[0].self_attn.qkv_proj
    assert layer.can_fuse
    assert [tuple(tensor.shape) for tensor in layer.factors("default")] == [(4, 64), (128, 4)]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_trimtab_load_each_others_adapters(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    phi3_model().save_pretrained(tmp_path / "base")
    ours = adapted(load(tmp_path / "base"), **KINDS[kind])
    (tmp_path / "ours").mkdir()
    save_adapter(ours, tmp_path / "ours", base_name=str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(phi3_model(), tmp_path / "ours").eval()
    assert distance(logits(ours), their_logits(theirs)) < 3e-5
    assert distance(logits(ours), logits(load(tmp_path / "base"))) > 1e-2

    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **KINDS[kind]}
    if isinstance(config["target_modules"], tuple):
        config["target_modules"] = list(config["target_modules"])
    made = get_peft_model(phi3_model(), LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.save_pretrained(tmp_path / "theirs")
    again = load(tmp_path / "base")
    load_adapter(again, tmp_path / "theirs")
    expected = their_logits(made)
    assert distance(logits(again), expected) < 3e-5
    with torch.no_grad():
        for parameter in adapter_tensors(again).values():
            parameter.mul_(1.005)
    assert distance(logits(again), expected) > 1e-4, "the comparison could not fail"


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_of_adapters_match_peft(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    phi3_model().save_pretrained(tmp_path / "base")
    ours = adapted(load(tmp_path / "base"), **KINDS[kind])
    (tmp_path / "adapter").mkdir()
    save_adapter(ours, tmp_path / "adapter", base_name="")
    theirs = PeftModel.from_pretrained(phi3_model(), tmp_path / "adapter", is_trainable=True).eval()
    labels_BT = torch.cat([IDS_BT[:, 1:], torch.full_like(IDS_BT[:, :1], -100)], dim=1)
    theirs(input_ids=IDS_BT, labels=IDS_BT).loss.backward()
    (ours.loss(IDS_BT, labels_BT) / int((labels_BT != -100).sum())).backward()
    expected = {name.removeprefix("base_model.model."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in trained_parameters(ours).items():
        assert parameter.grad is not None
        assert (parameter.grad - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_adapted_logits(kind: str, tmp_path: Path) -> None:
    decoder = adapted(base(), **KINDS[kind])
    want = logits(decoder)
    merge_adapters(decoder, dtype="fp32")
    assert distance(logits(decoder), want) < 1e-5
    save_folder(decoder, tmp_path / "merged", dtype="fp32")
    assert distance(logits(load(tmp_path / "merged")), want) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_dropout": 0.5}, {"use_dora": True}, {"lora_dropout": 0.5, "use_dora": True}],
    ids=["lora", "dropout", "dora", "both"],
)
@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_recompute_policies_and_tiles(settings: dict[str, Any], kind: str | None, tiles: int) -> None:
    """Every policy is bitwise identical; tiles accumulate weights' gradients in another order."""

    def made() -> Decoder:
        decoder = base("sdpa_flash", BIASED)
        return decoder if kind is None else quantize_layout(decoder, kind)

    found = []
    for policies in (("none",) * len(POLICIES), POLICIES):
        decoder = adapted(made(), **settings).train()
        found.append(results(recompute.apply(decoder, policies, mlp_tiles=tiles)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if tiles > 1:
        for a, b in zip(found[0], results(adapted(made(), **settings).train()), strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("policy", ["none", "pointwise", "selective", "block"])
@pytest.mark.parametrize("settings", [None, {}, {"lora_dropout": 0.3}], ids=["full", "lora", "dropout"])
def test_blocks_compile_without_a_graph_break(policy: str, settings: dict[str, Any] | None) -> None:
    found = []
    for way in (False, True):
        decoder = base("sdpa_flash")
        if settings is not None:
            adapted(decoder, **settings)
        recompute.apply(decoder.train(), [policy] * len(POLICIES))
        if way:
            torch._dynamo.reset()
            compiler = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
            decoder.regions = [compile_block(block, compiler) for block in decoder.model.layers]
        found.append(results(decoder))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_pointwise_saves_the_fused_products() -> None:
    """Both products of a block are labelled; recomputation runs neither."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wide(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.name().startswith(("aten::mm", "aten::addmm")) and out.shape == (48, 256):
                self.count += 1
            return out

    counts = {}
    for policy in ("none", "pointwise", "selective"):
        decoder = recompute.apply(base("sdpa_flash"), [policy] * len(POLICIES))
        with Wide() as mode:
            decoder.loss(IDS_BT, IDS_BT).backward()
        counts[policy] = mode.count
    assert counts == {"none": len(POLICIES), "pointwise": len(POLICIES), "selective": 2 * len(POLICIES)}


@pytest.mark.oracle
@pytest.mark.parametrize("double", [False, True])
def test_one_nf4_tensor_with_the_bytes_of_bitsandbytes(double: bool, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = phi3_model()
    model.save_pretrained(tmp_path)
    decoder = build(read_shape(tmp_path), dtype="fp32", device="meta", attention="reference")
    quantize_layout(decoder, "nf4", double=double, device="cpu").to_empty(device="cpu")
    load_weights(decoder, tmp_path)
    layers = dict(quantized_layers(decoder))
    assert sorted({name.rpartition(".")[2] for name in layers}) == sorted(NAMES)
    assert len(layers) == TINY["num_hidden_layers"] * len(NAMES)
    for name, layer in layers.items():
        weight = model.get_submodule(name).weight.detach()
        theirs = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4")
        theirs.weight = bnb.nn.Params4bit(
            weight.clone(), requires_grad=False, compress_statistics=double, quant_type="nf4"
        )
        state, ours = theirs.to("cpu").state_dict(), packed_state(layer)
        assert list(ours) == list(state)
        if double:
            # For a scale nearly halfway between two 8-bit codes bitsandbytes' CPU code may choose the farther one.
            other = ours.pop("weight.absmax").int() - state.pop("weight.absmax").int()
            assert other.abs().max() <= 1
            assert (other != 0).float().mean() < 0.02
        assert all(torch.equal(ours[key], state[key]) for key in state), name


def test_quantized_values_match_the_dequantized_weights() -> None:
    for kind in ("nf4", "int8"):
        decoder = quantize_layout(base(), kind)
        plain = base()
        with torch.no_grad():
            for name, layer in quantized_layers(decoder):
                plain.get_submodule(name).weight.copy_(layer.dequantized())
        assert torch.allclose(decoder(IDS_BT), plain(IDS_BT), atol=1e-6)
        before = decoder(IDS_BT)
        assert torch.equal(set_dequantized_copies(decoder, 2)(IDS_BT), before)


def test_a_fused_adapter_equals_several_that_share_a() -> None:
    """A group of separate layers with the same A, and B split by rows, computes the same."""
    plain = init_weights(build(PLAIN, dtype="fp32", device="cpu", attention="reference"), seed=0)
    decoder = adapted(copy_stacked(plain, base()))
    add_adapters(plain, LoraSettings(r=4, lora_alpha=8))
    with torch.no_grad():
        for block, own in zip(decoder.model.layers, plain.model.layers, strict=True):
            q, k, v = own.self_attn.q_proj, own.self_attn.k_proj, own.self_attn.v_proj
            for layer, parts in (
                (block.self_attn.qkv_proj, (q, k, v)),
                (block.self_attn.o_proj, (own.self_attn.o_proj,)),
                (block.mlp.gate_up_proj, (own.mlp.gate_proj, own.mlp.up_proj)),
                (block.mlp.down_proj, (own.mlp.down_proj,)),
            ):
                a_RI, b_OR = layer.factors("default")
                for part, rows in zip(parts, b_OR.split([part.out_features for part in parts]), strict=True):
                    part.factors("default")[0].copy_(a_RI)
                    part.factors("default")[1].copy_(rows)
    assert distance(logits(plain), logits(decoder)) < 1e-6


def test_a_fused_quantized_matrix_cannot_be_fully_trained() -> None:
    shape = dataclasses.replace(fused(PLAIN), blocks=fused(PLAIN).blocks[:1])
    for _, linear in shape.linears():
        with pytest.raises(RecipeError, match=linear.name):
            check_not_quantized(shape, [f"model.layers.0.{linear.name}.weight"])
