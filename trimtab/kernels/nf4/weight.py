"""A tensor in NF4: packed codes, the scale of each block, and the metadata to dequantize them."""

# N values, K = ⌈N/block⌉ blocks, J = ⌈K/nested_block⌉ blocks of scales

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.nf4 import spec


@dataclass(frozen=True)
class NF4Weight:
    """A quantized tensor of `shape`, flattened in row-major order and split into blocks.

    Single quantization: `absmax` is fp32 [K], the other scale tensors are None. Double: `absmax` is uint8 [K],
    and block k's scale is nested_quant_map[absmax[k]] · nested_absmax[k // nested_block] + offset.

    Example:
        >>> from trimtab.kernels.nf4 import quantize, dequantize
        >>> weight = quantize(torch.randn(8, 64), double=False)
        >>> weight.codes.shape, weight.absmax.shape, weight.shape
        (torch.Size([256]), torch.Size([8]), (8, 64))
    """

    codes: torch.Tensor
    """uint8 [⌈N/2⌉]: value 2i in the upper four bits of byte i, value 2i + 1 in the lower ones."""
    absmax: torch.Tensor
    quant_map: torch.Tensor
    """fp32 [16]: `spec.TABLE` on the weight's device."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The original's dtype, and the default dtype of dequantization."""
    block: int = 64
    nested_absmax: torch.Tensor | None = None
    """fp32 [J]."""
    nested_quant_map: torch.Tensor | None = None
    """fp32 [256]."""
    offset: torch.Tensor | None = None
    """fp32 []: the mean of all scales, subtracted before they are quantized."""
    nested_block: int = spec.NESTED_BLOCK

    def __post_init__(self) -> None:
        count = self.numel
        blocks = spec.num_blocks(count, self.block)
        assert self.block in spec.BLOCKS, self.block
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.codes.shape == ((count + 1) // 2,), (self.codes.shape, self.shape)
        assert self.absmax.shape == (blocks,), (self.absmax.shape, blocks)
        assert self.quant_map.shape == (16,), self.quant_map.shape
        assert self.absmax.dtype == (torch.uint8 if self.double else torch.float32), self.absmax.dtype
        if self.nested_absmax is not None:
            assert self.nested_absmax.shape == (spec.num_blocks(blocks, self.nested_block),)
            assert self.nested_quant_map is not None
            assert self.nested_quant_map.shape == (256,)
            assert self.offset is not None
            assert self.offset.shape == ()

    @property
    def double(self) -> bool:
        """Whether the scales are quantized as well (double quantization)."""
        return self.nested_absmax is not None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, without those that are None."""
        names = ("codes", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "offset")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> NF4Weight:
        """A copy on another device, bitwise identical."""
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})  # type: ignore[arg-type]

    def to_bitsandbytes(self, name: str = "weight") -> dict[str, torch.Tensor]:
        """The entries that bitsandbytes writes for a parameter `name` in a state dict."""
        from trimtab.kernels.nf4 import layout

        return layout.write(self, name)

    @classmethod
    def from_bitsandbytes(cls, state: Mapping[str, torch.Tensor], name: str = "weight") -> NF4Weight:
        """Reads parameter `name` as bitsandbytes saved it; other entries of `state` are ignored."""
        from trimtab.kernels.nf4 import layout

        return layout.read(state, name)


def check_finite(weights: Mapping[str, NF4Weight]) -> None:
    """Raises if a tensor contained NaN or infinity when it was quantized, or finite values whose scales overflow.

    One device synchronization for any number of weights. A block's scale is its largest magnitude, NaN included, so
    checking the scales (with double quantization their mean alone) is enough.
    """
    if not weights:
        return
    worst = [
        weight.offset if weight.offset is not None else weight.absmax.amax()
        for weight in weights.values()
        if weight.numel
    ]
    finite = torch.stack([value.to(worst[0].device) for value in worst]).isfinite().tolist() if worst else []
    names = [name for name, weight in weights.items() if weight.numel]
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    if bad:
        named = f"{', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''}"
        if all(_mean_overflowed(weights[name]) for name in bad):
            raise ModelError(
                f"{named}: finite weights so large that the mean of their scales overflows in fp32",
                "scale the weights down, or quantize without double quantization (double=False; in a recipe "
                "bnb_4bit_use_double_quant: false)",
            )
        raise ModelError(
            f"{named}: NaN or infinity in a weight to be quantized to 4 bits",
            "download the weights again, or load them in bf16 or fp32 if they overflow in fp16",
        )


def _mean_overflowed(weight: NF4Weight) -> bool:
    """Whether finite scales have an infinite mean: minus it they are −inf, and NaN only where one is infinite."""
    if weight.offset is None or weight.nested_absmax is None:
        return False
    return bool(weight.offset.isposinf()) and not bool(weight.nested_absmax.isnan().any())
