"""What a decoder costs, from its shape alone: weights, bytes kept for backward, arithmetic. No torch.

Every line of `_block` is a tensor that autograd keeps; a test holds the sums to what it really keeps. Legend:
N = B · T tokens, C hidden size, I intermediate size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec


@dataclass(frozen=True)
class Saved:
    """Bytes that a forward pass keeps for the backward, up to the final norm (the loss has its own spec).

    Example:
        >>> from trimtab.facts.shapes import ModelShape
        >>> tiny = ModelShape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> plain = saved_bytes(tiny, batch=1, tokens=8, dtype="fp32", attention="sdpa_flash")
        >>> thin = saved_bytes(tiny, batch=1, tokens=8, dtype="fp32", attention="sdpa_flash", recompute=True)
        >>> thin.peak < plain.peak
        True
    """

    blocks: int
    """All blocks together."""
    outside: int
    """Token ids, cosines and sines, the final norm, the attention mask."""
    working: int
    """Of the one block that is being recomputed, beyond what was kept of it; 0 without recomputation."""

    @property
    def kept(self) -> int:
        """Between the forward and the backward pass."""
        return self.blocks + self.outside

    @property
    def peak(self) -> int:
        """The most held at once while going backward."""
        return self.kept + self.working


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
    recompute: bool = False,
    packed: bool = True,
    device: str = "cpu",
) -> Saved:
    """Bytes kept for the backward pass of one microbatch.

    Args:
        shape: the model.
        batch: rows.
        tokens: tokens a row.
        dtype: the format computed in.
        attention: the implementation, by name.
        weights_dtype: where it differs from `dtype`: fp32 weights under torch.autocast.
        recompute: whether blocks keep only their input (`recompute_blocks`).
        packed: whether rows hold several documents; some implementations then need a mask.
        device: "cpu", or "cuda", where torch's fused norm keeps less.
    """
    N, F = batch * tokens, shape.head_dim // 2
    autocast = weights_dtype is not None and weights_dtype != dtype
    assert not autocast or weights_dtype == "fp32", "autocast computes in fewer bits than fp32 weights"
    stream = "fp32" if autocast else dtype
    ids_and_angles = N * 8 + 2 * N * F * 4
    outside = ids_and_angles + _norm(N, shape.hidden_size, 1, stream, device)
    # All blocks are alike; their windows differ, and no implementation keeps less for a window.
    block = _block(shape, batch, tokens, dtype, stream, attention, device)
    blocks = block * shape.num_layers
    if autocast:
        # Autocast keeps one 16-bit copy of every linear's weight and bias until the backward pass is over.
        blocks += nbytes(dtype, _linear_numbers(shape, biases=True) * shape.num_layers)
    inputs = nbytes(stream, N * shape.hidden_size)
    outside += _masks(shape, batch, tokens, dtype, attention, packed)
    if not recompute:
        return Saved(blocks, outside, 0)
    return Saved(inputs * shape.num_layers, outside, max(block - inputs, 0))


def _masks(shape: ModelShape, batch: int, tokens: int, dtype: str, attention: str, packed: bool) -> int:
    """One prepared layout for each distinct window, shared by the layers that have it."""
    windows = {shape.window(layer) for layer in range(shape.num_layers)}
    # The reference adds its mask to fp32 scores.
    mask_dtype = "fp32" if attention == "reference" else dtype
    return sum(
        attention_spec.layout_bytes(attention, batch, tokens, packed=packed, window=window, dtype=mask_dtype)
        for window in windows
    )


def _norm(N: int, width: int, rows: int, dtype: str, device: str) -> int:
    """What an RMS norm of N · rows vectors keeps besides its output: a fused one its input and 1/rms.

    On the CPU torch composes it of parts: the input and its normalized form, both in fp32, and 1/rms.
    """
    vectors, wide = N * rows, max(BYTES[dtype], 4)
    if device == "cuda":
        return vectors * (width * BYTES[dtype] + 4)
    return vectors * (2 * width * wide + wide)


def _block(shape: ModelShape, B: int, T: int, dtype: str, stream: str, attention: str, device: str) -> int:
    """Bytes one block keeps: `stream` is the residual stream's format, `dtype` the matrix products'."""
    N, C, I = B * T, shape.hidden_size, shape.intermediate_size  # noqa: E741
    H, K, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    width = BYTES[dtype]
    autocast = stream != dtype
    total = 2 * _norm(N, C, 1, stream, device)
    # The norms' outputs, inputs of q, k, v and of gate, up; autocast casts them anew for each.
    total += N * C * width * ((3 + 2) if autocast else 2)
    if shape.qk_norm:
        total += _norm(N, D, H, "fp32" if autocast else dtype, device)
        total += _norm(N, D, K, "fp32" if autocast else dtype, device)
    total += attention_spec.saved_bytes(attention, B, T, T, H, K, D, dtype)
    if attention not in attention_spec.TILED:
        total += N * H * D * width  # the output projection's input; tiled ones keep it themselves
    # gate, silu(gate), up and their product
    return total + 4 * N * I * width


def _linear_numbers(shape: ModelShape, *, biases: bool) -> int:
    """Numbers in the linear layers of a block, with or without their biases."""
    C, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    width = shape.intermediate_size
    total = C * (q + kv + kv) + q * C + 3 * C * width
    if biases:
        total += (q + kv + kv) * shape.qkv_bias + C * shape.o_bias + (2 * width + C) * shape.mlp_bias
    return total


def flops_per_token(
    shape: ModelShape, tokens: int, *, training: bool = True, recompute: bool = False
) -> float:
    """Multiplications and additions a token, head and attention included.

    Args:
        shape: the model.
        tokens: length of a document; packed rows attend within documents, so give those.
        training: forward and backward (three times the matrix products), or forward alone.
        recompute: whether the blocks' forward pass runs twice.

    Example:
        >>> from trimtab.facts.shapes import ModelShape
        >>> tiny = ModelShape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> flops_per_token(tiny, 1, training=False)
        11392.0
    """
    matrices = 2.0 * _linear_numbers(shape, biases=False) * shape.num_layers
    head = 2.0 * shape.vocab_size * shape.hidden_size
    attention = [_attention_flops(shape, layer, tokens, backward=False) for layer in range(shape.num_layers)]
    forward = matrices + sum(attention)
    if not training:
        return forward + head
    backward = [_attention_flops(shape, layer, tokens, backward=True) for layer in range(shape.num_layers)]
    return 3 * (matrices + head) + sum(attention) + sum(backward) + (forward if recompute else 0)


def _attention_flops(shape: ModelShape, layer: int, tokens: int, *, backward: bool) -> float:
    pairs = attention_spec.visible_pairs(tokens, tokens, shape.window(layer))
    return attention_spec.flops(pairs, shape.num_heads, shape.head_dim, backward=backward) / tokens
