"""Declared operations of experts and of latent attention against small torch implementations of the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from trimtab.facts.blocks import BlockShape, ExpertsShape, FeedForwardShape, LatentAttentionShape
from trimtab.facts.operations import (
    Activation,
    Gradient,
    MemoryPart,
    Operation,
    OperationKind,
    requiring_grad,
    saved_activations,
)
from trimtab.model.spec_experts import add_experts
from trimtab.model.spec_latent import add_latent_attention
from trimtab.model.spec_operations import Execution, plain_projections

N, C = 24, 16
LATENT = LatentAttentionShape(4, 12, rope_head_dim=4, nope_head_dim=8, value_head_dim=6, q_rank=10)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Parameters = dict[str, torch.Tensor]


def parameters(
    shape: ExpertsShape | LatentAttentionShape, dtype: str, *, trained: bool
) -> tuple[Parameters, Execution]:
    """Random tensors of all its parameters, and the execution settings."""
    torch.manual_seed(0)
    made = {
        name: (torch.randn(dims) / math.sqrt(dims[-1])).to(DTYPES[dtype]).requires_grad_(trained)
        for name, dims in shape.parameters(C)
    }
    gradients = {
        name: Gradient(name, tuple(value.shape), value.nbytes, value.nbytes) for name, value in made.items()
    }
    return made, Execution(1, N, dtype, "triton", trained=gradients if trained else {})


def grouped(rows_RI: torch.Tensor, weight_EOI: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Multiplies each row by its expert's matrix."""
    parts = rows_RI.split(sizes)
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EOI, strict=True)])


