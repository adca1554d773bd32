"""Compiled regions on a CUDA device: few graphs over many lengths, the eager decoder's loss, including fp16."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import _dynamo as dynamo

from trimtab.adapt import (
    LoRALinear,
    LoraSettings,
    Regions,
    add_adapters,
    compilations,
    compile_regions,
    init_adapters,
    quantize_layout,
)
from trimtab.adapt import recompute as recompute_policies
from trimtab.facts.shapes import uniform_shape
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder, build, init_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = uniform_shape(
    "qwen3", 512, 256, 512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)
LENGTHS = (384, 256, 512, 300, 257, 1000, 640, 131, 512, 777, 900, 384)
PACKED = ("varlen", "flex", "triton", "sdpa_efficient")
WHOLE = ("sdpa_flash", "sdpa_cudnn")


def recomputed(decoder: Decoder, on: bool = True) -> Decoder:
    return recompute_policies.apply(decoder, ["block" if on else "none"] * len(decoder.model.layers))


@pytest.fixture(autouse=True)
def clean() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


def made(attention: str, pointwise: str = "reference", dtype: str = "bf16") -> Decoder:
    decoder = build(SHAPE, dtype=dtype, device="cuda", attention=attention, pointwise=pointwise)
    return init_weights(decoder, seed=0)


def batch(length: int, packed: bool) -> tuple[torch.Tensor, Layout]:
    generator = torch.Generator().manual_seed(length)
    ids_BT = torch.randint(0, 512, (2, length), generator=generator)
    documents_BT = torch.randint(0, 9, (2, length), generator=generator).sort(1).values
    return ids_BT.cuda(), Layout.packed(documents_BT) if packed else Layout.causal()


def trained(decoder: Decoder, ids_BT: torch.Tensor, layout: Layout) -> tuple[float, torch.Tensor]:
    """The loss and the first layer's gradient."""
    decoder.zero_grad()
    loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
    loss.backward()
    gradient = decoder.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient is not None
    return float(loss.detach()), gradient.float()


@pytest.mark.parametrize("pointwise", ["reference", "triton"])
@pytest.mark.parametrize("attention", [*PACKED, *WHOLE])
def test_few_graphs_over_many_lengths(attention: str, pointwise: str) -> None:
    compiled, plain = made(attention, pointwise), made(attention, pointwise)
    compile_regions(compiled)
    for length in LENGTHS:
        ids_BT, layout = batch(length, attention in PACKED)
        loss, gradient = trained(compiled, ids_BT, layout)
        want, want_gradient = trained(plain, ids_BT, layout)
        assert abs(loss - want) < 5e-3, (length, loss, want)
        off = (gradient - want_gradient).norm() / want_gradient.norm()
        assert off < 0.05, (length, float(off))
    assert compilations()[0] <= 3, dict(dynamo.utils.counters["stats"])


@pytest.mark.parametrize("attention", ["varlen", "triton"])
def test_one_length_is_one_graph_whatever_the_documents(attention: str) -> None:
    compiled = compile_regions(recomputed(made(attention)), dynamic=attention == "varlen")
    for seed in range(4):
        documents_BT = torch.randint(0, 3 + 5 * seed, (2, 512), generator=torch.Generator().manual_seed(seed))
        ids_BT, _ = batch(512, packed=True)
        trained(compiled, ids_BT, Layout.packed(documents_BT.sort(1).values))
    assert compilations()[0] == 1


def test_fp16_under_autocast() -> None:
    """fp32 weights, fp16 products, a scaled loss: as on devices without bf16."""
    plain = made("sdpa_efficient", dtype="fp32")
    compiled = compile_regions(copy.deepcopy(plain))
    for decoder in (plain, compiled):
        decoder.model.embed_tokens.requires_grad_(False)
    ids_BT, layout = batch(256, packed=True)
    losses = []
    for decoder in (plain, compiled):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
        (loss * 1024).backward()
        losses.append(float(loss.detach()))
        gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert abs(losses[0] - losses[1]) < 2e-3


@pytest.mark.parametrize("recompute", [False, True])
def test_qlora_is_one_graph_over_many_lengths(recompute: bool) -> None:
    weights = {name: p.detach().clone() for name, p in made("triton").named_parameters()}
    decoder = build(SHAPE, dtype="bf16", device="meta", attention="triton", pointwise="triton")
    quantize_layout(decoder, "nf4", impl="triton", device="cuda")
    add_adapters(decoder, LoraSettings(r=16))
    decoder.to_empty(device="cuda")
    with torch.no_grad():
        for name, module in decoder.named_modules():
            if isinstance(module, LoRALinear):
                module.set_weight(weights[f"{name}.weight"])
        for name, parameter in decoder.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    init_adapters(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    recomputed(decoder, recompute)
    compile_regions(decoder)
    for length in LENGTHS[:6]:
        ids_BT, layout = batch(length, packed=True)
        found = []
        for context in (Regions(decoder).paused(), contextlib.nullcontext()):
            decoder.zero_grad()
            with context:
                loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
                loss.backward()
            gradient = decoder.get_parameter("model.layers.0.self_attn.q_proj.lora_B.default.weight").grad
            assert gradient is not None
            found.append((float(loss.detach()), gradient.float()))
        (want, want_gradient), (got, got_gradient) = found
        assert abs(got - want) < 5e-3, (length, got, want)
        assert (got_gradient - want_gradient).norm() < 0.05 * want_gradient.norm()
    assert compilations()[0] == 1
