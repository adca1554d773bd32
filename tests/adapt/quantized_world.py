"""Tiny models for tests of quantized layers: rows of whole blocks, which bitsandbytes' CPU code reads correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trimtab.adapt import LoraSettings, add_adapters, init_adapters, trained_parameters
from trimtab.adapt.quantized_layout import quantize_layout
from trimtab.adapt.spec_quantized import linear_shapes
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.kernels.nf4 import NF4Weight
from trimtab.kernels.nf4 import spec as nf4_spec
from trimtab.model import build, init_weights, save_folder
from trimtab.model.decoder import Decoder
from trimtab.model.families import config_from_shape

SHAPE = uniform_shape(
    "qwen2", 64, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True
)


def plain(shape: ModelShape = SHAPE, dtype: str = "fp32", seed: int = 0) -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention="reference"), seed)


def empty(shape: ModelShape = SHAPE, kind: str = "nf4", dtype: str = "fp32", **options: object) -> Decoder:
    """Quantized on meta, then materialized, as in a run."""
    decoder = build(shape, dtype=dtype, device="meta", attention="reference")
    quantize_layout(decoder, kind, device="cpu", **options)  # type: ignore[arg-type]
    return decoder.to_empty(device="cpu")


def folder(path: Path, shape: ModelShape = SHAPE, dtype: str = "fp32", shard_bytes: int = 10**9) -> Path:
    save_folder(plain(shape, dtype), path, dtype=dtype, max_shard_bytes=shard_bytes)
    return path


def packed_folder(path: Path, shape: ModelShape, kind: str, *, block: int = 64, nested: int = 256) -> Path:
    """A folder as transformers saves it with bitsandbytes, with random codes; `nested` 0: scales in fp32."""
    generator = torch.Generator().manual_seed(7)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_from_shape(shape, dtype="bfloat16")))
    linear, tensors = linear_shapes(shape), {}
    for name, dims in shape.parameters():
        if name not in linear:
            tensors[name] = torch.rand(dims, generator=generator).bfloat16()

    def codes(*dims: int) -> torch.Tensor:
        return torch.randint(0, 256, dims, generator=generator, dtype=torch.uint8)

    for name, (rows, columns) in linear.items():
        if kind == "int8":
            tensors[name] = codes(rows, columns).view(torch.int8)
            tensors[name.removesuffix("weight") + "SCB"] = torch.rand(rows, generator=generator)
            continue
        count = nf4_spec.num_blocks(rows * columns, block)
        scales: dict[str, Any] = {"absmax": torch.rand(count, generator=generator)}
        if nested:
            scales = {
                "absmax": codes(count),
                "nested_absmax": torch.rand(nf4_spec.num_blocks(count, nested), generator=generator),
                "nested_quant_map": torch.linspace(-1, 1, 256),
                "offset": torch.tensor(1.25),
                "nested_block": nested,
            }
        table = torch.tensor(nf4_spec.TABLE)
        weight = NF4Weight(
            codes((rows * columns + 1) // 2),
            quant_map=table,
            shape=(rows, columns),
            dtype=torch.bfloat16,
            block=block,
            **scales,
        )
        tensors |= weight.to_bitsandbytes(name)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def token_ids(shape: ModelShape = SHAPE, rows: int = 2, tokens: int = 12) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(5))


def adapted(
    kind: str = "nf4", *, dtype: str = "fp32", packing: dict[str, Any] | None = None, **settings: Any
) -> Decoder:
    """Quantized, with nonzero adapters; biases are frozen."""
    decoder = empty(kind=kind, dtype=dtype, **(packing or {}))
    add_adapters(decoder, LoraSettings(r=4, **settings))
    decoder.to_empty(device="cpu")
    init_weights(decoder, 0)
    init_adapters(decoder, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name or name.endswith(".bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return decoder


def results(decoder: Decoder) -> list[torch.Tensor]:
    """The loss and every gradient."""
    for parameter in decoder.parameters():
        parameter.grad = None
    ids = token_ids()
    loss = decoder.loss(ids, ids.roll(-1, 1), reduction="mean")
    loss.backward()
    found = trained_parameters(decoder)
    assert found
    assert all(parameter.grad is not None for parameter in found.values())
    return [loss.detach(), *(parameter.grad.clone() for parameter in found.values())]  # type: ignore[union-attr]
