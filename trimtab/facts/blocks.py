"""The shape of one block of a decoder: norms, token mixer and feed-forward, as plain data. No torch.

Layers may differ in every field. Equal blocks compare equal, so that the costs of consecutive equal layers are computed
once and multiplied. Names of parameters are Hugging Face's, without the prefix of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
Split = Literal["column", "row", "vocabulary", "sequence", "replicated"]
"""How tensor parallelism shards a weight [out, in]: by outputs (column), by inputs (row), by vocabulary, or not at all
(replicated). Operations without a weight are sharded by heads or features (column), or by tokens (sequence)."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix [out_features, in_features] of a block.

    Example:
        >>> Linear("mlp.up_proj", 16, 32, "column").short_name
        'up_proj'
    """

    name: str
    in_features: int
    out_features: int
    split: Split
    bias: bool = False
    parts: tuple[int, ...] = ()
    """Rows of each projection if several are fused into this matrix; sharding by columns shards each of them."""
    count: int = 1
    """Number of matrices stacked in one tensor [count, out_features, in_features], as for experts."""
    routes: bool = False
    """Whether it is a router of experts; routers get no adapter and are not quantized."""

    @property
    def short_name(self) -> str:
        """The last part of the name, as used in `lora.target_modules`."""
        return self.name.rpartition(".")[2]

    @property
    def weights(self) -> int:
        """Elements of all matrices, without biases."""
        return self.count * self.matrix

    @property
    def matrix(self) -> int:
        """Elements of one matrix."""
        return self.in_features * self.out_features

    @property
    def elements(self) -> int:
        """Elements of all matrices and biases."""
        return self.count * (self.matrix + (self.out_features if self.bias else 0))

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of weight and bias."""
        stacked = (self.count,) if self.count > 1 else ()
        yield f"{self.name}.weight", (*stacked, self.out_features, self.in_features)
        if self.bias:
            yield f"{self.name}.bias", (*stacked, self.out_features)


def _stacked(name: str, linears: tuple[Linear, ...]) -> Linear:
    """Fuses projections of the same input into one matrix, their rows in this order."""
    first, parts = linears[0], tuple(linear.out_features for linear in linears)
    return Linear(name, first.in_features, sum(parts), first.split, first.bias, parts, first.count)


@dataclass(frozen=True)
class Norm:
    """An RMS norm."""

    eps: float = 1e-6
    unit_offset: bool = False
    """Whether the factor is 1 + weight (Gemma)."""


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling for contexts longer than the pretraining length; fields as in Hugging Face's `rope_scaling`."""

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
class Rope:
    """Rotary position embeddings of a layer."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Number of leading head dimensions that are rotated; None for all."""
    interleaved: bool = False
    """Whether neighbouring dimensions (0, 1), (2, 3) … form pairs instead of (0, D/2), (1, D/2 + 1) …"""


