"""Model shapes: published sizes, consecutive equal blocks, layers that differ."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from trimtab.facts.blocks import (
    AttentionShape,
    BlockShape,
    ExpertsShape,
    FeedForwardShape,
    LatentAttentionShape,
    Norm,
    Rope,
)
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, check_shape, uniform_shape
from trimtab.model import build, init_weights

TINY = uniform_shape("llama", 64, 16, 32, 3, num_heads=4, num_kv_heads=2, head_dim=4)


def test_mixtures_of_experts_have_their_published_sizes() -> None:
    """Qwen3-30B-A3B: 30.5 B parameters of which a token uses 3.3 B (its model card)."""
    block = BlockShape(AttentionShape(32, 4, 128, qk_norm="head"), ExpertsShape(128, 8, 768))
    shape = check_shape(ModelShape("qwen3_moe", 151_936, 2048, (block,) * 48))
    assert shape.num_parameters == 30_532_122_624
    assert shape.num_active_parameters // 10**8 == 33


def test_latent_attention_has_its_published_size() -> None:
    """DeepSeek-V3: 671 B parameters of which a token uses 37 B (its paper, without multi-token prediction)."""
    latent = LatentAttentionShape(
        128, 512, rope_head_dim=64, nope_head_dim=128, value_head_dim=128, q_rank=1536
    )
    dense = BlockShape(latent, FeedForwardShape(18_432))
    experts = BlockShape(latent, ExpertsShape(256, 8, 2048, shared=1))
    shape = check_shape(ModelShape("deepseek_v3", 129_280, 7168, (dense,) * 3 + (experts,) * 58))
    assert round(shape.num_parameters / 1e9) == 671
    assert round(shape.num_active_parameters / 1e9) in (37, 38)
    assert [len(layers) for _, layers in shape.layer_groups()] == [3, 58]


def test_parameter_counts_equal_the_listed_parameters() -> None:
    for shape in (TINY, dataclasses.replace(TINY, tie_embeddings=True)):
        assert shape.num_parameters == sum(math.prod(dims) for _, dims in shape.parameters())
        assert shape.num_active_parameters == shape.num_parameters


def test_consecutive_equal_layers_are_grouped() -> None:
    sliding = uniform_shape(
        "qwen2", 64, 16, 32, 5, num_heads=4, num_kv_heads=2, head_dim=4, sliding_window=3, num_full_layers=2
    )
    assert [(block.mixer.window, layers) for block, layers in sliding.layer_groups()] == [
        (None, range(2)),
        (3, range(2, 5)),
    ]
    assert sliding.windows() == [None, 3]
    assert sliding.block == TINY.block
    assert sliding.of_layers(range(1, 4)).blocks == sliding.blocks[1:4]
    assert list(TINY.layer_groups()) == [(TINY.block, range(3))]


def test_layers_may_differ_in_every_field() -> None:
    """The decoder is built from each block's own description, and its parameters are the listed ones."""
    plain = TINY.block
    blocks = (
        plain,
        BlockShape(AttentionShape(2, 1, 6, rope=Rope(500.0), qk_norm="head", window=3), FeedForwardShape(20)),
        BlockShape(
            AttentionShape(4, 4, 2, qkv_bias=True, o_bias=True), FeedForwardShape(8, bias=True), Norm(1e-3)
        ),
    )
    shape = check_shape(dataclasses.replace(TINY, blocks=blocks))
    decoder = init_weights(build(shape, dtype="fp32", device="cpu", attention="sdpa_flash"), seed=0)
    found = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    assert found == list(shape.parameters())
    ids_BT = torch.arange(20).view(2, 10)
    decoder.loss(ids_BT, ids_BT).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    with pytest.raises(AssertionError, match="differ"):
        _ = shape.block
    # Each layer uses its own window: the first token affects only the next two.
    alone = dataclasses.replace(shape, blocks=blocks[1:2])
    decoder = init_weights(build(alone, dtype="fp32", device="cpu", attention="reference"), seed=0)
    changed = ids_BT.clone()
    changed[:, 0] = 63
    with torch.no_grad():
        same = (decoder(ids_BT) == decoder(changed)).all(-1)
    assert same.tolist() == [[False] * 3 + [True] * 7] * 2


