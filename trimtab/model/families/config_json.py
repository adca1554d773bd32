"""Hugging Face's config.json: typed values, the keys that all families read, and RoPE.

Both forms of RoPE settings are read: `rope_theta` with `rope_scaling` (transformers 4 and nearly every published
model) and `rope_parameters` (transformers 5). The first is written, since transformers 4 and 5, vLLM and llama.cpp's
converter all read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape, Norm, Rope, RopeScaling
from trimtab.facts.errors import ModelError
from trimtab.facts.files import read_json_object
from trimtab.facts.run_layout import config_folder
from trimtab.facts.shapes import ModelShape

HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys that affect neither parameters nor results, in all families. trimtab trains without `attention_dropout`."""
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of config.json whose values are objects with RoPE settings."""
_ROPE_KEYS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)
"""Keys of RoPE settings that `read_rope` and `check_supported` read for one kind of scaling or another."""
MAX_LAYERS = 10_000
"""Maximum number of layers: a damaged file that declares a billion of them is rejected before they are built."""
_MAX_CONFIG_BYTES = 64 * 2**20


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the object in `folder/config.json`; raises ModelError if it is invalid."""
    path = config_folder(Path(folder)) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", "give a Hugging Face model folder or a .gguf file")
    return read_model_json(path)


def read_model_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must contain an object."""
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelError(
            f"{path} is larger than {_MAX_CONFIG_BYTES // 2**20} MiB",
            "download it again: a model's JSON files are smaller",
        )
    try:
        return read_json_object(path)
    except ValueError as err:  # not JSON, not UTF-8, or numbers of thousands of digits
        raise ModelError(
            f"{path} is not a JSON object ({err})", "download or export the model again"
        ) from err


class ConfigValues:
    """A config's values with type checks; a missing value without a default raises ModelError.

    Example:
        >>> config = ConfigValues({"hidden_size": 16, "strange": 1}, "config.json")
        >>> config.integer("hidden_size"), config.unread()
        (16, ['strange'])
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value; None if missing."""
        self._read.add(key)
        return self.data.get(key)

    def unread(self) -> list[str]:
        """Keys that have not been read, those inside of RoPE settings included."""
        inner = [
            f"{section}.{key}"
            for section in ROPE_SECTIONS
            if section in self._read and isinstance(self.data.get(section), dict)
            for key in self.data[section]
            if key not in _ROPE_KEYS
        ]
        return [key for key in self.data if key not in self._read] + inner

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = 2**40) -> int:
        """An integer from `least` to `most`."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where} has no {key}", "download the model's config.json again")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelError(
                f"{self.where}: {key} is {value!r}",
                f"download it again: expected an integer from {least} to {most}",
            )
        return value

    def number(self, key: str, default: float, *, positive: bool = False) -> float:
        """A finite number, above 0 if `positive`."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}", "download it again: expected a number")
        if positive and not float(value) > 0:
            raise ModelError(
                f"{self.where}: {key} is {value!r}", "download it again: expected a number above 0"
            )
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {value!r}", "download it again: expected true or false")
        return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def check_supported(values: ConfigValues) -> None:
    """Raises ModelError for a feature that no trainable family has."""
    where = values.where
    act = values.get("hidden_act") or "silu"
    if act not in ("silu", "swish"):
        raise ModelError(
            f"{where}: hidden_act is {act!r}",
            "use a model with hidden_act: silu, the only one that trimtab trains",
        )
    _check_quantization(values)
    if values.flag("rope_interleaved"):
        raise ModelError(
            f"{where}: rope_interleaved is true",
            "use a model without rope_interleaved: trimtab rotates the two halves of a head",
        )
    stated = [values.get("partial_rotary_factor")]
    for section in ROPE_SECTIONS:
        settings = values.get(section)
        if isinstance(settings, dict):
            stated.append(settings.get("partial_rotary_factor"))
    partial = next((share for share in stated if share not in (None, 1, 1.0)), None)
    if partial is not None:
        raise ModelError(
            f"{where}: partial_rotary_factor is {partial}",
            "use a model without partial_rotary_factor: trimtab rotates all dimensions of a head",
        )


def _check_quantization(values: ConfigValues) -> None:
    """Raises for quantizations other than bitsandbytes' NF4 and INT8, whose details are in the weight files."""
    stored = values.get("quantization_config")
    if not stored:
        return
    if not isinstance(stored, dict):
        raise ModelError(
            f"{values.where}: quantization_config is {stored!r}", "download it again: expected an object"
        )
    method = stored.get("quant_method")
    if method != "bitsandbytes":
        raise ModelError(
            f"{values.where} declares weights that are already quantized (by {method})",
            "give the model's unquantized weights, or ones quantized by bitsandbytes (NF4, INT8)",
        )
    kind = stored.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if stored.get("load_in_4bit") and kind != "nf4":
        raise ModelError(
            f"{values.where} declares weights in {kind}; only nf4 is supported",
            "give the model's unquantized weights",
        )


