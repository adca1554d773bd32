"""The declared operations of a block: complete, in order, and with the FLOPs that torch counts."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.plan.declared import blocks_by_layer, full_training
from trimtab.facts.blocks import (
    FeedForwardShape,
    Linear,
)
from trimtab.facts.operations import Operation, OperationKind
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.kernels.attention import Layout
from trimtab.model import build, init_weights
from trimtab.model.spec_block import BLOCK_INPUT

LLAMA = uniform_shape("llama", 64, 32, 80, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
QWEN3 = uniform_shape(
    "qwen3", 64, 32, 80, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16, qk_norm=True
)
BIASED = uniform_shape("llama", 64, 32, 80, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
                       qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


def with_block(**changes: object) -> ModelShape:
    return dataclasses.replace(LLAMA, blocks=(dataclasses.replace(LLAMA.blocks[0], **changes),))


FUSED = with_block(
    mixer=dataclasses.replace(LLAMA.attention, fused_qkv=True),
    feed_forward=FeedForwardShape(80, fused_gate_up=True),
)
POST_NORM = with_block(norm_placement="post", mixer=dataclasses.replace(LLAMA.attention, qk_norm="full"))
BOTH_NORMS = with_block(norm_placement="both")
NO_POSITIONS = with_block(mixer=dataclasses.replace(LLAMA.attention, rope=None))
SINKS = with_block(mixer=dataclasses.replace(LLAMA.attention, sinks=True))
SHAPES = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "biases": BIASED,
    "fused": FUSED,
    "post-norm": POST_NORM,
    "both norms": BOTH_NORMS,
    "no positions": NO_POSITIONS,
    "sinks": SINKS,
}


def operations_of(shape: ModelShape, **changes: str) -> tuple[Operation, ...]:
    """The operations of the only block, with everything trained."""
    (block,) = blocks_by_layer(full_training(shape, 2, 24, **changes))
    return block.operations


@pytest.mark.parametrize("pointwise", ["reference", "triton"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_belongs_to_one_operation(name: str, pointwise: str) -> None:
    shape = SHAPES[name]
    trained = Counter(
        gradient.name
        for operation in operations_of(shape, pointwise=pointwise)
        for gradient in operation.gradients
    )
    assert trained == Counter(found for found, _ in shape.blocks[0].parameters(shape.hidden_size))


@pytest.mark.parametrize("pointwise", ["reference", "triton"])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_produced_before_they_are_read(name: str, pointwise: str) -> None:
    operations = operations_of(SHAPES[name], pointwise=pointwise)
    made = {BLOCK_INPUT}
    for operation in operations:
        assert {activation.name for activation in operation.inputs} <= made, operation.name
        outputs = [activation.name for activation in operation.outputs]
        assert made.isdisjoint(outputs), operation.name
        made.update(outputs)
    assert len({operation.name for operation in operations}) == len(operations)
    assert operations[-1].outputs[0].nbytes == operations[0].inputs[0].nbytes


@pytest.mark.parametrize("name", SHAPES)
def test_sharding_and_its_collectives(name: str) -> None:
    """Column-wise sharding sums its input's gradients, the row-wise one after it its outputs; nothing else does."""
    shape = SHAPES[name]
    linears = {linear.name: linear for linear in shape.blocks[0].linears(shape.hidden_size)}
    tokens, width = 2 * 24, 4
    for operation in operations_of(shape):
        linear: Linear | None = linears.get(operation.name)
        found = [(c.name, c.nbytes, c.backward) for c in operation.communicates]
        if linear is None:
            assert not found
            assert operation.split in ("column", "sequence", "replicated")
        elif linear.split == "row":
            assert found == [("all_reduce", tokens * linear.out_features * width, False)]
        else:
            assert found == [("all_reduce", tokens * linear.in_features * width, True)]
        assert operation.forward.launches > 0
        assert operation.forward.moved > 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "biases", "fused"])
def test_flops_match_torchs_counter(name: str) -> None:
    """Forward and backward products of one block; attention's pairs are counted without the masked ones."""
    shape = SHAPES[name]
    B, T, attention = 2, 24, shape.attention
    decoder = init_weights(build(shape, dtype="fp32", device="cpu", attention="reference"), seed=0)
    ids_BT = torch.zeros(B, T, dtype=torch.int64)
    x_BTC = decoder.model.embed_tokens(ids_BT).detach().requires_grad_()
    positions_BT = torch.arange(T).expand(B, T)
    cos_BTF, sin_BTF = next(iter(decoder.rotary.values())).cos_sin(positions_BT, x_BTC.dtype)
    with FlopCounterMode(display=False) as forward:
        out_BTC = decoder.model.layers[0](x_BTC, cos_BTF, sin_BTF, Layout.causal())
    with FlopCounterMode(display=False) as backward:
        out_BTC.sum().backward()
    products = [
        operation
        for operation in operations_of(shape, attention="reference")
        if operation.kind is OperationKind.PRODUCT
    ]
    pairs = 4 * B * T * T * attention.num_heads * attention.head_dim  # two products over all pairs
    assert sum(operation.forward.flops for operation in products) + pairs == forward.get_total_flops()
    both = sum(operation.backward.flops + operation.parameter_backward.flops for operation in products)
    assert both + 2 * pairs == backward.get_total_flops()
