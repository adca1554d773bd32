"""Declares the operations of a block; memory plan, recompute policies and FLOP counts are computed from them. No torch.

`block_operations` lists them in the order of the forward pass, for one microbatch. A test compares the declared saved
activations with those that autograd saves, byte for byte.

Legend: C hidden size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trimtab.facts.blocks import AttentionShape, BlockShape, ExpertsShape, LatentAttentionShape, Linear
from trimtab.facts.operations import Activation, MemoryPart, Operation, requiring_grad
from trimtab.model.spec_experts import add_experts
from trimtab.model.spec_latent import add_latent_attention
from trimtab.model.spec_operations import (
    DeclareProjections,
    Execution,
    Projections,
    add_attention,
    add_gated_activation,
    add_residual,
    add_rope,
    copy_values,
    norm_operation,
    plain_projections,
)

BLOCK_INPUT, ATTENTION_RESIDUAL, FEED_FORWARD_RESIDUAL = "x", "attention_residual", "feed_forward_residual"
"""The residual stream at a block's input, between its halves, and at its output."""


@dataclass(frozen=True)
class DeclaredBlock:
    """The operations of one block in a run, and which activations require a gradient."""

    attention: tuple[Operation, ...]
    feed_forward: tuple[Operation, ...]
    requires_grad: frozenset[str]
    tile: tuple[Operation, ...] = ()
    """The feed-forward half over one tile of tokens; empty without tiling."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of both halves, in the order of the forward pass."""
        return (*self.attention, *self.feed_forward)

    @property
    def differentiates(self) -> bool:
        """Whether the block has a backward pass; frozen layers before the first trained one have none."""
        return any(operation.differentiates(self.requires_grad) for operation in self.operations)


def block_operations(
    block: BlockShape,
    hidden_size: int,
    run: Execution,
    projections: DeclareProjections | None = None,
) -> tuple[Operation, ...]:
    """Returns the operations of a block, in the order of the forward pass.

    Args:
        block: the shape of the block.
        hidden_size: C.
        run: sizes, dtypes, kernels and trainable parameters.
        projections: declares the linear layers; by default, as `nn.Linear`.

    Example:
        >>> from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape
        >>> block = BlockShape(AttentionShape(4, 2, 8), FeedForwardShape(32))
        >>> [operation.name for operation in block_operations(block, 16, Execution(1, 8, "fp32", "sdpa_flash"))][:3]
        ['input_layernorm', 'self_attn.q_proj', 'self_attn.k_proj']
    """
    attention = attention_operations(block, hidden_size, run, projections)
    return (*attention, *feed_forward_operations(block, hidden_size, run, projections))


def declare_block(
    block: BlockShape,
    hidden_size: int,
    run: Execution,
    projections: DeclareProjections | None = None,
    *,
    input_requires_grad: bool = True,
    tile_tokens: int | None = None,
) -> DeclaredBlock:
    """Declares the operations of a block, and which activations require a gradient.

    Args:
        block, hidden_size, run, projections: as in `block_operations`.
        input_requires_grad: False for all layers up to and including the first trained one.
        tile_tokens: tokens per tile of a tiled feed-forward half.

    Example:
        >>> from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape
        >>> block = BlockShape(AttentionShape(4, 2, 8), FeedForwardShape(32))
        >>> declare_block(block, 16, Execution(1, 8, "fp32", "sdpa_flash"), input_requires_grad=False).differentiates
        False
    """
    attention = attention_operations(block, hidden_size, run, projections)
    feed_forward = feed_forward_operations(block, hidden_size, run, projections)
    tile: tuple[Operation, ...] = ()
    if tile_tokens is not None:
        tile_run = dataclasses.replace(run, batch=1, tokens=tile_tokens)
        tile = feed_forward_operations(block, hidden_size, tile_run, projections)
    given = {BLOCK_INPUT} if input_requires_grad else set()
    return DeclaredBlock(attention, feed_forward, requiring_grad((*attention, *feed_forward), given), tile)


