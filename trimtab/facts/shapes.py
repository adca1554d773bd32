"""The shape of a model, layer by layer: everything that determines its parameters, memory and FLOPs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from trimtab.facts.blocks import (
    AttentionShape,
    BlockShape,
    ExpertsShape,
    FeedForwardShape,
    Linear,
    Norm,
    Rope,
    RopeScaling,
    count_elements,
)
from trimtab.facts.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """A decoder: embedding, blocks, head. `parameters()` lists its tensors by Hugging Face's names.

    Example:
        >>> tiny = uniform_shape("llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1,
        ...                      num_heads=4, num_kv_heads=2, head_dim=4)
        >>> tiny.num_parameters
        4400
    """

    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockShape, ...]
    max_positions: int = 2048
    final_norm: Norm = field(default_factory=Norm)
    tie_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @cached_property
    def block_kinds(self) -> tuple[int, ...]:
        """An id per layer; layers with equal blocks have the same id."""
        ids: dict[BlockShape, int] = {}
        return tuple(ids.setdefault(block, len(ids)) for block in self.blocks)

    @cached_property
    def block(self) -> BlockShape:
        """The block of all layers, with `window` None; asserts that layers differ only in `window(layer)`."""
        kinds = {_drop_window(block) for block in self.blocks}
        assert len(kinds) == 1, "the layers of this model differ"
        return next(iter(kinds))

    @property
    def attention(self) -> AttentionShape:
        """The attention of all layers, with `window` None; layers may differ only in their window."""
        return self.block.attention

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward layers, which must be the same in all layers."""
        return self.block.dense.width

    def layer_groups(self) -> Iterator[tuple[BlockShape, range]]:
        """Yields (block, its layers) for each group of consecutive equal blocks.

        Example:
            >>> tiny = uniform_shape("mistral", 64, 16, 32, 5, num_heads=4, num_kv_heads=2, head_dim=4,
            ...                      sliding_window=8, num_full_layers=2)
            >>> [(block.mixer.window, layers) for block, layers in tiny.layer_groups()]
            [(None, range(0, 2)), (8, range(2, 5))]
        """
        start = 0
        for block, run in itertools.groupby(self.blocks):
            stop = start + len(list(run))
            yield block, range(start, stop)
            start = stop

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """Yields (layer, matrix) for the matrices of all blocks, in the order of the forward pass."""
        for i, block in enumerate(self.blocks):
            for linear in block.linears(self.hidden_size):
                yield i, linear

    def block_of(self, name: str) -> BlockShape:
        """Returns the block that contains a parameter, by the parameter's name.

        Example:
            >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
            >>> tiny.block_of("model.layers.1.mlp.up_proj.weight") is tiny.blocks[1]
            True
        """
        prefix, layer, *_ = name.removeprefix("model.").split(".")
        assert prefix == "layers", f"{name} is in no layer"
        return self.blocks[int(layer)]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, the query's own token included; None for full causal attention."""
        return self.blocks[layer].mixer.window

    def windows(self) -> list[int | None]:
        """The distinct windows of all layers."""
        return list(dict.fromkeys(block.mixer.window for block in self.blocks))

    def of_layers(self, layers: range) -> ModelShape:
        """Returns the shape with only these layers, counted from 0, and the same embeddings and head."""
        return dataclasses.replace(self, blocks=tuple(self.blocks[i] for i in layers))

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of every parameter, in the order of the forward pass."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for i, block in enumerate(self.blocks):
            for name, dims in block.parameters(self.hidden_size):
                yield f"model.layers.{i}.{name}", dims
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tie_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied head counted once."""
        return self._num_outer_parameters + sum(
            len(layers) * count_elements(block.parameters(self.hidden_size))
            for block, layers in self.layer_groups()
        )

    @property
    def num_active_parameters(self) -> int:
        """Elements of the parameters that one token uses; less than `num_parameters` with experts."""
        return self._num_outer_parameters + sum(
            len(layers) * block.active_parameters(self.hidden_size) for block, layers in self.layer_groups()
        )

    @property
    def _num_outer_parameters(self) -> int:
        """Elements outside the blocks."""
        return count_elements(dataclasses.replace(self, blocks=()).parameters())


def _drop_window(block: BlockShape) -> BlockShape:
    return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, window=None))


def uniform_shape(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_positions: int = 2048,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
    num_full_layers: int = 0,
    initializer_range: float = 0.02,
) -> ModelShape:
    """Returns the shape of a decoder like Llama's, whose layers differ only in their attention window.

    Args:
        num_full_layers: number of layers, from the first on, without the sliding window (`max_window_layers` of Qwen2).
        qk_norm: whether each head's queries and keys are normalized (Qwen3).
        others: the keys of Hugging Face's config, some with shorter names.

    Example:
        >>> uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4).num_layers
        2
    """
    norm = Norm(norm_eps)
    full = BlockShape(
        AttentionShape(
            num_heads,
            num_kv_heads,
            head_dim,
            rope=Rope(rope_theta, rope_scaling),
            qk_norm="head" if qk_norm else None,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
        ),
        FeedForwardShape(intermediate_size, bias=mlp_bias),
        norm,
    )
    sliding = dataclasses.replace(full, mixer=dataclasses.replace(full.mixer, window=sliding_window))
    num_full = min(num_full_layers, num_layers)
    return ModelShape(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        blocks=(full,) * num_full + (sliding,) * (num_layers - num_full),
        max_positions=max_positions,
        final_norm=norm,
        tie_embeddings=tie_embeddings,
        initializer_range=initializer_range,
    )


def check_shape(shape: ModelShape) -> ModelShape:
    """Returns the shape if its sizes are consistent; raises ModelError that names the wrong one otherwise."""
    _check_positive(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        max_position_embeddings=shape.max_positions,
    )
    for block, _ in shape.layer_groups():
        mixer, feed_forward = block.mixer, block.feed_forward
        _check_positive(intermediate_size=feed_forward.width, num_heads=mixer.num_heads)
        if isinstance(feed_forward, ExpertsShape):
            _check_positive(num_experts=feed_forward.count, num_active_experts=feed_forward.active)
        if isinstance(mixer, AttentionShape):
            _check_heads(mixer)
    return shape


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ModelError(f"the model's {name} is {value}", "it must be at least 1")


def _check_heads(attention: AttentionShape) -> None:
    _check_positive(head_dim=attention.head_dim)
    if attention.num_kv_heads < 1 or attention.num_heads % attention.num_kv_heads:
        raise ModelError(
            f"{attention.num_heads} query heads cannot share {attention.num_kv_heads} key/value heads",
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
    if attention.head_dim % 2:
        raise ModelError(
            f"RoPE cannot rotate pairs of head_dim {attention.head_dim}", "head_dim must be even"
        )
