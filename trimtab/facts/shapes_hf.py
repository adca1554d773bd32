"""Hugging Face's `config.json` to a `ModelShape` and back, for the families that trimtab trains.

Both spellings of rotary settings are read: `rope_theta` with `rope_scaling` (transformers 4, and what nearly
every published model has) and `rope_parameters` (transformers 5). The first is written, since transformers 4
and 5, vLLM and llama.cpp's converter all read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.facts.blocks import RopeScaling
from trimtab.facts.errors import ModelError
from trimtab.facts.files import read_json_object
from trimtab.facts.run_layout import config_folder
from trimtab.facts.shapes import FAMILIES, ModelShape, check, uniform_shape

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Family (transformers' `model_type`) to transformers' class, as `architectures` names it."""

# What transformers assumes for a key that a config leaves out (its configuration_<family>.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
MAX_LAYERS = 10_000
"""More than any model has; a damaged file must not make us build a billion layers."""
_MAX_CONFIG_BYTES = 64 * 2**20


def read_config(folder: str | Path) -> dict[str, Any]:
    """The object in `folder/config.json`, or an error that says what is wrong with the file."""
    path = config_folder(Path(folder)) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", "give a Hugging Face model folder or a .gguf file")
    return read_model_json(path)


def read_model_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelError(
            f"{path} is larger than {_MAX_CONFIG_BYTES // 2**20} MiB",
            "download it again: a model's JSON files are smaller",
        )
    try:
        return read_json_object(path)
    except ValueError as err:  # not JSON, not UTF-8, or numbers of thousands of digits
        raise ModelError(
            f"{path} holds no JSON object ({err})", "download or export the model again"
        ) from err