def run_experts(x_NC: torch.Tensor, shape: ExpertsShape, p: Parameters) -> torch.Tensor:
    """A mixture of experts as declared."""
    K = shape.active
    logits_NE = F.linear(x_NC, p["mlp.gate.weight"], p.get("mlp.gate.bias"))
    act = torch.sigmoid if shape.score == "sigmoid" else lambda z: torch.softmax(z, -1)
    scores_NE = act(logits_NE.float())
    chosen_NK, index_NK = scores_NE.topk(K)
    weights_NK = (chosen_NK / chosen_NK.sum(-1, keepdim=True)).to(x_NC.dtype)
    order_R = index_NK.flatten().argsort()
    token_R = order_R // K
    sizes = index_NK.flatten().bincount(minlength=shape.count).tolist()
    rows_RC = x_NC[token_R]
    gate_RF = grouped(rows_RC, p["mlp.experts.gate_proj.weight"], sizes)
    up_RF = grouped(rows_RC, p["mlp.experts.up_proj.weight"], sizes)
    down_RC = grouped(F.silu(gate_RF) * up_RF, p["mlp.experts.down_proj.weight"], sizes)
    weighted_RC = down_RC * weights_NK.flatten()[order_R][:, None]
    # index_add would save the weighted rows, of which its gradient only needs the size.
    y_NC = torch.zeros_like(x_NC).index_put((token_R,), weighted_RC, accumulate=True)
    if not shape.shared:
        return y_NC
    gate, up, down = (p[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    shared_NC = (F.silu(x_NC @ gate.T) * (x_NC @ up.T)) @ down.T
    if shape.shared_gate:
        shared_NC = torch.sigmoid(x_NC @ p["mlp.shared_expert_gate.weight"].T) * shared_NC
    return y_NC + shared_NC


class SavesWhatFlashSaves(torch.autograd.Function):
    """Stands in for a tiled attention kernel: q, k, v, the output and a log-sum-exp per row."""

    @staticmethod
    def forward(ctx: Any, q_NHD: torch.Tensor, k_NHD: torch.Tensor, v_NHV: torch.Tensor) -> torch.Tensor:
        o_NHV, lse_NH = v_NHV.clone(), q_NHD.sum(-1).float()
        ctx.save_for_backward(q_NHD, k_NHD, v_NHV, o_NHV, lse_NH)
        return o_NHV

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q_NHD, k_NHD, *_ = ctx.saved_tensors
        return torch.zeros_like(q_NHD), torch.zeros_like(k_NHD), grads[0]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def run_latent(x_NC: torch.Tensor, p: Parameters) -> torch.Tensor:
    """Latent attention as declared, except for the arithmetic of attention itself."""
    H, V, R, S = LATENT.num_heads, LATENT.value_head_dim, LATENT.rope_head_dim, LATENT.nope_head_dim
    w = {name.removeprefix("self_attn.").removesuffix(".weight"): value for name, value in p.items()}
    latent_NQ = norm(x_NC @ w["q_a_proj"].T, w["q_a_layernorm"])
    kv = x_NC @ w["kv_a_proj_with_mqa"].T
    q_NHD = (latent_NQ @ w["q_b_proj"].T).view(N, H, S + R)
    heads = (norm(kv[:, : LATENT.kv_rank], w["kv_a_layernorm"]) @ w["kv_b_proj"].T).view(N, H, S + V)
    v_NHV = heads[..., S:].contiguous()
    cos, sin = torch.ones(N, 1, R), torch.zeros(N, 1, R)
    rotated = rotate(kv[:, None, LATENT.kv_rank :], cos, sin).expand(N, H, R)
    k_NHD = torch.cat((heads[..., :S], rotated), -1)
    q_NHD = torch.cat((q_NHD[..., :S], rotate(q_NHD[..., S:], cos, sin)), -1)
    o_NHV = SavesWhatFlashSaves.apply(q_NHD, k_NHD, v_NHV)
    return o_NHV.reshape(N, H * V) @ w["o_proj"].T


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An RMSNorm as torch composes it on a CPU."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def saved_bytes(compute: Callable[[], torch.Tensor], weights: Parameters) -> int:
    """Bytes of the storages that autograd saves, each once, weights and angles not counted."""
    own = {value.untyped_storage().data_ptr() for value in weights.values()}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_angle = tensor.shape[-1:] == (LATENT.rope_head_dim,) and tensor.dim() == 3 and tensor.shape[1] == 1
        if storage.data_ptr() not in own and not (is_angle and not tensor.requires_grad):
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compute()
    assert y.requires_grad
    return sum(found.values())


def declared_bytes(operations: list[Operation], x: Activation) -> int:
    requires_grad = requiring_grad(operations, {x.name})
    return sum(activation.nbytes for activation in saved_activations(operations, requires_grad))


EXPERTS = {
    "mixtral": ExpertsShape(4, 2, 12),
    "deepseek": ExpertsShape(6, 3, 8, shared=2, score="sigmoid"),
    "qwen2_moe": ExpertsShape(5, 2, 8, shared=1, shared_width=20, shared_gate=True),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_save_what_a_real_layer_saves(name: str, trained: bool, dtype: str) -> None:
    shape = EXPERTS[name]
    weights, run = parameters(shape, dtype, trained=trained)
    x_NC = torch.randn(N, C).to(DTYPES[dtype]).requires_grad_()
    operations: list[Operation] = []
    x = run.activation("x", C, MemoryPart.RESIDUAL)
    add_experts(operations, shape, x, C, run, plain_projections)
    assert declared_bytes(operations, x) == saved_bytes(lambda: run_experts(x_NC, shape, weights), weights)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_flops_match_torchs_counter(name: str) -> None:
    """Of the active experts only: every row is multiplied by one expert."""
    shape = EXPERTS[name]
    weights, run = parameters(shape, "fp32", trained=True)
    operations: list[Operation] = []
    add_experts(operations, shape, run.activation("x", C, MemoryPart.RESIDUAL), C, run, plain_projections)
    check_flops(operations, lambda x_NC: run_experts(x_NC, shape, weights))
    block = BlockShape(LATENT, shape)
    per_token = block.active_weights(C) - sum(linear.matrix for linear in LATENT.linears(C))
    assert (
        sum(operation.forward.flops for operation in operations if operation.kind is OperationKind.PRODUCT)
        == 2 * N * per_token
    )


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_latent_attention_saves_what_a_real_layer_saves(trained: bool) -> None:
    weights, run = parameters(LATENT, "fp32", trained=trained)
    x_NC = torch.randn(N, C, requires_grad=True)
    operations: list[Operation] = []
    x = run.activation("x", C, MemoryPart.RESIDUAL)
    add_latent_attention(operations, LATENT, x, C, run, plain_projections)
    assert declared_bytes(operations, x) == saved_bytes(lambda: run_latent(x_NC, weights), weights)


def test_latent_attention_flops_match_torchs_counter() -> None:
    weights, run = parameters(LATENT, "fp32", trained=True)
    operations: list[Operation] = []
    add_latent_attention(
        operations, LATENT, run.activation("x", C, MemoryPart.RESIDUAL), C, run, plain_projections
    )
    check_flops(operations, lambda x_NC: run_latent(x_NC, weights))
    attention = next(operation for operation in operations if operation.kind is OperationKind.ATTENTION)
    pairs, H, D, V = N * (N + 1) // 2, LATENT.num_heads, LATENT.head_dim, LATENT.value_head_dim
    assert attention.forward.flops == 2 * pairs * H * (D + V)
    assert attention.backward.flops == 2 * pairs * H * (3 * D + 2 * V)


def check_flops(operations: list[Operation], compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Declared products, forward and backward, equal those of torch's counter."""
    x_NC = torch.randn(N, C, requires_grad=True)
    products = [operation for operation in operations if operation.kind is OperationKind.PRODUCT]
    with FlopCounterMode(display=False) as forward:
        y_NC = compute(x_NC)
    with FlopCounterMode(display=False) as backward:
        y_NC.sum().backward()
    assert sum(operation.forward.flops for operation in products) == forward.get_total_flops()
    both = sum(operation.backward.flops + operation.parameter_backward.flops for operation in products)
    assert both == backward.get_total_flops()


def test_no_more_experts_are_read_than_there_are_rows() -> None:
    """Weights read are those of min(experts, tokens · active experts)."""
    shape, width = ExpertsShape(64, 2, 8), 2
    for tokens, experts in ((1, 2), (4, 8), (100, 64)):
        operations: list[Operation] = []
        run = Execution(1, tokens, "bf16", "triton")
        add_experts(operations, shape, run.activation("x", C, MemoryPart.RESIDUAL), C, run, plain_projections)
        up = next(operation for operation in operations if operation.name == "mlp.experts.up_proj")
        assert up.weights == experts * C * shape.width
        rows = tokens * shape.active
        assert up.forward.moved == (rows * (C + shape.width) + experts * C * shape.width) * width
        assert up.forward.kernels[0].dims == (max(rows // experts, 1), shape.width, C)


def test_a_single_expert_that_is_always_active_costs_what_a_dense_layer_does() -> None:
    block, dense = ExpertsShape(1, 1, 32), FeedForwardShape(32)
    extra = dict(block.parameters(C)).keys() - {"mlp.gate.weight"}
    assert len(extra) == 3
    assert sum(linear.weights for linear in block.linears(C) if not linear.routes) == sum(
        linear.weights for linear in dense.linears(C)
    )
