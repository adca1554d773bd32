"""Declared operations of dense blocks that cannot be built yet, against the same blocks in plain torch."""

from __future__ import annotations

import pytest
import torch
from test_model_experts import SavesWhatFlashSaves, declared_bytes, norm, saved_bytes
from torch.nn import functional as F

from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape, Norm, Rope
from trimtab.facts.operations import Gradient
from trimtab.model.spec_block import block_operations
from trimtab.model.spec_operations import Execution

N, C = 24, 16
HEADS = AttentionShape(4, 4, 8, rope=None)
FEED = FeedForwardShape(20)
BLOCKS = {
    "norms after branches": BlockShape(HEADS, FEED, Norm(), "post"),
    "norms before and after branches": BlockShape(HEADS, FEED, Norm(), "both"),
    "norms over all heads": BlockShape(AttentionShape(4, 4, 8, rope=None, qk_norm="full"), FEED, Norm(), "post"),
    "biases and sinks": BlockShape(
        AttentionShape(4, 4, 8, rope=None, qkv_bias=True, o_bias=True, sinks=True), FEED
    ),
    "one matrix for gate and up": BlockShape(
        HEADS, FeedForwardShape(20, fused_gate_up=True), Norm(), "both"
    ),
}  # fmt: skip


def run_block(x_NC: torch.Tensor, block: BlockShape, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """A block without RoPE, which would only save angles that all layers share."""
    place, attention = block.norm_placement, block.attention

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def normed(x: torch.Tensor, name: str, wanted: bool = True) -> torch.Tensor:
        return norm(x, p[f"{name}.weight"]) if wanted else x

    h_NC = normed(x_NC, "input_layernorm", place != "post")
    q, k, v = (linear(h_NC, f"self_attn.{name}_proj") for name in "qkv")
    if attention.qk_norm:
        q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
    heads = (part.view(N, attention.num_heads, attention.head_dim) for part in (q, k, v))
    o_NC = linear(SavesWhatFlashSaves.apply(*heads).flatten(1), "self_attn.o_proj")
    x_NC = x_NC + normed(o_NC, "post_attention_layernorm", place != "pre")
    before = "post_attention_layernorm" if place == "pre" else "pre_feedforward_layernorm"
    h_NC = normed(x_NC, before, place != "post")
    if block.dense.fused_gate_up:
        gate, up = linear(h_NC, "mlp.gate_up_proj").chunk(2, -1)
    else:
        gate, up = linear(h_NC, "mlp.gate_proj"), linear(h_NC, "mlp.up_proj")
    y_NC = linear(F.silu(gate) * up, "mlp.down_proj")
    return x_NC + normed(y_NC, "post_feedforward_layernorm", place != "pre")


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", BLOCKS)
def test_declared_operations_match_autograd(name: str, trained: bool) -> None:
    block = BLOCKS[name]
    weights = {key: torch.randn(dims).mul_(0.2).requires_grad_(trained) for key, dims in block.parameters(C)}
    gradients = {key: Gradient(key, tuple(p.shape), p.nbytes, p.nbytes) for key, p in weights.items()}
    run = Execution(1, N, "fp32", "sdpa_flash", trained=gradients if trained else {})
    operations = list(block_operations(block, C, run))
    x_NC = torch.randn(N, C, requires_grad=True)
    assert declared_bytes(operations, operations[0].inputs[0]) == saved_bytes(
        lambda: run_block(x_NC, block, weights), weights
    )


def test_layers_without_rope_have_no_rotation() -> None:
    for rope, count in ((None, 0), (Rope(), 1)):
        block = BlockShape(AttentionShape(4, 2, 8, rope=rope), FEED)
        names = [
            operation.name for operation in block_operations(block, C, Execution(1, N, "bf16", "triton"))
        ]
        assert names.count("rope") == count
