"""Saved activations of attention by sequence length: full matrices, or a tiled kernel's O and L.

Such figures are often quoted for a single head. A model saves them for every head of every layer, so both are
listed, with labels; the planner uses only those of the whole model.
"""

# B batch, T tokens, H query heads, D head size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.dtypes import BYTES
from trimtab.facts.shapes import ModelShape

LENGTHS = (512, 1024, 2048, 4096, 8192)

LABELS = {
    "plain": "scores and weights, all heads",
    "flash": "O and L, all heads",
    "plain_one_head": "scores and weights, counted for one head (as often quoted)",
    "flash_one_head": "two [tokens, head size] matrices, counted for one head (as often quoted)",
}


@dataclass(frozen=True)
class AttentionRow:
    """Bytes over all layers and sequences at one length; `LABELS` describes each figure."""

    tokens: int
    plain: int
    flash: int
    plain_one_head: int
    flash_one_head: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def attention_table(
    shape: ModelShape, batch: int, lengths: Sequence[int] = LENGTHS, dtype: str = "bf16"
) -> list[AttentionRow]:
    """Returns one row per length. Queries, keys and values are saved in both cases and left out.

    Attention without tiling saves scores and weights, two [T, T] matrices per head. A tiled kernel saves its
    output O, [T, D] per head, and one fp32 log-sum-exp L per query and head.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> shape = uniform_shape("qwen3", 151936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128)
        >>> row, = attention_table(shape, batch=4, lengths=[1024])
        >>> round(row.plain_one_head / 1e6), round(row.plain / 1e9, 1), round(row.flash / 1e6)
        (470, 7.5, 477)
    """
    width = BYTES[dtype]
    heads = sum(block.mixer.num_heads for block in shape.blocks)
    dims = sum(block.mixer.value_head_dim for block in shape.blocks)
    outputs = sum(block.mixer.num_heads * block.mixer.value_head_dim for block in shape.blocks)
    return [
        AttentionRow(
            tokens=T,
            plain=batch * heads * 2 * T * T * width,
            flash=batch * T * (outputs * width + heads * 4),
            plain_one_head=batch * shape.num_layers * 2 * T * T * width,
            flash_one_head=batch * dims * 2 * T * width,
        )
        for T in lengths
    ]
