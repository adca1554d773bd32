"""What each recompute policy keeps of a layer, brings back, sends to the host and computes again. No torch.

The sums stand on `trimtab.model.spec`'s list of what a plain block keeps; tests hold them to what a run really keeps.
"""

# N = B · T tokens, C hidden size, I intermediate size, H query heads, K key/value heads, D head size

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.facts.dtypes import BYTES
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec
from trimtab.model import spec as model_spec

POLICIES = ("none", "pointwise", "selective", "block", "offload_half", "offload_attention", "offload")
"""From the one that keeps most on the device to the one that keeps least."""
HOST = ("offload_half", "offload_attention", "offload")
"""Those that send what they keep to the host."""
ALL_PRODUCTS = ("selective", "block", "offload_attention", "offload")
"""Those that compute the products of a layer again."""

ATTENTION_OPERATORS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "sdpa_math": (),
    "sdpa_flash": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "sdpa_efficient": ("aten::_scaled_dot_product_efficient_attention",),
    "sdpa_cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "varlen": ("torch_attn::_varlen_attn",),
    "flex": ("flex_attention",),
    "triton": ("trimtab::attention_forward",),
}
"""For each attention backend (`trimtab.kernels.attention.IMPLS`) the operators whose results the policies of
`SAVED_PRODUCTS` save. Backends made of plain products have none and are recomputed whole. By name, so that an operator
that the installed torch does not have is no error."""

SAVED_PRODUCTS: dict[str, frozenset[tuple[str, str]]] = {
    "pointwise": frozenset(
        (projection, factor) for projection in ("attention", "gate_up") for factor in ("weight", "adapter_a")
    ),
    "selective": frozenset(),
    "offload_half": frozenset({("attention", "weight")}),
    "offload_attention": frozenset(),
}
"""The policies that save results of single operators: attention's, and those of the matrix products with these labels
(`trimtab.model.labels`). `pointwise` leaves out the down projection, whose result the backward pass does not read, and
an adapter's second product, which is cheap to recompute."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer under a policy.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> of = {policy: layer_bytes(tiny, policy, batch=1, tokens=8, dtype="fp32", attention="sdpa_flash")
        ...       for policy in POLICIES}
        >>> of["none"].kept > of["pointwise"].kept > of["selective"].kept > of["block"].kept
        True
        >>> of["block"].kept == 8 * 16 * 4
        True
    """

    kept: int
    """On the device, from the forward pass to the layer's backward."""
    working: int
    """More than that, while the layer is in its backward pass and what was dropped is there again."""
    host: int = 0
    """Pinned memory of the host."""
    resident: int = 0
    """Of the last layer that was sent there: what is still on the device at the end of the forward pass."""
    tile: int = 0
    """What one tile of a tiled feed-forward keeps while it is differentiated; not in `working`."""


def canonical(policies: Iterable[str] | Mapping[str, int]) -> tuple[str, ...]:
    """The same number of each policy, in the order that holds least at once: thrifty layers first.

    The backward pass begins at the last layer. Layers that keep everything are done with, and their memory free,
    before the first one is computed again and needs a place for that.

    Example:
        >>> canonical(["none", "block", "none"])
        ('block', 'none', 'none')
        >>> canonical({"selective": 1, "offload": 2})
        ('offload', 'offload', 'selective')
    """
    counts = dict(policies) if isinstance(policies, Mapping) else {}
    if not isinstance(policies, Mapping):
        for policy in policies:
            counts[policy] = counts.get(policy, 0) + 1
    return tuple(policy for policy in reversed(POLICIES) for _ in range(counts.get(policy, 0)))


def counted(policies: Sequence[str]) -> dict[str, int]:
    """How many layers have which policy, thriftiest first.

    Example:
        >>> counted(("block", "none", "none"))
        {'block': 1, 'none': 2}
    """
    return {policy: policies.count(policy) for policy in reversed(POLICIES) if policy in policies}


