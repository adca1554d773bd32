"""Quantized layers and LoRA on any torch model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.adapt import LoraSettings, QuantizedLinear, add_lora, quantize_linears
from trimtab.facts.errors import TrimtabError


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model.add_module("lm_head", nn.Linear(64, 8))
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_are_quantized_and_adapters_trained(kind: str) -> None:
    model, x_NK = small(), torch.randn(16, 64)
    plain_NV = model(x_NK)
    quantize_linears(model, kind)
    assert isinstance(model[0], QuantizedLinear)
    assert isinstance(model.lm_head, nn.Linear)
    quantized_NV = model(x_NK)
    assert 0 < (quantized_NV - plain_NV).norm() / plain_NV.norm() < (0.15 if kind == "nf4" else 0.02)
    add_lora(model, LoraSettings(r=4))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(trained) == ["0.lora_A.default.weight", "0.lora_B.default.weight"]
    torch.testing.assert_close(model(x_NK), quantized_NV)  # B is initially zero
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = (model(x_NK) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_layers_by_name_and_invalid_arguments() -> None:
    model = add_lora(small(), LoraSettings(r=2, target_modules=("lm_head",)), skip=())
    assert next(n for n, p in model.named_parameters() if p.requires_grad).startswith("lm_head.lora_A")
    with pytest.raises(TrimtabError, match=r"no layer for target_modules \('q_proj',\)"):
        add_lora(small(), LoraSettings(target_modules=("q_proj",)))
    with pytest.raises(TrimtabError, match="lora_dropout requires a trimtab decoder"):
        add_lora(small(), LoraSettings(lora_dropout=0.1))
    with pytest.raises(TrimtabError, match="no linear layer to quantize"):
        quantize_linears(nn.Sequential(nn.ReLU()))
