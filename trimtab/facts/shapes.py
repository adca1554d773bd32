"""The shape of a model: every number that decides its parameters, memory and arithmetic, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.facts.errors import ModelError

RopeKind = Literal["linear", "dynamic", "yarn", "llama3"]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was pretrained on."""

    kind: RopeKind
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape; `parameters()` lists its tensors by the names Hugging Face gives them.

    Example:
        >>> tiny = ModelShape("llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1,
        ...                   num_heads=4, num_kv_heads=2, head_dim=4)
        >>> tiny.num_parameters
        4400
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    num_full_layers: int = 0
    """The first layers that attend without the sliding window (Qwen2's `max_window_layers`)."""
    initializer_range: float = 0.02

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a query of this layer sees; None for all before it."""
        return self.sliding_window if layer >= self.num_full_layers else None

    def of_layers(self, layers: range) -> ModelShape:
        """The shape of a model with only these layers, counted from 0, between the same embeddings and head."""
        full = len([layer for layer in layers if layer < self.num_full_layers])
        return dataclasses.replace(self, num_layers=len(layers), num_full_layers=full)

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every trained tensor, in the order of the forward pass."""
        C, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, C)
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (C,)
            for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield f"{layer}.self_attn.{name}.weight", (width, C)
                if self.qkv_bias:
                    yield f"{layer}.self_attn.{name}.bias", (width,)
            if self.qk_norm:
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{layer}.self_attn.o_proj.weight", (C, q)
            if self.o_bias:
                yield f"{layer}.self_attn.o_proj.bias", (C,)
            yield f"{layer}.post_attention_layernorm.weight", (C,)
            for name, (rows, cols) in (
                ("gate_proj", (self.intermediate_size, C)),
                ("up_proj", (self.intermediate_size, C)),
                ("down_proj", (C, self.intermediate_size)),
            ):
                yield f"{layer}.mlp.{name}.weight", (rows, cols)
                if self.mlp_bias:
                    yield f"{layer}.mlp.{name}.bias", (rows,)
        yield "model.norm.weight", (C,)
        if not self.tie_embeddings:
            yield "lm_head.weight", (self.vocab_size, C)

    @property
    def num_parameters(self) -> int:
        """Trained numbers, a tied head counted once."""
        total = 0
        for _, dims in self.parameters():
            count = 1
            for dim in dims:
                count *= dim
            total += count
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ModelShape:
        """The inverse of `to_dict`."""
        scaling = data.get("rope_scaling")
        return ModelShape(**{**data, "rope_scaling": RopeScaling(**scaling) if scaling else None})


def check(shape: ModelShape) -> ModelShape:
    """The shape itself if its numbers fit together, an error that names the one that does not otherwise."""
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim"):
        if getattr(shape, field) < 1:
            raise ModelError(f"the model's {field} is {getattr(shape, field)}", "it must be at least 1")
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ModelError(
            f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} key/value heads",
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
    if shape.head_dim % 2:
        raise ModelError(f"a head of {shape.head_dim} cannot be rotated in pairs", "head_dim must be even")
    return shape
