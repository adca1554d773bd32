"""The layout of a quantized weight [N, K] in packed tensors: their names and shapes, and slices of its rows.

If blocks do not span rows (INT8; NF4 if the block size divides K), codes and scales have one row per row of the weight,
so that rows can be sliced and sharded along dim 0. Otherwise they are flat. Scales are always stored as bytes, fp32
scales as four uint8 each, so that neither a cast of the model nor FSDP2's mixed precision rounds them.
"""

# N output features, K input features

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from trimtab.facts.errors import RecipeError
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.kernels.nf4 import spec as nf4_spec

NAMES = ("codes", "scales", "quant_map", "nested_absmax", "nested_quant_map", "offset")
"""The packed tensors, in the operators' order. NF4 without double quantization has the first three, INT8 two."""

ROW_NAMES = NAMES[:2]
"""Tensors that are sliced by rows; the others are small tables that every slice shares."""

PLAIN = "plain"
"""Kind of an unquantized weight, whose only packed tensor is the plain [N, K]."""


@dataclass(frozen=True)
class PackedLayout:
    """The packed layout of a weight [N, K], and the implementation that reads it.

    Example:
        >>> layout = PackedLayout("nf4", 128, 64, block=64, nested_block=256, impl="reference")
        >>> layout.text
        'nf4 128 64 64 256 reference 0'
        >>> PackedLayout.from_text(layout.text) == layout
        True
    """

    kind: str
    """nf4, int8 (one scale per row) or plain."""
    out_features: int
    in_features: int
    block: int
    nested_block: int
    """Scales per block of double quantization; 0 without it."""
    impl: str
    """reference or triton; torch for a plain weight."""
    first_block: int = 0
    """For a slice with nested scales: the index of its first block in the full weight."""

    @staticmethod
    def plain(out_features: int, in_features: int) -> PackedLayout:
        """The layout of an unquantized weight."""
        return PackedLayout(PLAIN, out_features, in_features, 0, 0, "torch")

    @property
    def text(self) -> str:
        """The fields as one string, since custom operators accept strings but not objects."""
        fields = (
            self.kind,
            self.out_features,
            self.in_features,
            self.block,
            self.nested_block,
            self.impl,
            self.first_block,
        )
        return " ".join(map(str, fields))

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_text(text: str) -> PackedLayout:
        """The inverse of `text`."""
        kind, out_features, in_features, block, nested_block, impl, first_block = text.split()
        sizes = (int(out_features), int(in_features), int(block), int(nested_block))
        return PackedLayout(kind, *sizes, impl, int(first_block))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.out_features, self.in_features

    @property
    def by_rows(self) -> bool:
        """Whether blocks do not span rows, so that each row has its own codes and scales."""
        return self.kind != "nf4" or self.in_features % self.block == 0

    def rows(self, start: int, stop: int) -> PackedLayout:
        """The layout of rows `start` to `stop`.

        Example:
            >>> PackedLayout("nf4", 8, 128, 64, 256, "reference").rows(3, 8).text
            'nf4 5 128 64 256 reference 6'
        """
        assert 0 <= start <= stop <= self.out_features, (start, stop, self.out_features)
        check_rows(self, "the layer")
        skipped = start * (self.in_features // self.block) if self.nested_block else 0
        return replace(self, out_features=stop - start, first_block=self.first_block + skipped)


def check_rows(layout: PackedLayout, name: str) -> None:
    """Raises RecipeError for a layer whose rows cannot be sliced or sharded because blocks span them.

    Example:
        >>> check_rows(PackedLayout("nf4", 8, 128, 64, 256, "reference"), "model.layers.0.mlp.up_proj")
    """
    if layout.by_rows:
        return
    fitting = [block for block in nf4_spec.BLOCKS if layout.in_features % block == 0]
    raise RecipeError(
        f"{name} has rows of {layout.in_features} elements, and NF4 blocks of {layout.block} span several rows: "
        "its rows cannot be sliced or sharded",
        f"quantize to INT8 (load_in_8bit: true), or with quantize_layout(…, block={max(fitting)})"
        if fitting
        else "quantize to INT8 (load_in_8bit: true)",
    )


def tensor_sizes(layout: PackedLayout) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of each packed tensor of a full weight.

    Example:
        >>> {name: size for name, (size, _) in tensor_sizes(PackedLayout("int8", 8, 100, 0, 0, "reference")).items()}
        {'codes': (8, 100), 'scales': (8, 4)}
    """
    rows, count = layout.out_features, layout.out_features * layout.in_features
    if layout.kind == "int8":
        return {"codes": (layout.shape, torch.int8), "scales": ((rows, 4), torch.uint8)}
    blocks = nf4_spec.num_blocks(count, layout.block)
    scale_bytes = 1 if layout.nested_block else 4
    code_size: tuple[int, ...] = ((count + 1) // 2,)
    scale_size: tuple[int, ...] = (blocks * scale_bytes,)
    if layout.by_rows:
        code_size = (rows, layout.in_features // 2)
        scale_size = (rows, layout.in_features // layout.block * scale_bytes)
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": (code_size, torch.uint8),
        "scales": (scale_size, torch.uint8),
        "quant_map": ((16,), torch.float32),
    }
    if layout.nested_block:
        nested = nf4_spec.num_blocks(blocks, layout.nested_block)
        sizes |= {
            "nested_absmax": ((nested,), torch.float32),
            "nested_quant_map": ((256,), torch.float32),
            "offset": ((1,), torch.float32),
        }
    return sizes


def packed_tensors(weight: NF4Weight | Int8Tensor) -> dict[str, torch.Tensor]:
    """Returns a quantized weight's tensors by their names in a layer, fp32 scales as bytes."""
    if isinstance(weight, Int8Tensor):
        found = {"codes": weight.codes, "scales": weight.scale}
    else:
        found = {"scales" if key == "absmax" else key: value for key, value in weight.tensors().items()}
    return found | {"scales": found["scales"].contiguous().view(torch.uint8)}