def shape_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a `config.json` describes.

    Args:
        config: the parsed file.
        where: how errors name it.

    Example:
        >>> shape_from_config({"model_type": "llama", "vocab_size": 64, "hidden_size": 16,
        ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}).head_dim
        4
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ModelError(
            f"{where} describes a model of type {family!r}, which trimtab does not know",
            f"supported are {', '.join(FAMILIES)} (SmolLM2 is a llama)",
        )
    values = _Values({**_DEFAULTS[family], **config}, where)
    _refuse_unsupported(values)
    hidden, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    layers = values.whole("num_hidden_layers", most=MAX_LAYERS)
    max_positions = values.whole("max_position_embeddings")
    if heads < 1:
        raise ModelError(f"{where}: num_attention_heads is {heads}", "it must be at least 1")
    window, num_full = _window(family, values, layers)
    theta, scaling = _rope(values, max_positions)
    bias = family in ("llama", "qwen3") and values.flag("attention_bias")
    return check(
        uniform_shape(
            family,
            vocab_size=values.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=values.whole("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=values.whole("num_key_value_heads", heads),
            head_dim=values.whole("head_dim", hidden // heads),
            max_positions=max_positions,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=values.number("rms_norm_eps", 1e-6),
            tie_embeddings=values.flag("tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=family == "llama" and values.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            sliding_window=window,
            num_full_layers=num_full,
            initializer_range=values.number("initializer_range", 0.02),
        )
    )


def config_from_shape(
    shape: ModelShape, *, dtype: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 load.

    Args:
        shape: the model.
        dtype: torch's name of the stored weights' format ("bfloat16").
        extra: further keys, such as `bos_token_id` and `eos_token_id`; without them those two are null.
    """
    family, block = shape.family, shape.block
    attention, rope = block.attention, block.attention.rope
    windows = [window for window in shape.windows() if window is not None]
    window = windows[0] if windows else None
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": block.norm.eps,
        "rope_theta": rope.theta if rope else None,
        "rope_scaling": _scaling_to_config(rope.scaling if rope else None),
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.initializer_range,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = attention.qkv_bias
    if family == "llama":
        config["mlp_bias"] = block.dense.bias
    if family == "mistral":
        config["sliding_window"] = window
    if family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = window is not None
        config["sliding_window"] = window
        full = [shape.window(layer) for layer in range(shape.num_layers)].count(None)
        config["max_window_layers"] = full
    if shape_from_config(config) != shape:
        raise ModelError(
            f"transformers' {ARCHITECTURES[family]} cannot describe this model: {shape}",
            "build it with the biases, norms and windows of its family",
        )
    return {**config, **(extra or {})}


class _Values:
    """A config's values with their types checked; a missing one without a default is an error."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def whole(self, key: str, default: int | None = None, most: int = 2**40) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where} has no {key}", "download the model's config.json again")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ModelError(
                f"{self.where}: {key} is {value!r}",
                f"download it again: a whole number up to {most} is expected",
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}", "download it again: a number is expected")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.where}: {key} is {value!r}", "download it again: true or false is expected"
            )
        return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _refuse_unsupported(values: _Values) -> None:
    where = values.where
    act = values.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        raise ModelError(
            f"{where}: hidden_act is {act!r}",
            "use a model with hidden_act: silu, the only one that trimtab trains",
        )
    _refuse_unknown_quantization(values)
    rope = values.get("rope_parameters") or {}
    partial = values.get("partial_rotary_factor") or (
        rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    )
    if partial not in (None, 1, 1.0):
        raise ModelError(
            f"{where}: partial_rotary_factor is {partial}",
            "use a model without partial_rotary_factor: trimtab rotates whole heads",
        )


def _refuse_unknown_quantization(values: _Values) -> None:
    """bitsandbytes' NF4 and INT8 are read; the files themselves say the rest."""
    stored = values.get("quantization_config")
    if not stored:
        return
    if not isinstance(stored, dict):
        raise ModelError(
            f"{values.where}: quantization_config is {stored!r}", "download it again: an object is expected"
        )
    method = stored.get("quant_method")
    if method != "bitsandbytes":
        raise ModelError(
            f"{values.where} says that the weights are already quantized (by {method})",
            "give the model's unquantized weights, or ones that bitsandbytes quantized (NF4, INT8)",
        )
    kind = stored.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if stored.get("load_in_4bit") and kind != "nf4":
        raise ModelError(
            f"{values.where} says that the weights are in {kind}, of which only nf4 is read",
            "give the model's unquantized weights",
        )


def _window(family: str, values: _Values, layers: int) -> tuple[int | None, int]:
    """(window, number of first layers without it)."""
    if family == "llama":
        return None, 0
    if values.get("sliding_window") is None:
        return None, 0
    window = values.whole("sliding_window")
    if family == "mistral":
        return window, 0
    if not values.flag("use_sliding_window"):
        return None, 0
    num_full = min(values.whole("max_window_layers", 28), layers)
    types = values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(
                f"{values.where}: layer_types must list {layers} layers",
                "download the model's config.json again",
            )
        num_full = sum(kind == "full_attention" for kind in types)
        expected = ["full_attention"] * num_full + ["sliding_attention"] * (layers - num_full)
        if types != expected:
            raise ModelError(
                f"{values.where}: layer_types alternates full and sliding attention",
                "supported are full layers first, then sliding ones",
            )
    return (None, 0) if num_full >= layers else (window, num_full)


def _rope(values: _Values, max_positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either spelling; `rope_scaling` wins if both are there, as in transformers."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(
            f"{values.where}: the rotary settings are {rope!r}", "download it again: an object is expected"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"{values.where}: rotary settings differ between kinds of layers",
            f"supported are {', '.join(FAMILIES)} with one setting for all layers",
        )
    where = f"{values.where} (rotary settings)"
    inner = _Values(rope, where)
    theta = inner.number("rope_theta", values.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ModelError(f"{values.where}: rope_theta is {theta}", "it must be above 1")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return theta, scaling_from_values(kind, rope, original, max_positions, where)


def scaling_from_values(
    kind: str, rope: Mapping[str, Any], original: int | None, max_positions: int, where: str
) -> RopeScaling:
    """Scaling from Hugging Face's keys; YaRN's `mscale` pair becomes the attention factor it stands for."""
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise ModelError(
            f"{where}: scaling {kind!r} is not known", "supported are linear, dynamic, yarn and llama3"
        )
    inner = _Values(rope, where)
    original = max_positions if original is None else _Values({"original": original}, where).whole("original")
    if kind == "yarn" and rope.get("factor") is None:
        factor = max_positions / max(original, 1)
    elif rope.get("factor") is None:
        raise ModelError(f"{where}: {kind} scaling has no factor", "download the model's config.json again")
    else:
        factor = inner.number("factor", 1.0)
    if factor <= 0 or original < 1:
        raise ModelError(
            f"{where}: factor {factor} over {original} positions", "use a model in which both are positive"
        )
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind=kind, factor=factor)  # type: ignore[arg-type]
    if kind == "llama3":
        low, high = inner.number("low_freq_factor", 1.0), inner.number("high_freq_factor", 4.0)
        if not 0 < low < high:
            raise ModelError(
                f"{where}: low_freq_factor {low}, high_freq_factor {high}",
                "use a model with 0 < low_freq_factor < high_freq_factor",
            )
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    attention: float | None = None
    if rope.get("attention_factor") is not None:
        attention = inner.number("attention_factor", 1.0)
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        below = _mscale(factor, inner.number("mscale_all_dim", 1.0))
        if below == 0:
            raise ModelError(f"{where}: mscale_all_dim is {rope['mscale_all_dim']}", "leave both mscales out")
        attention = _mscale(factor, inner.number("mscale", 1.0)) / below
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0,
        attention_factor=attention,
        truncate=inner.flag("truncate", True),
    )


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _scaling_to_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    out: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        out["low_freq_factor"] = scaling.low_freq_factor
        out["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        out["beta_fast"], out["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        if scaling.attention_factor is not None:
            out["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            out["truncate"] = False
    if scaling.original_max_positions is not None:
        out["original_max_position_embeddings"] = scaling.original_max_positions
    return out
