"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families import base
from trimtab.model.families.config_json import ConfigValues, decoder_shape

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(config: ConfigValues) -> list[int | None]:
    """The sliding window of each layer: `layer_types`, or full attention in the first `max_window_layers`."""
    num_layers = config.num_layers
    num_full = min(config.integer("max_window_layers", 28), num_layers)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL] * num_full + [SLIDING] * (num_layers - num_full)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(
            f"{config.where}: layer_types must list {num_layers} layers",
            "download the model's config.json again",
        )
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise ModelError(
            f"{config.where}: layer_types names {unknown[0]!r}",
            f"use a model whose layers are {FULL} or {SLIDING}, which trimtab trains",
        )
    window, stored = None, config.get("sliding_window")  # files without windows have a size, too
    if config.flag("use_sliding_window") and stored is not None:
        window = config.integer("sliding_window", least=1)
    return [window if kind == SLIDING else None for kind in kinds]


def window_keys(shape: ModelShape) -> dict[str, Any]:
    """The config keys of a shape's windows, the inverse of `read_windows`."""
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    given = [window for window in windows if window is not None]
    num_full = windows.count(None)
    keys: dict[str, Any] = {
        "use_sliding_window": bool(given),
        "sliding_window": given[0] if given else None,
        "max_window_layers": num_full,
    }
    if windows[:num_full] != [None] * num_full:  # the layers with full attention are not the first ones
        keys["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    return keys


def _describe(config: ConfigValues) -> ModelShape:
    if config.flag("use_mrope"):  # files of Qwen2.5 have it, as false
        raise ModelError(
            f"{config.where}: use_mrope is true",
            "use a model with use_mrope: false, the only kind that trimtab trains",
        )
    return decoder_shape(config, qkv_bias=True, windows=read_windows(config))


FAMILY = base.Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    describe=_describe,
    own_keys=window_keys,
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    gguf_layer={**base.LAYER, **base.QKV_BIAS},
    gguf_pairs_rotary_rows=False,
    gguf_architecture="qwen2",
)
