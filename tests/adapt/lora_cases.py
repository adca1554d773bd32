"""Shared by the tests of adapters: tiny shapes, decoders with randomized adapters, and peft's model of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from trimtab.adapt import LoraSettings, add_adapters, init_adapters
from trimtab.adapt.peft_files import adapter_tensors
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights, save_folder
from trimtab.model.decoder import Decoder

TIED = uniform_shape(
    "llama", 97, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, tie_embeddings=True
)
UNTIED = uniform_shape(
    "qwen2", 97, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True
)
IDS_BT = torch.arange(40).reshape(2, 20) * 7 % 97


def base(shape: ModelShape = TIED, dtype: str = "fp32") -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention="reference"), seed=0)


def scatter(decoder: Decoder, adapter: str = "default", seed: int = 1, size: float = 0.2) -> Decoder:
    """Randomizes an adapter as if it were trained: nothing is zero, DoRA's magnitudes are not the base's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter_tensors(decoder, adapter).items():
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return decoder


def adapted(settings: LoraSettings, shape: ModelShape = TIED, dtype: str = "fp32") -> Decoder:
    decoder = add_adapters(base(shape, dtype), settings)
    init_adapters(decoder, seed=3)
    return scatter(decoder)


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return decoder.logits(decoder(IDS_BT))


def exact_logits(decoder: Decoder) -> torch.Tensor:
    """In fp64, so that differences from another implementation are not rounding."""
    return logits(copy.deepcopy(decoder).double())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value. transformers' norms and softmax are fp32 in any model, so
    that correct implementations differ by up to 1e-5; an adapter with an error of 1 % gives 1e-3."""
    return float((one - other).abs().max() / other.abs().max())


def save_base(folder: Path, shape: ModelShape) -> Path:
    save_folder(base(shape), folder, dtype="fp32")
    return folder


def theirs(folder: Path, adapter: Path | None = None, **config: Any) -> Any:
    """transformers' model of a base folder, with peft's adapter from files or a fresh one of `config`."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter).eval()
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()


def their_logits(model: Any) -> torch.Tensor:
    """In fp64."""
    with torch.no_grad():
        return model.double()(IDS_BT).logits
