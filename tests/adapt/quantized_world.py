"""Tiny models for tests of quantized layers: rows of whole blocks, so that bitsandbytes' CPU code reads them right."""

from __future__ import annotations

from pathlib import Path

import torch

from trimtab.adapt.quantized import quantize_layout
from trimtab.facts.shapes import ModelShape
from trimtab.model import build, init_weights, save_folder
from trimtab.model.decoder import Decoder

SHAPE = ModelShape(
    "qwen2", 64, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True
)


def plain(shape: ModelShape = SHAPE, dtype: str = "fp32", seed: int = 0) -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention="reference"), seed)


def empty(shape: ModelShape = SHAPE, kind: str = "nf4", dtype: str = "fp32", **options: object) -> Decoder:
    """Laid out on meta, then given memory, as a run does."""
    decoder = build(shape, dtype=dtype, device="meta", attention="reference")
    quantize_layout(decoder, kind, device="cpu", **options)  # type: ignore[arg-type]
    return decoder.to_empty(device="cpu")


def folder(path: Path, shape: ModelShape = SHAPE, dtype: str = "fp32", shard_bytes: int = 10**9) -> Path:
    save_folder(plain(shape, dtype), path, dtype=dtype, max_shard_bytes=shard_bytes)
    return path


def token_ids(shape: ModelShape = SHAPE, rows: int = 2, tokens: int = 12) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(5))