def decoder_shape(
    config: ConfigValues,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["head", "full"] | None = None,
    windows: Sequence[int | None] | None = None,
    fused_qkv: bool = False,
    fused_gate_up: bool = False,
) -> ModelShape:
    """Returns the shape of a Llama-like decoder, from the keys of all families and family-specific arguments.

    Args:
        config: its values.
        qkv_bias: whether q, k and v have biases; likewise `o_bias` and `mlp_bias`.
        qk_norm: how queries and keys are normalized.
        windows: sliding window per layer; full attention everywhere if None.
        fused_qkv: whether q, k and v are one fused matrix; likewise `fused_gate_up`.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1:
        raise ModelError(f"{config.where}: num_attention_heads is {heads}", "it must be at least 1")
    max_positions, norm = config.integer("max_position_embeddings"), Norm(config.number("rms_norm_eps", 1e-6))
    attention = {
        window: AttentionShape(
            heads,
            config.integer("num_key_value_heads", heads),
            config.integer("head_dim", hidden // heads),
            rope=read_rope(config, max_positions),
            window=window,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            fused_qkv=fused_qkv,
        )
        for window in dict.fromkeys(windows or [None])
    }
    feed_forward = FeedForwardShape(
        config.integer("intermediate_size"), bias=mlp_bias, fused_gate_up=fused_gate_up
    )
    return ModelShape(
        family=str(config.get("model_type")),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(
            BlockShape(attention[window], feed_forward, norm)
            for window in (windows or [None] * config.num_layers)
        ),
        max_positions=max_positions,
        final_norm=norm,
        tie_embeddings=config.flag("tie_word_embeddings"),
        initializer_range=config.number("initializer_range", 0.02),
    )


def common_keys(shape: ModelShape) -> dict[str, Any]:
    """Returns the keys of a config.json that all families have; the inverse of `decoder_shape`."""
    block, attention = shape.block, shape.attention
    rope = attention.rope
    return {
        "model_type": shape.family,
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
        "rope_theta": None if rope is None else rope.theta,
        "rope_scaling": None if rope is None else write_scaling(rope.scaling),
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.initializer_range,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_rope(values: ConfigValues, max_positions: int) -> Rope:
    """Reads RoPE settings in either form; `rope_scaling` takes precedence if both are present, as in transformers."""
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, dict):
        raise ModelError(
            f"{values.where}: the RoPE settings are {rope!r}", "download it again: expected an object"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            f"{values.where}: RoPE settings differ between kinds of layers",
            "use a model with the same RoPE settings in all layers",
        )
    where = f"{values.where} (RoPE settings)"
    inner = ConfigValues(rope, where)
    theta = inner.number("rope_theta", values.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ModelError(f"{values.where}: rope_theta is {theta}", "it must be above 1")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return Rope(theta, scaling_from_values(kind, rope, original, max_positions, where))


def scaling_from_values(
    kind: str, rope: Mapping[str, Any], original: int | None, max_positions: int, where: str
) -> RopeScaling:
    """Reads RoPE scaling from Hugging Face's keys; YaRN's `mscale` pair is converted to the attention factor."""
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise ModelError(
            f"{where}: unknown scaling {kind!r}", "supported are linear, dynamic, yarn and llama3"
        )
    inner = ConfigValues(rope, where)
    original = (
        max_positions if original is None else ConfigValues({"original": original}, where).integer("original")
    )
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
            raise ModelError(
                f"{where}: mscale_all_dim is {rope['mscale_all_dim']}",
                "remove mscale and mscale_all_dim from the RoPE settings",
            )
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


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
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
