"""What a decoder costs, from its shape alone: weights, bytes kept for backward, arithmetic. No torch.

Every line of `block_bytes` is a tensor that autograd keeps; a test holds the sums to what it really keeps. What is
kept of a layer that is computed again is `trimtab.adapt.spec_recompute`'s. Legend: N = B · T tokens, C hidden size,
I intermediate size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.facts.blocks import Linear
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec


@dataclass(frozen=True)
class Saved:
    """Bytes that a forward pass keeps for the backward, up to the final norm (the loss has its own spec).

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> saved = saved_bytes(tiny, batch=1, tokens=8, dtype="fp32", attention="sdpa_flash")
        >>> saved.kept == saved.blocks + saved.final + saved.outside
        True
    """

    blocks: int
    """All blocks together, nothing computed again."""
    final: int
    """The final norm, the first to be free again."""
    outside: int
    """Token ids, cosines and sines, the attention mask."""

    @property
    def kept(self) -> int:
        """Between the forward and the backward pass."""
        return self.blocks + self.final + self.outside


@dataclass(frozen=True)
class Learning:
    """What learns in a block, as far as it decides what is kept for the backward pass.

    Example:
        >>> Learning(frozenset({"q_proj"}), norms=False, ranks={"q_proj": 16}).keeps("k_proj", "v_proj")
        False
    """

    linears: frozenset[str]
    """Last names of the linear layers whose weight or adapter learns: they keep their input."""
    norms: bool = True
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of adapters, by the layer they are on: they keep so many numbers a token."""
    scaled: bool = False
    """Whether adapters scale their layer's output (DoRA), which is kept for that."""

    def keeps(self, *names: str) -> bool:
        """Whether one of these layers keeps its input."""
        return not self.linears.isdisjoint(names)

    def own(self, names: tuple[str, ...], shape: ModelShape) -> int:
        """Numbers a token that adapters on these layers keep besides inputs."""
        total = sum(self.ranks.get(name, 0) for name in names)
        if self.scaled:
            total += sum(linear_of(shape, name).out_features for name in names if name in self.ranks)
        return total


ATTENTION_LINEARS, MLP_LINEARS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
)
EVERYTHING = Learning(frozenset((*ATTENTION_LINEARS, *MLP_LINEARS)))


def linear_of(shape: ModelShape, name: str) -> Linear:
    """A block's linear layer, by its last name."""
    return next(one for one in shape.block.linears(shape.hidden_size) if one.short_name == name)


def heads_of(shape: ModelShape) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size) of the attention that all layers have."""
    attention = shape.attention
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


@dataclass(frozen=True)
class BlockBytes:
    """What one plain block keeps for its backward pass."""

    stream: int
    """Its input alone; every stream between halves and blocks is as large."""
    attention_half: int
    """The input, and all that the first half keeps."""
    feed_forward: int
    """All that the second half keeps, the stream that it begins with included."""

    @property
    def total(self) -> int:
        """Of both halves."""
        return self.attention_half + self.feed_forward


def parameter_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all weights in one dtype."""
    return nbytes(dtype, shape.num_parameters)


def saved_bytes(
    shape: ModelShape,
    *,
    batch: int,
    tokens: int,
    dtype: str,
    attention: str,
    weights_dtype: str | None = None,
    packed: bool = True,
    device: str = "cpu",
    pointwise: str = "reference",
    learning: Learning = EVERYTHING,
) -> Saved:
    """Bytes kept for the backward pass of one microbatch.

    Args:
        shape: the model.
        batch: rows.
        tokens: tokens a row.
        dtype: the format computed in.
        attention: the implementation, by name.
        weights_dtype: where it differs from `dtype`: fp32 weights under torch.autocast.
        packed: whether rows hold several documents; some implementations then need a mask.
        device: "cpu", or "cuda", where torch's fused norm keeps less.
        pointwise: the implementation of norms, rotary positions and gates.
        learning: what learns in the blocks.
    """
    N, F = batch * tokens, shape.attention.head_dim // 2
    stream = stream_dtype(dtype, weights_dtype)
    final = _norm(N, shape.hidden_size, 1, stream, device, pointwise, learning.norms)
    outside = N * 8 + 2 * N * F * 4 + _masks(shape, batch, tokens, dtype, attention, packed)
    # All blocks are alike; their windows differ, and no implementation keeps less for a window.
    block = block_bytes(
        shape,
        batch,
        tokens,
        dtype,
        attention,
        weights_dtype=weights_dtype,
        device=device,
        pointwise=pointwise,
    )
    copies = cast_bytes(shape, dtype, weights_dtype)
    return Saved((block.total + copies) * shape.num_layers, final, outside)


def stream_dtype(dtype: str, weights_dtype: str | None) -> str:
    """Format of the residual stream: that of the weights under autocast."""
    autocast = weights_dtype is not None and weights_dtype != dtype
    assert not autocast or weights_dtype == "fp32", "autocast computes in fewer bits than fp32 weights"
    return "fp32" if autocast else dtype