@dataclass(frozen=True)
class AttentionShape:
    """Softmax attention with grouped query heads (GQA).

    Example:
        >>> [linear.out_features for linear in AttentionShape(4, 2, 8).linears(hidden_size=16)]
        [32, 16, 16, 16]
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = Rope()
    """None for a layer without position embeddings."""
    window: int | None = None
    """Sliding window: the number of tokens that a query attends to, itself included; None for full causal attention."""
    qk_norm: Literal["head", "full"] | None = None
    """RMS norms of queries and keys: over each head, or over all heads together."""
    qkv_bias: bool = False
    o_bias: bool = False
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    scale: float | None = None
    """Scale of the scores; 1 / √head_dim if None."""
    sinks: bool = False
    """Attention sinks: whether each head has one more, learned logit in its softmax, with a value vector of zeros."""
    fused_qkv: bool = False
    """Whether q, k and v are stacked in one matrix, `qkv_proj`, in this order (Phi-3)."""

    @property
    def q_size(self) -> int:
        """Width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Head size of values and of the output: the same as that of queries and keys."""
        return self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        return self.q_size, self.kv_size, self.kv_size

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Returns its matrices in the order of the forward pass."""
        q, kv, bias = self.q_size, self.kv_size, self.qkv_bias
        inputs: tuple[Linear, ...] = (
            Linear("self_attn.q_proj", hidden_size, q, "column", bias),
            Linear("self_attn.k_proj", hidden_size, kv, "column", bias),
            Linear("self_attn.v_proj", hidden_size, kv, "column", bias),
        )
        if self.fused_qkv:
            inputs = (_stacked("self_attn.qkv_proj", inputs),)
        return (*inputs, Linear("self_attn.o_proj", q, hidden_size, "row", self.o_bias))

    def parameters(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of its parameters, in the order of the forward pass."""
        *inputs, output = self.linears(hidden_size)
        for linear in inputs:
            yield from linear.parameters()
        if self.qk_norm is not None:
            full = self.qk_norm == "full"
            yield "self_attn.q_norm.weight", (self.q_size if full else self.head_dim,)
            yield "self_attn.k_norm.weight", (self.kv_size if full else self.head_dim,)
        if self.sinks:
            yield "self_attn.sinks", (self.num_heads,)
        yield from output.parameters()


@dataclass(frozen=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek). It can be planned, but not built."""

    num_heads: int
    kv_rank: int
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int
    q_rank: int | None = None
    """Rank of the queries' latent; None if queries are projected directly."""
    rope: Rope | None = Rope()
    window: int | None = None

    @property
    def head_dim(self) -> int:
        """Head size of queries and keys: the part without RoPE and the rotated part."""
        return self.nope_head_dim + self.rope_head_dim

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Returns its matrices in the order of the forward pass."""
        H, q = self.num_heads, self.num_heads * self.head_dim
        queries: tuple[Linear, ...] = (Linear("self_attn.q_proj", hidden_size, q, "column"),)
        if self.q_rank is not None:
            queries = (
                Linear("self_attn.q_a_proj", hidden_size, self.q_rank, "replicated"),
                Linear("self_attn.q_b_proj", self.q_rank, q, "column"),
            )
        values = H * self.value_head_dim
        return (
            *queries,
            Linear(
                "self_attn.kv_a_proj_with_mqa", hidden_size, self.kv_rank + self.rope_head_dim, "replicated"
            ),
            Linear("self_attn.kv_b_proj", self.kv_rank, H * self.nope_head_dim + values, "column"),
            Linear("self_attn.o_proj", values, hidden_size, "row"),
        )

    def parameters(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of its parameters, in the order of the forward pass."""
        for linear in self.linears(hidden_size):
            yield from linear.parameters()
            if linear.short_name == "q_a_proj":
                yield "self_attn.q_a_layernorm.weight", (linear.out_features,)
            elif linear.short_name == "kv_a_proj_with_mqa":
                yield "self_attn.kv_a_layernorm.weight", (self.kv_rank,)


@dataclass(frozen=True)
class FeedForwardShape:
    """A gated feed-forward layer: down(activation(gate(x)) · up(x)).

    Example:
        >>> sum(linear.elements for linear in FeedForwardShape(32).linears(hidden_size=16))
        1536
    """

    width: int
    activation: str = "silu"
    bias: bool = False
    fused_gate_up: bool = False
    """Whether gate and up are stacked in one matrix, `gate_up_proj`, in this order (Phi-3)."""

    def linears(self, hidden_size: int, prefix: str = "mlp", count: int = 1) -> tuple[Linear, ...]:
        """Returns its matrices in the order of the forward pass; `count` stacks the matrices of that many experts."""
        inputs: tuple[Linear, ...] = (
            Linear(f"{prefix}.gate_proj", hidden_size, self.width, "column", self.bias, count=count),
            Linear(f"{prefix}.up_proj", hidden_size, self.width, "column", self.bias, count=count),
        )
        if self.fused_gate_up:
            inputs = (_stacked(f"{prefix}.gate_up_proj", inputs),)
        down = Linear(f"{prefix}.down_proj", self.width, hidden_size, "row", self.bias, count=count)
        return (*inputs, down)

    def parameters(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of its parameters, in the order of the forward pass."""
        for linear in self.linears(hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture of experts: a router selects `active` of `count` feed-forward layers. It can be planned, but not built.

    Example:
        >>> [linear.name for linear in ExpertsShape(8, 2, 32).linears(hidden_size=16)]
        ['mlp.gate', 'mlp.experts.gate_proj', 'mlp.experts.up_proj', 'mlp.experts.down_proj']
    """

    count: int
    active: int
    width: int
    """Intermediate size of one expert."""
    shared: int = 0
    """Number of shared experts, which process every token; they run as one layer."""
    activation: str = "silu"
    shared_width: int | None = None
    """Intermediate size of the shared experts together; `shared` times `width` if None."""
    shared_gate: bool = False
    """Whether the shared experts' output is scaled by the sigmoid of a learned gate (Qwen2-MoE)."""
    bias: bool = False
    """Whether the experts' matrices have biases (gpt-oss)."""
    router_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to expert weights. A bias that only affects the selection of experts (DeepSeek-V3)
    is not trained, and is not counted."""
    fused_gate_up: bool = False
    """Whether gate and up are fused into one matrix, `gate_up_proj` (gpt-oss)."""

    @property
    def expert(self) -> FeedForwardShape:
        """One routed expert."""
        return FeedForwardShape(self.width, self.activation, self.bias, self.fused_gate_up)

    @property
    def shared_expert(self) -> FeedForwardShape | None:
        """The shared experts as one layer; None if there are none."""
        if not self.shared:
            return None
        return FeedForwardShape(self.shared_width or self.width * self.shared, self.activation)

    def router(self, hidden_size: int) -> Linear:
        """The matrix of the router."""
        return Linear("mlp.gate", hidden_size, self.count, "replicated", self.router_bias, routes=True)

    def shared_router(self, hidden_size: int) -> Linear:
        """The gate of the shared experts' output; used if `shared_gate`."""
        return Linear("mlp.shared_expert_gate", hidden_size, 1, "replicated", routes=True)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Returns the router, the experts' stacked matrices, and the shared experts as a single layer."""
        found = [
            self.router(hidden_size),
            *self.expert.linears(hidden_size, "mlp.experts", self.count),
        ]
        if self.shared_expert is not None:
            found += self.shared_expert.linears(hidden_size, "mlp.shared_experts")
            if self.shared_gate:
                found.append(self.shared_router(hidden_size))
        return tuple(found)

    def parameters(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, dimensions) of its parameters, in the order of the forward pass."""
        for linear in self.linears(hidden_size):
            yield from linear.parameters()


@dataclass(frozen=True)
class BlockShape:
    """One layer: norms, a token mixer and a feed-forward layer, each added to the residual stream."""

    mixer: AttentionShape | LatentAttentionShape
    feed_forward: FeedForwardShape | ExpertsShape
    norm: Norm = Norm()
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norm before a sublayer (Llama), after it and before the residual addition (OLMo 2), or both (Gemma 2)."""

    @property
    def attention(self) -> AttentionShape:
        """The mixer of a block with softmax attention."""
        assert isinstance(self.mixer, AttentionShape), "the block's mixer is not softmax attention"
        return self.mixer

    @property
    def dense(self) -> FeedForwardShape:
        """The feed-forward layer of a block without experts."""
        assert isinstance(self.feed_forward, FeedForwardShape), "the block has experts"
        return self.feed_forward

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Returns its matrices in the order of the forward pass."""
        return (*self.mixer.linears(hidden_size), *self.feed_forward.linears(hidden_size))

    def parameters(self, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name without the layer's prefix, dimensions) of its parameters, in the order of the forward pass."""
        placement, width = self.norm_placement, (hidden_size,)
        if placement != "post":
            yield "input_layernorm.weight", width
        yield from self.mixer.parameters(hidden_size)
        yield "post_attention_layernorm.weight", width
        if placement == "both":
            yield "pre_feedforward_layernorm.weight", width
        yield from self.feed_forward.parameters(hidden_size)
        if placement != "pre":
            yield "post_feedforward_layernorm.weight", width

    def active_parameters(self, hidden_size: int) -> int:
        """Elements of the parameters that one token uses: of the routed experts, only the active ones."""
        unused = 0
        if isinstance(self.feed_forward, ExpertsShape):
            expert = sum(linear.elements for linear in self.feed_forward.expert.linears(hidden_size))
            unused = (self.feed_forward.count - self.feed_forward.active) * expert
        return count_elements(self.parameters(hidden_size)) - unused

    def active_weights(self, hidden_size: int) -> int:
        """Elements of the matrices that one token uses."""
        active = self.feed_forward.active if isinstance(self.feed_forward, ExpertsShape) else 1
        return sum(
            linear.matrix * (active if linear.count > 1 else 1) for linear in self.linears(hidden_size)
        )


def count_elements(parameters: Iterator[tuple[str, tuple[int, ...]]]) -> int:
    """Returns the total number of elements of a list of (name, dimensions).

    Example:
        >>> count_elements(iter([("a", (2, 3)), ("b", (4,))]))
        10
    """
    total = 0
    for _, dims in parameters:
        count = 1
        for dim in dims:
            count *= dim
        total += count
    return total
