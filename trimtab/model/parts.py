"""The decoder's parts: norm, attention, feed-forward and the block they make.

Parameter names are Hugging Face's. Legend: B batch, T new tokens, S tokens seen (cache included), C hidden
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
    """What the decoder asks of a key/value cache; `trimtab.generate` has one."""

    @property
    def length(self) -> int:
        """Tokens held, before the ones now being computed."""

    def update(
        self, layer: int, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new tokens' keys and values; (k_BSKD, v_BSKD) of those that they see."""


def projected(x: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """What each layer makes of the same x.

    Layers that know how to share that work have a method `together` (adapters do); while somebody watches one of them
    through a hook each runs by itself.
    """
    together = getattr(layers[0], "together", None)
    if together is None or any(layer._forward_hooks for layer in layers):
        return [layer(x) for layer in layers]
    return together(x, layers)


@dataclass(frozen=True)
class LayerKernels:
    """The implementations that one layer runs with, chosen once, by the caller."""

    attention: str
    """In `trimtab.kernels.attention`, for sequences of several documents and for generating."""
    unpacked_attention: str
    """For sequences that are one document each."""
    pointwise: str = "reference"
    """Of norms, RoPE and gates (`rms_norm`, `rope` and `gated_mlp` in `trimtab.kernels`): "reference" or "triton"."""


def new_linear(linear: Linear) -> nn.Linear:
    """A linear layer of a block."""
    return nn.Linear(linear.in_features, linear.out_features, bias=linear.bias)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, computed in fp32 or wider and rounded once."""

    def __init__(self, width: int, eps: float, impl: str = "reference") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.impl = eps, impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, D] to […, D], in x's format."""
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
        """[B, T, C] to [B, T, C]; angles of the positions as cos and sin, [B, T, D / 2] each. With a cache, keys and
        values of earlier tokens take part as well."""
        B, T, _ = x_BTC.shape
        with in_projection("attention"):
            q_BTHD, k_BTKD, v_BTKD = (y.view(B, T, -1, self.head_dim) for y in self._projected(x_BTC))
        q_BTHD, k_BSKD = self._placed(q_BTHD, k_BTKD, cos_BTF, sin_BTF)
        v_BSKD = v_BTKD
        if cache is not None:
            k_BSKD, v_BSKD = cache.update(self.layer, k_BSKD, v_BSKD)
            layout = layout.last(k_BSKD.shape[1])
        impl = self.packed_impl if layout.is_packed or cache is not None else self.unpacked_impl
        o_BTHD = attention(q_BTHD, k_BSKD, v_BSKD, layout=layout, window=self.window, impl=impl)
        with in_projection("attention"):
            return self.o_proj(o_BTHD.reshape(B, T, -1))

    def _projected(self, x_BTC: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, all heads of a token in one axis."""
        if not self.qkv_sizes:
            return projected(x_BTC, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = self.qkv_proj(x_BTC).split(self.qkv_sizes, dim=-1)
        if self.q_norm is None and torch.is_grad_enabled():
            # Attention saves v for the backward pass; a view would keep q and k as well, which RoPE copies.
            v = v.contiguous()
        return [q, k, v]

    def _placed(
        self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys normed, where the model does so, and turned to their positions."""
        if self.q_norm is None or self.k_norm is None:
            return rope(q_BTHD, k_BTKD, cos_BTF, sin_BTF, impl=self.pointwise)
        if self.pointwise == "reference":  # through the modules, so that those who watch them see it
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
        """The layers that make gate and up: one or two."""
        return (self.gate_up_proj,) if self.gate_up_sizes else (self.gate_proj, self.up_proj)

    def _projected(self, x_BTC: torch.Tensor) -> list[torch.Tensor]:
        """Gate and up; views of one product where they are stacked in one matrix."""
        if not self.gate_up_sizes:
            return projected(x_BTC, self.gate_proj, self.up_proj)
        return list(self.gate_up_proj(x_BTC).split(self.gate_up_sizes, dim=-1))

    def forward(
        self, x_BTC: torch.Tensor, *, overwrite_gate_inputs: bool = False, output_unused: bool = False
    ) -> torch.Tensor:
        """[B, T, C] to [B, T, C].

        Args:
            x_BTC: The normalized stream.
            overwrite_gate_inputs: `overwrite_inputs` of `trimtab.kernels.gated_mlp.gated_activation`.
            output_unused: Whether the caller discards the output, because this call only recomputes what the backward
                pass reads. Then a `down_proj` that has a method `save_only` (adapters do) skips its product.
        """
        with in_projection("gate_up"):
            gate_BTI, up_BTI = self._projected(x_BTC)
        gated_BTI = gated_activation(
            gate_BTI, up_BTI, impl=self.pointwise, overwrite_inputs=overwrite_gate_inputs
        )
        down: Callable[[torch.Tensor], torch.Tensor] = self.down_proj
        if output_unused and not self._forward_hooks and not self.down_proj._forward_hooks:
            down = getattr(self.down_proj, "save_only", down)
        with in_projection("down"):
            return down(gated_BTI)


class Block(nn.Module):
    """One layer: norm, attention, norm, feed-forward, each added to the stream.

    `recompute` is another way to run the same layers (`trimtab.adapt.recompute` sets it): one that keeps less for the
    backward pass. It is called inside `forward`, so that compiling and sharding go around it.
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
        """The stream [B, T, C] with what this layer adds to it."""
        if self.recompute is None or cache is not None:
            assert self.recompute is None or not torch.is_grad_enabled(), (
                "recomputing would fill a cache twice"
            )
            return self.layers(x_BTC, cos_BTF, sin_BTF, layout, cache)
        return self.recompute(self, x_BTC, cos_BTF, sin_BTF, layout)

    def layers(
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
        """The block itself, without recomputation; the last two arguments are `MLP.forward`'s."""
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
        """The first half alone: the stream with attention added."""
        return x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_BTF, sin_BTF, layout, None)

    def feed(self, x: torch.Tensor, *, output_unused: bool = False) -> torch.Tensor:
        """The second half alone, for any tokens […, C]: the stream with the feed-forward added."""
        return x + self.mlp(self.post_attention_layernorm(x), output_unused=output_unused)
