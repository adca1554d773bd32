"""Mistral 7B: Llama's tensors with a sliding window; its GGUF files have architecture "llama"."""

from __future__ import annotations

from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.model.families import base
from trimtab.model.families.config_json import ConfigValues, decoder_shape


def _describe(config: ConfigValues) -> ModelShape:
    window = config.integer("sliding_window", least=1) if config.get("sliding_window") is not None else None
    return decoder_shape(config, windows=[window] * config.num_layers)


def _own_keys(shape: ModelShape) -> dict[str, Any]:
    return {"sliding_window": shape.window(0)}


FAMILY = base.Family(
    name="mistral",
    architecture="MistralForCausalLM",
    describe=_describe,
    own_keys=_own_keys,
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    gguf_layer=base.LAYER,
    gguf_pairs_rotary_rows=True,
    gguf_architecture="llama",
    gguf_windowed=True,
)
