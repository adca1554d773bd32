"""Converts a GGUF file's metadata to a `ModelShape`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trimtab.facts.blocks import RopeScaling
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, check_shape, uniform_shape
from trimtab.model.families import FAMILIES
from trimtab.model.families.config_json import MAX_LAYERS, scaling_from_values

# Llama 3.x files store their scaling only as a tensor of divisors; these are the constants it is computed from.
_LLAMA3_ORIGINAL, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def shape_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    *,
    vocab_size: int,
    rope_divisors: Sequence[float] | None = None,
    where: str = "the GGUF file",
) -> ModelShape:
    """Returns the shape that a GGUF file describes.

    Args:
        metadata: the header's keys and values.
        tensor_names: names of the header's tensors, to detect biases and an untied head.
        vocab_size: rows of `token_embd.weight`, the only reliable source.
        rope_divisors: contents of `rope_freqs.weight`, [head_dim / 2], if the file has it (Llama 3.x).
        where: the file's name in errors.
    """
    arch = metadata.get("general.architecture")
    families = [found for found in FAMILIES.values() if arch and found.gguf_architecture == arch]
    if not isinstance(arch, str) or not families:
        known = dict.fromkeys(
            found.gguf_architecture for found in FAMILIES.values() if found.gguf_architecture
        )
        raise ModelError(
            f"{where} has a model of architecture {arch!r}, which trimtab does not support",
            f"supported are {', '.join(known)} (Mistral and SmolLM2 files have architecture llama)",
        )
    keys = GGUFKeys(metadata, arch, where)
    if keys.integer("expert_count", 0):
        raise ModelError(f"{where} is a mixture-of-experts model", "use a dense model")
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{where} is one of {metadata['split.count']} parts", "join them with llama-gguf-split --merge"
        )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if heads < 1:
        raise ModelError(f"{where}: attention.head_count is {heads}", "it must be at least 1")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim or keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{where}: head size {head_dim}, of which {rotated} are rotated",
            "use a model without partial RoPE",
        )
    window = keys.integer("attention.sliding_window", 0) or None
    max_positions, theta = keys.integer("context_length"), keys.number("rope.freq_base", 10_000.0)
    names = set(tensor_names)
    return check_shape(
        uniform_shape(
            next((family for family in families if family.gguf_windowed == bool(window)), families[0]).name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=keys.integer("feed_forward_length"),
            num_layers=keys.integer("block_count", most=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_positions=max_positions,
            rope_theta=theta,
            rope_scaling=_scaling(keys, max_positions, theta, head_dim, rope_divisors),
            norm_eps=_single_to_decimal(keys.number("attention.layer_norm_rms_epsilon", 1e-6)),
            tie_embeddings="output.weight" not in names,
            qkv_bias="blk.0.attn_q.bias" in names,
            o_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
            qk_norm="blk.0.attn_q_norm.weight" in names,
            sliding_window=window,
        )
    )


class GGUFKeys:
    """`<architecture>.<key>` values with type checks."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, where: str) -> None:
        self.metadata, self.arch, self.where = metadata, arch, where

    def get(self, key: str) -> Any:
        """The raw value; None if missing."""
        return self.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None, most: int = 2**40) -> int:
        """An integer up to `most`; for a list with one value per layer, the common value."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where} has no {self.arch}.{key}", "download it again")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ModelError(
                f"{self.where}: {self.arch}.{key} is {value!r}",
                f"download it again: expected an integer up to {most}",
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(
                f"{self.where}: {self.arch}.{key} is {value!r}", "download it again: expected a number"
            )
        return float(value)


def _single_to_decimal(value: float) -> float:
    """Returns the shortest decimal of an fp32 value: files store 1e-5 as 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _scaling(
    keys: GGUFKeys, max_positions: int, theta: float, head_dim: int, divisors: Sequence[float] | None
) -> RopeScaling | None:
    if divisors is not None:
        return _llama3_scaling(keys, theta, head_dim, divisors)
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    attention = None
    if keys.get("rope.scaling.attn_factor") is not None:
        # llama.cpp multiplies YaRN's own factor by this one; Hugging Face's key is the product.
        log_factor = math.log(max(keys.number("rope.scaling.factor", 1.0), 1.0))
        attention = keys.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * log_factor)
    rope = {
        "factor": keys.get("rope.scaling.factor"),
        "attention_factor": attention,
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    original = keys.get("rope.scaling.original_context_length")
    return scaling_from_values(kind, rope, original, max_positions, f"{keys.where} (RoPE settings)")


def llama3_divisors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Returns Llama 3.x's divisors of the frequencies, [head_dim / 2], as llama.cpp's converter stores them."""
    out = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < _LLAMA3_ORIGINAL / _LLAMA3_HIGH:
            out.append(1.0)
        elif wavelength > _LLAMA3_ORIGINAL / _LLAMA3_LOW:
            out.append(factor)
        else:
            smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def _llama3_scaling(
    keys: GGUFKeys, theta: float, head_dim: int, divisors: Sequence[float]
) -> RopeScaling | None:
    """Recognizes Llama 3's scaling from its divisors, and verifies it by recomputing them."""
    if all(value == 1.0 for value in divisors):
        return None
    factor = max(divisors)
    expected = llama3_divisors(theta, head_dim, factor)
    if len(expected) != len(divisors) or any(
        abs(a - b) > 1e-4 * abs(b) for a, b in zip(divisors, expected, strict=True)
    ):
        raise ModelError(
            f"{keys.where}: rope_freqs.weight is not Llama 3's frequency scaling",
            "use the model's Hugging Face folder",
        )
    return RopeScaling(
        "llama3",
        factor,
        _LLAMA3_ORIGINAL,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