def attention_operations(
    block: BlockShape, hidden_size: int, run: Execution, projections: DeclareProjections | None = None
) -> tuple[Operation, ...]:
    """Declares the attention half of a block: from its input to the residual stream with attention added."""
    declare = projections or plain_projections
    x = run.activation(BLOCK_INPUT, hidden_size, MemoryPart.RESIDUAL, run.stream_dtype)
    found: list[Operation] = []
    normed = x
    if block.norm_placement != "post":
        normed = _add_norm(found, "input_layernorm", x, hidden_size, run)
    if isinstance(block.mixer, LatentAttentionShape):
        branch = add_latent_attention(found, block.mixer, normed, hidden_size, run, declare)
    else:
        branch = _add_attention(found, block.mixer, normed, hidden_size, run, declare)
    if block.norm_placement != "pre":
        branch = _add_norm(found, "post_attention_layernorm", branch, hidden_size, run)
    add_residual(found, ATTENTION_RESIDUAL, x, branch, hidden_size, run)
    return tuple(found)


def _add_attention(
    found: list[Operation],
    mixer: AttentionShape,
    x: Activation,
    hidden_size: int,
    run: Execution,
    declare: DeclareProjections,
) -> Activation:
    """Adds softmax attention with grouped heads; returns its output."""
    *inputs, out = mixer.linears(hidden_size)
    q, k, v = _project(found, declare, tuple(inputs), x, run, "attention", 3)
    if v is q and mixer.qk_norm is None:
        v = copy_values(found, mixer, v, run)
    q, k = add_rope(found, mixer, q, k, run)
    attended = add_attention(found, mixer, q, k, v, run)
    (branch,) = _project(found, declare, (out,), attended, run, "attention", 1)
    return branch


def feed_forward_operations(
    block: BlockShape, hidden_size: int, run: Execution, projections: DeclareProjections | None = None
) -> tuple[Operation, ...]:
    """Declares the feed-forward half of a block: from the residual stream between the halves to the block's output."""
    shape, declare = block.feed_forward, projections or plain_projections
    x = run.activation(ATTENTION_RESIDUAL, hidden_size, MemoryPart.RESIDUAL, run.stream_dtype)
    found: list[Operation] = []
    normed = x
    if block.norm_placement != "post":
        name = "post_attention_layernorm" if block.norm_placement == "pre" else "pre_feedforward_layernorm"
        normed = _add_norm(found, name, x, hidden_size, run)
    if isinstance(shape, ExpertsShape):
        branch = add_experts(found, shape, normed, hidden_size, run, declare)
    else:
        *inputs, down = shape.linears(hidden_size)
        gate, up = _project(found, declare, tuple(inputs), normed, run, "gate_up", 2)
        gated = add_gated_activation(found, shape, gate, up, run)
        (branch,) = _project(found, declare, (down,), gated, run, "down", 1)
    if block.norm_placement != "pre":
        branch = _add_norm(found, "post_feedforward_layernorm", branch, hidden_size, run)
    add_residual(found, FEED_FORWARD_RESIDUAL, x, branch, hidden_size, run)
    return tuple(found)


def _project(
    found: list[Operation],
    declare: DeclareProjections,
    linears: tuple[Linear, ...],
    x: Activation,
    run: Execution,
    label: str,
    count: int,
) -> tuple[Activation, ...]:
    """Adds the projections of one input; returns `count` outputs, which are the same activation if they are fused."""
    part = MemoryPart.ATTENTION if label == "attention" else MemoryPart.FEED_FORWARD
    outputs = tuple(run.activation(linear.name, linear.out_features, part) for linear in linears)
    found += declare(Projections(linears, x, outputs, part, label), run)
    assert len(outputs) in (1, count), f"{len(outputs)} projections for {count} uses"
    return outputs if len(outputs) == count else outputs * count


def _add_norm(found: list[Operation], name: str, x: Activation, width: int, run: Execution) -> Activation:
    operation = norm_operation(name, x, width, 1, run, dtype=run.stream_dtype)
    found.append(operation)
    return operation.outputs[0]