ATTENTION, FEED = TINY.block.attention, TINY.block.dense


@pytest.mark.parametrize(
    ("block", "feature"),
    [
        (BlockShape(ATTENTION, ExpertsShape(4, 2, 8)), "experts"),
        (BlockShape(LatentAttentionShape(4, 8, 4, 4, 4), FEED), "latent attention"),
        (BlockShape(ATTENTION, FEED, norm_placement="both"), "norms after a sublayer"),
        (BlockShape(ATTENTION, FEED, Norm(unit_offset=True)), "norms with an offset"),
        (BlockShape(ATTENTION, dataclasses.replace(FEED, activation="gelu")), "the activation gelu"),
        (BlockShape(dataclasses.replace(ATTENTION, softcap=5.0), FEED), "soft-capped"),
        (BlockShape(dataclasses.replace(ATTENTION, scale=0.5), FEED), "a custom attention scale"),
        (BlockShape(dataclasses.replace(ATTENTION, sinks=True), FEED), "attention sinks"),
        (BlockShape(dataclasses.replace(ATTENTION, qk_norm="full"), FEED), "norms over all heads"),
        (BlockShape(dataclasses.replace(ATTENTION, rope=None), FEED), "layers without RoPE"),
        (BlockShape(dataclasses.replace(ATTENTION, rope=Rope(rotary_dim=2)), FEED), "partial RoPE"),
        (BlockShape(dataclasses.replace(ATTENTION, rope=Rope(interleaved=True)), FEED), "interleaved RoPE"),
    ],
)
def test_features_that_can_be_planned_but_not_built_raise(block: BlockShape, feature: str) -> None:
    """A feature of a shape that the decoder lacks raises; it is never ignored."""
    shape = dataclasses.replace(TINY, blocks=(TINY.block, block))
    assert shape.num_parameters > 0
    with pytest.raises(ModelError, match=f"a model with {feature}"):
        build(shape, dtype="fp32", device="meta")


def test_every_field_of_a_block_is_built_or_rejected() -> None:
    """A new field must be implemented in the decoder, or rejected in `building._unsupported`."""
    fields = {
        cls.__name__: {field.name for field in dataclasses.fields(cls)}
        for cls in (BlockShape, AttentionShape, FeedForwardShape, Norm, Rope)
    }
    assert fields == {
        "BlockShape": {"mixer", "feed_forward", "norm", "norm_placement"},
        "AttentionShape": {
            *("num_heads", "num_kv_heads", "head_dim", "rope", "window", "qk_norm", "qkv_bias", "o_bias"),
            *("softcap", "scale", "sinks", "fused_qkv"),
        },
        "FeedForwardShape": {"width", "activation", "bias", "fused_gate_up"},
        "Norm": {"eps", "unit_offset"},
        "Rope": {"theta", "scaling", "rotary_dim", "interleaved"},
    }


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (BlockShape(AttentionShape(4, 3, 4), FeedForwardShape(8)), "4 query heads cannot share 3"),
        (BlockShape(AttentionShape(4, 2, 3), FeedForwardShape(8)), "head_dim 3"),
        (BlockShape(AttentionShape(4, 2, 4), FeedForwardShape(0)), "intermediate_size is 0"),
        (BlockShape(AttentionShape(0, 0, 4), FeedForwardShape(8)), "num_heads is 0"),
        (BlockShape(AttentionShape(4, 2, 4), ExpertsShape(0, 1, 8)), "num_experts is 0"),
    ],
)
def test_inconsistent_blocks_raise(block: BlockShape, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_shape(dataclasses.replace(TINY, blocks=(TINY.block, block)))
