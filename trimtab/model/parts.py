"""The decoder's modules: norm, attention, feed-forward, and the block composed of them.

Parameter names are Hugging Face's. Legend: B batch, T new tokens, S keys (cache included), C hidden
size, H query heads, K key/value heads, D head size, I intermediate size, F = D / 2 rotary frequencies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from trimtab.facts.blocks import BlockShape, FeedForwardShape, Linear
from trimtab.kernels.attention import Layout, attention
from trimtab.kernels.gated_mlp import gated_activation
from trimtab.kernels.rms_norm import add_rms_norm, rms_norm
from trimtab.kernels.rope import rope
from trimtab.model.labels import in_projection


class Cache(Protocol):
    """The interface of a key/value cache; `trimtab.generate` implements it."""

    @property
    def length(self) -> int:
        """Number of cached tokens, before the current ones."""

    def update(
        self, layer: int, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Caches the new tokens' keys and values; returns (k_BSKD, v_BSKD) of all visible keys."""


def project(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """Applies each layer to the same x.

    Layers that can be fused have a method `forward_group` (LoRA layers do). If any has a forward hook, they run
    separately.
    """
    forward_group = getattr(layers[0], "forward_group", None)
    if forward_group is None or any(layer._forward_hooks for layer in layers):
        return [layer(x) for layer in layers]
    return forward_group(x, layers)


@dataclass(frozen=True)
class LayerKernels:
    """The kernel implementations of one layer."""

    attention: str
    """Attention backend for packed sequences and for generation."""
    unpacked_attention: str
    """Attention backend for sequences of one document each."""
    pointwise: str = "reference"
    """Implementation of norms, RoPE and gated activations (`trimtab.kernels`): "reference" or "triton"."""


def new_linear(linear: Linear) -> nn.Linear:
    """Creates a linear layer of a block."""
    return nn.Linear(linear.in_features, linear.out_features, bias=linear.bias)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, computed in fp32 or wider and rounded once."""

    def __init__(self, width: int, eps: float, impl: str = "reference") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.impl = eps, impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, D] to […, D], in x's dtype."""
        return rms_norm(x, self.weight, self.eps, impl=self.impl)


class Attention(nn.Module):
    """Causal self-attention with grouped heads; the computation itself is `trimtab.kernels.attention`."""

    def __init__(self, block: BlockShape, hidden_size: int, layer: int, kernels: LayerKernels) -> None:
        super().__init__()
        shape = block.attention
        self.layer, self.head_dim, self.window = layer, shape.head_dim, shape.window
        self.packed_impl, self.unpacked_impl = kernels.attention, kernels.unpacked_attention
        self.pointwise = kernels.pointwise
        *inputs, o = shape.linears(hidden_size)
        self.qkv_sizes = inputs[0].parts
        if self.qkv_sizes:
            self.qkv_proj = new_linear(inputs[0])
        else:
            self.q_proj, self.k_proj, self.v_proj = map(new_linear, inputs)
        normed = shape.qk_norm is not None
        self.q_norm = RMSNorm(shape.head_dim, block.norm.eps) if normed else None
        self.k_norm = RMSNorm(shape.head_dim, block.norm.eps) if normed else None
        self.o_proj = new_linear(o)

    def forward(
        self,
        x_BTC: torch.Tensor,
        cos_BTF: torch.Tensor,
        sin_BTF: torch.Tensor,
        layout: Layout,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Maps [B, T, C] to [B, T, C]; cos and sin are [B, T, D / 2] each. With a cache, attends to the keys and values
        of earlier tokens as well."""
        B, T, _ = x_BTC.shape
        with in_projection("attention"):
            q_BTHD, k_BTKD, v_BTKD = (y.view(B, T, -1, self.head_dim) for y in self._project(x_BTC))
        q_BTHD, k_BSKD = self._apply_rope(q_BTHD, k_BTKD, cos_BTF, sin_BTF)
        v_BSKD = v_BTKD
        if cache is not None:
            k_BSKD, v_BSKD = cache.update(self.layer, k_BSKD, v_BSKD)
            layout = layout.last(k_BSKD.shape[1])
        impl = self.packed_impl if layout.is_packed or cache is not None else self.unpacked_impl
        o_BTHD = attention(q_BTHD, k_BSKD, v_BSKD, layout=layout, window=self.window, impl=impl)
        with in_projection("attention"):
            return self.o_proj(o_BTHD.reshape(B, T, -1))

    def _project(self, x_BTC: torch.Tensor) -> list[torch.Tensor]:
        """Projects x to queries, keys and values, each with all heads of a token in one dimension."""
        if not self.qkv_sizes:
            return project(x_BTC, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = self.qkv_proj(x_BTC).split(self.qkv_sizes, dim=-1)
        if self.q_norm is None and torch.is_grad_enabled():
            # Attention saves v for the backward pass; a view would also keep q and k alive, which RoPE copies.
            v = v.contiguous()
        return [q, k, v]

    def _apply_rope(
        self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the QK-norm, if the model has one, and RoPE."""
        if self.q_norm is None or self.k_norm is None:
            return rope(q_BTHD, k_BTKD, cos_BTF, sin_BTF, impl=self.pointwise)
        if self.pointwise == "reference":  # through the modules, so that their hooks run
            return rope(self.q_norm(q_BTHD), self.k_norm(k_BTKD), cos_BTF, sin_BTF)
        return rope(
            q_BTHD,
            k_BTKD,
            cos_BTF,
            sin_BTF,
            q_weight_D=self.q_norm.weight,
            k_weight_D=self.k_norm.weight,
            eps=self.q_norm.eps,
            impl=self.pointwise,
        )


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: FeedForwardShape, hidden_size: int, pointwise: str = "reference") -> None:
        super().__init__()
        self.pointwise = pointwise
        *inputs, down = shape.linears(hidden_size)
        self.gate_up_sizes = inputs[0].parts
        if self.gate_up_sizes:
            self.gate_up_proj = new_linear(inputs[0])
        else:
            self.gate_proj, self.up_proj = map(new_linear, inputs)
        self.down_proj = new_linear(down)

    @property
    def gate_up_layers(self) -> tuple[nn.Module, ...]:
        """The layers that compute gate and up: one fused, or two."""
        return (self.gate_up_proj,) if self.gate_up_sizes else (self.gate_proj, self.up_proj)

    def _project(self, x_BTC: torch.Tensor) -> list[torch.Tensor]:
        """Computes gate and up; views of one output if the projections are fused."""
        if not self.gate_up_sizes:
            return project(x_BTC, self.gate_proj, self.up_proj)
        return list(self.gate_up_proj(x_BTC).split(self.gate_up_sizes, dim=-1))

    def forward(
        self, x_BTC: torch.Tensor, *, overwrite_gate_inputs: bool = False, output_unused: bool = False
    ) -> torch.Tensor:
        """[B, T, C] to [B, T, C].

        Args:
            x_BTC: The normalized residual stream.
            overwrite_gate_inputs: `overwrite_inputs` of `trimtab.kernels.gated_mlp.gated_activation`.
            output_unused: Whether the caller discards the output, because this call only recomputes saved tensors of
                the backward pass. Then a `down_proj` with a method `save_only` (adapters) skips its product.
        """
        with in_projection("gate_up"):
            gate_BTI, up_BTI = self._project(x_BTC)
        gated_BTI = gated_activation(
            gate_BTI, up_BTI, impl=self.pointwise, overwrite_inputs=overwrite_gate_inputs
        )
        down: Callable[[torch.Tensor], torch.Tensor] = self.down_proj
        if output_unused and not self._forward_hooks and not self.down_proj._forward_hooks:
            down = getattr(self.down_proj, "save_only", down)
        with in_projection("down"):
            return down(gated_BTI)


class Block(nn.Module):
    """One layer: norm, attention, norm, feed-forward, with residual connections.

    `recompute` runs the same layers with activation checkpointing (`trimtab.adapt.recompute` sets it). It is called
    inside `forward`, so that compilation and sharding wrap it.
    """

    def __init__(self, shape: BlockShape, hidden_size: int, layer: int, kernels: LayerKernels) -> None:
        super().__init__()
        self.recompute: (
            Callable[[Block, torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor] | None
        )
        self.recompute = None
        self.pointwise = kernels.pointwise
        self.input_layernorm = RMSNorm(hidden_size, shape.norm.eps, kernels.pointwise)
        self.self_attn = Attention(shape, hidden_size, layer, kernels)
        self.post_attention_layernorm = RMSNorm(hidden_size, shape.norm.eps, kernels.pointwise)
        self.mlp = MLP(shape.dense, hidden_size, kernels.pointwise)

    def forward(
        self,
        x_BTC: torch.Tensor,
        cos_BTF: torch.Tensor,
        sin_BTF: torch.Tensor,
        layout: Layout,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Returns the residual stream [B, T, C] after this layer."""
        if self.recompute is None or cache is not None:
            assert self.recompute is None or not torch.is_grad_enabled(), (
                "recomputation would update a cache twice"
            )
            return self.compute(x_BTC, cos_BTF, sin_BTF, layout, cache)
        return self.recompute(self, x_BTC, cos_BTF, sin_BTF, layout)

    def compute(
        self,
        x_BTC: torch.Tensor,
        cos_BTF: torch.Tensor,
        sin_BTF: torch.Tensor,
        layout: Layout,
        cache: Cache | None = None,
        *,
        overwrite_gate_inputs: bool = False,
        output_unused: bool = False,
    ) -> torch.Tensor:
        """Runs the block without recomputation; the last two arguments are those of `MLP.forward`."""
        mlp = functools.partial(
            self.mlp, overwrite_gate_inputs=overwrite_gate_inputs, output_unused=output_unused
        )
        attended_BTC = self.self_attn(self.input_layernorm(x_BTC), cos_BTF, sin_BTF, layout, cache)
        norm = self.post_attention_layernorm
        if self.pointwise == "reference":
            x_BTC = x_BTC + attended_BTC
            return x_BTC + mlp(norm(x_BTC))
        normed_BTC, x_BTC = add_rms_norm(attended_BTC, x_BTC, norm.weight, norm.eps, impl=self.pointwise)
        return x_BTC + mlp(normed_BTC)

    def attend(
        self, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """Runs only the attention half: returns the residual stream after attention."""
        return x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_BTF, sin_BTF, layout, None)

    def feed(self, x: torch.Tensor, *, output_unused: bool = False) -> torch.Tensor:
        """Runs only the feed-forward half on tokens […, C]: returns the residual stream after the feed-forward."""
        return x + self.mlp(self.post_attention_layernorm(x), output_unused=output_unused)