def cast_bytes(shape: ModelShape, dtype: str, weights_dtype: str | None) -> int:
    """Autocast keeps one 16-bit copy of each weight and bias of a block's linears until backward is over."""
    if stream_dtype(dtype, weights_dtype) == dtype:
        return 0
    return nbytes(dtype, _linear_numbers(shape, biases=True))


def _masks(shape: ModelShape, batch: int, tokens: int, dtype: str, attention: str, packed: bool) -> int:
    """One prepared layout for each distinct window, shared by the layers that have it."""
    # The reference adds its mask to fp32 scores.
    mask_dtype = "fp32" if attention == "reference" else dtype
    return sum(
        attention_spec.layout_bytes(attention, batch, tokens, packed=packed, window=window, dtype=mask_dtype)
        for window in shape.windows()
    )


def _norm(N: int, width: int, rows: int, dtype: str, device: str, pointwise: str, learns: bool = True) -> int:
    """What an RMS norm of N · rows vectors keeps besides its output: a fused one its input and 1/rms.

    On the CPU torch composes it of parts: the input and its normalized form, both in fp32, and 1/rms.
    """
    vectors, wide = N * rows, max(BYTES[dtype], 4)
    if device == "cuda" or pointwise == "triton":
        return vectors * (width * BYTES[dtype] + 4)
    return vectors * ((2 if learns else 1) * width * wide + wide)


def block_bytes(
    shape: ModelShape,
    B: int,
    T: int,
    dtype: str,
    attention: str,
    *,
    weights_dtype: str | None = None,
    device: str = "cpu",
    pointwise: str = "reference",
    learning: Learning = EVERYTHING,
) -> BlockBytes:
    """Bytes that one block keeps; arguments as in `saved_bytes`."""
    N, C, I = B * T, shape.hidden_size, shape.intermediate_size  # noqa: E741
    H, K, D = heads_of(shape)
    width = BYTES[dtype]
    stream = stream_dtype(dtype, weights_dtype)
    autocast = stream != dtype
    kernels = (device, pointwise, learning.norms)
    # A norm, and its output, the input of q, k, v or of gate, up; autocast casts it anew for each.
    first = second = _norm(N, C, 1, stream, *kernels)
    if learning.keeps("q_proj", "k_proj", "v_proj"):
        first += N * C * width * (3 if autocast else 1)
    if shape.attention.qk_norm and pointwise == "triton":
        first += N * (H + K) * D * width  # as they were before norm and turn, which are one
    elif shape.attention.qk_norm:
        first += _norm(N, D, H + K, "fp32" if autocast else dtype, *kernels)
    first += attention_spec.saved_bytes(attention, B, T, T, H, K, D, dtype)
    if attention not in attention_spec.TILED and learning.keeps("o_proj"):
        first += N * H * D * width  # the output projection's input; tiled ones keep it themselves
    if learning.keeps("gate_proj", "up_proj"):
        second += N * C * width * (2 if autocast else 1)
    # gate and up; composed of parts also silu(gate); and their product, the last layer's input
    second += N * I * width * ((2 if pointwise == "triton" else 3) + learning.keeps("down_proj"))
    first += N * width * learning.own(ATTENTION_LINEARS, shape)
    second += N * width * learning.own(MLP_LINEARS, shape)
    return BlockBytes(N * C * BYTES[stream], first, second)


def linear_numbers(shape: ModelShape) -> tuple[int, int]:
    """Numbers in the matrices of a block's attention half and of its feed-forward half."""
    block, C = shape.block, shape.hidden_size
    halves = block.mixer.linears(C), block.feed_forward.linears(C)
    first, second = (sum(linear.weights for linear in linears) for linears in halves)
    return first, second


def _linear_numbers(shape: ModelShape, *, biases: bool) -> int:
    """Numbers in the linear layers of a block, with or without their biases."""
    linears = shape.block.linears(shape.hidden_size)
    return sum(linear.elements if biases else linear.weights for linear in linears)


def flops_per_token(shape: ModelShape, tokens: int, *, training: bool = True) -> float:
    """Multiplications and additions a token, head and attention included, nothing computed again.

    Args:
        shape: the model.
        tokens: length of a document; packed rows attend within documents, so give those.
        training: forward and backward (three times the matrix products), or forward alone.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> flops_per_token(tiny, 1, training=False)
        11392.0
    """
    matrices = 2.0 * _linear_numbers(shape, biases=False) * shape.num_layers
    head = 2.0 * shape.vocab_size * shape.hidden_size
    attention = sum(
        attention_flops(shape, layer, tokens, backward=False) for layer in range(shape.num_layers)
    )
    if not training:
        return matrices + attention + head
    backward = sum(attention_flops(shape, layer, tokens, backward=True) for layer in range(shape.num_layers))
    return 3 * (matrices + head) + attention + backward


def product_flops(shape: ModelShape) -> float:
    """Of one block's matrix products, a token, forward."""
    return 2.0 * _linear_numbers(shape, biases=False)


def attention_flops(shape: ModelShape, layer: int, tokens: int, *, backward: bool) -> float:
    """Of one layer's attention, a token of a causal document of so many."""
    H, _, D = heads_of(shape)
    pairs = attention_spec.visible_pairs(tokens, tokens, shape.window(layer))
    return attention_spec.flops(pairs, H, D, backward=backward) / tokens