def tile_rows(tokens: int, tiles: int) -> int:
    """Tokens of a tile: a power of two, and at most so many tiles.

    Example:
        >>> tile_rows(100_000, 8), tile_rows(4096, 4), tile_rows(3, 8)
        (16384, 1024, 1)
    """
    return 1 << (max(-(-tokens // tiles), 1) - 1).bit_length()


def layer_bytes(
    shape: ModelShape,
    policy: str,
    *,
    batch: int,
    tokens: int,
    dtype: str,
    attention: str,
    weights_dtype: str | None = None,
    device: str = "cpu",
    pointwise: str = "reference",
    mlp_tiles: int = 1,
    learning: model_spec.Learning = model_spec.EVERYTHING,
) -> LayerBytes:
    """Bytes of one layer, for one microbatch; arguments as in `trimtab.model.spec.saved_bytes`.

    Args:
        policy: one of `POLICIES`. On a CPU `offload` keeps the input where it is, as `block` does, and the other
            two that send what they keep do so as well.
        mlp_tiles: parts of the tokens that the feed-forward half is computed in.
        learning: what learns in the layer.
    """
    options: dict[str, Any] = {
        "weights_dtype": weights_dtype,
        "device": device,
        "pointwise": pointwise,
        "learning": learning,
    }
    block = model_spec.block_bytes(shape, batch, tokens, dtype, attention, **options)
    (H, K, D), N = model_spec.heads_of(shape), batch * tokens
    tile = 0
    plain = block.total
    if mlp_tiles > 1:
        rows = tile_rows(N, mlp_tiles)
        tile = model_spec.block_bytes(shape, 1, rows, dtype, attention, **options).feed_forward
        plain = block.attention_half + block.stream  # and the stream between the halves
    if policy == "none":
        return LayerBytes(plain, 0, tile=tile)
    attended = 0
    if attention in attention_spec.TILED:
        attended = N * H * D * BYTES[dtype] + N * H * 4
    projected = N * (H + 2 * K) * D * BYTES[dtype] + N * shape.hidden_size * BYTES[dtype]
    if policy == "pointwise":
        kept = block.stream + attended + projected
        kept += block.stream if mlp_tiles > 1 else 2 * N * shape.intermediate_size * BYTES[dtype]
        # Adapters' first products sum over the stream's width as well; the last layer's is computed again.
        adapted = model_spec.ATTENTION_LINEARS + (() if mlp_tiles > 1 else ("gate_proj", "up_proj"))
        kept += N * sum(learning.ranks.get(name, 0) for name in adapted) * BYTES[dtype]
    elif policy == "selective":
        kept = block.stream + attended + (block.stream if mlp_tiles > 1 else 0)
    else:
        sent = {"offload_half": attended + projected, "offload_attention": attended}
        kept = block.stream + sent.get(policy, 0)
        if policy in HOST and device != "cpu":
            # On the way back a layer ahead of where it is needed; `plain` counts what is in use.
            return LayerBytes(0, plain + kept, host=kept, resident=kept, tile=tile)
    return LayerBytes(kept, max(plain - kept, 0), tile=tile)


@dataclass(frozen=True)
class Again:
    """What a policy computes a second time, a token and layer."""

    products: float
    """FLOPs of matrix products."""
    attention: float
    """FLOPs of attention."""
    moved: float
    """Bytes that norms, rotary positions and gates read and write again."""


def again(
    shape: ModelShape, policy: str, tokens: int, *, layer: int = 0, dtype: str = "bf16", mlp_tiles: int = 1
) -> Again:
    """What the policy costs beyond a plain forward and backward pass.

    Recomputing stops at the last number that the backward pass needs: the last product of a block, whose result is
    only added to the stream, is left out. A tile of a tiled feed-forward is computed to its end.

    Args:
        shape: the model.
        policy: one of `POLICIES`; `offload` computes what `block` does, `offload_attention` what `selective` does, and
            with tiles the stream between the halves as well; `offload_half` the feed-forward half.
        tokens: length of a document.
        layer: which one; attention differs where some have windows.
        dtype: the format computed in.
        mlp_tiles: parts of the tokens that the feed-forward half is computed in.
    """
    C, width = shape.hidden_size, shape.intermediate_size
    q, kv = shape.attention.q_size, shape.attention.kv_size
    project, out = 2.0 * C * (q + 2 * kv), 2.0 * q * C
    feed = 2.0 * 2 * C * width
    bytes_ = BYTES[dtype]
    # A norm, rotary positions and an addition read and write their numbers once each; a gate reads two, writes one.
    moved_first, moved_second = (2 * C + 2 * (q + kv)) * bytes_, (5 * C + 3 * width) * bytes_
    products = attention = moved = 0.0
    if policy != "none":
        moved = float(moved_first + moved_second)
    if policy in ALL_PRODUCTS:
        products = project + out + feed
    elif policy == "offload_half":
        products = feed
    if policy in ("block", "offload"):
        attention = model_spec.attention_flops(shape, layer, tokens, backward=False)
    if mlp_tiles > 1:
        # The stream between the halves is kept, unless only the layer's input is.
        attend = 0.0
        if policy in ALL_PRODUCTS:
            attend = project + (0.0 if policy == "selective" else out)
        products = attend + feed + 2.0 * C * width
        moved = float((moved_first if moved else 0) + moved_second)
    return Again(products, attention, moved)
