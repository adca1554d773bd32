"""Dequantized copies on a CUDA device: bitwise identical to packed weights, eager, compiled, and with one row."""

from __future__ import annotations

import pytest
import torch
from torch import _dynamo as dynamo

from trimtab.adapt import (
    LoraSettings,
    add_adapters,
    compile_regions,
    init_adapters,
    quantize_layout,
    recompute,
    set_dequantized_copies,
    trained_parameters,
    workspace,
)
from trimtab.facts.shapes import uniform_shape
from trimtab.model import Decoder, build, init_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = uniform_shape(
    "qwen3", 512, 256, 512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)


def made(kind: str, double: bool) -> Decoder:
    decoder = build(SHAPE, dtype="bf16", device="meta", attention="triton", pointwise="triton")
    quantize_layout(decoder, kind, double=double, device="cuda")
    add_adapters(decoder, LoraSettings(r=8))
    decoder.to_empty(device="cuda")
    init_weights(decoder, seed=0)
    init_adapters(decoder, seed=0)
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return decoder


def results(decoder: Decoder) -> list[torch.Tensor]:
    """The loss, every gradient, and the logits of one row."""
    ids_BT = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(1)).cuda()
    decoder.zero_grad()
    loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), reduction="mean")
    loss.backward()
    gradients = [p.grad.clone() for p in trained_parameters(decoder).values() if p.grad is not None]
    with torch.no_grad():
        return [loss.detach(), *gradients, decoder(ids_BT[:1, :1])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["none", "block"])
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("int8", False)])
def test_bitwise_identical_with_and_without(kind: str, double: bool, policy: str, compiled: bool) -> None:
    dynamo.reset()
    decoder = recompute.apply(made(kind, double), [policy] * 2)
    if compiled:
        compile_regions(decoder)
    expected = results(decoder)
    for layers in (1, 2):
        workspace.release()
        found = results(set_dequantized_copies(decoder, layers))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert workspace.allocated_bytes("cuda") == 0, "nothing was dequantized"
