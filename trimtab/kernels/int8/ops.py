"""The 8-bit torch operators, the quantized tensor, and the implementation of the public functions."""

# R rows, C columns, S scales

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels.int8 import impl_reference, spec

_library = torch.library.Library("trimtab", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("int8_quantize(Tensor x, int length, bool affine) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(
    "int8_dequantize(Tensor codes, Tensor scale, Tensor zero_point, int length, ScalarType dtype) -> Tensor",
    tags=_tags,
)


def _quantize(x: torch.Tensor, length: int, affine: bool) -> Any:
    from trimtab.kernels.int8 import impl_triton

    return impl_triton.quantize(x, length, affine)


def _dequantize(*arguments: Any) -> torch.Tensor:
    from trimtab.kernels.int8 import impl_triton

    return impl_triton.dequantize(*arguments)


_library.impl("int8_quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("int8_dequantize", _dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("trimtab::int8_quantize")
def _(x: torch.Tensor, length: int, affine: bool) -> Any:
    columns = x.shape[-1] if x.ndim else 1
    count = x.numel() // columns * ((columns + length - 1) // length) if length else 1
    scale = x.new_empty((count,), dtype=torch.float32)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, scale, x.new_empty((count if affine else 0,), dtype=torch.int8)


@torch.library.register_fake("trimtab::int8_dequantize")
def _(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, length: int, dtype: torch.dtype) -> Any:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@dataclass(frozen=True)
class Int8Tensor:
    """A quantized tensor.

    Example:
        >>> from trimtab.kernels.int8 import quantize
        >>> tensor = quantize(torch.randn(4, 300), granularity="group", group=128, scheme="affine")
        >>> tensor.codes.shape, tensor.scale.shape, tensor.zero_point.dtype
        (torch.Size([4, 300]), torch.Size([12]), torch.int8)
    """

    codes: torch.Tensor
    """int8, the original's shape."""
    scale: torch.Tensor
    """fp32 [S]: row by row, and in each row group by group."""
    zero_point: torch.Tensor
    """int8 [S]; [0] with absmax."""
    length: int
    """Number of elements that share a scale; 0 if all do."""
    dtype: torch.dtype
    """The original's dtype."""

    @property
    def affine(self) -> bool:
        """Whether quantization is affine: each scale has a zero point."""
        return self.zero_point.numel() > 0


def quantize(
    x: torch.Tensor, granularity: str, group: int, scheme: str, check: bool, impl: str
) -> Int8Tensor:
    """See `trimtab.kernels.int8.quantize`; `impl` is resolved."""
    if granularity not in spec.GRANULARITIES or scheme not in spec.SCHEMES:
        raise RecipeError(
            f"int8 quantization does not support granularity {granularity} with scheme {scheme}",
            f"use granularity {', '.join(spec.GRANULARITIES)}; scheme {', '.join(spec.SCHEMES)}",
        )
    if granularity == "group" and group < 1:
        raise RecipeError(f"group is {group}", "use 1 or more; 128 is usual")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RecipeError(
            f"int8 quantization supports fp32, fp16 and bf16, not {x.dtype}", "cast the tensor first"
        )
    x = x.detach()
    length, affine = spec.group_length(tuple(x.shape), granularity, group), scheme == "affine"
    if impl == "triton":
        codes, scale, zero = torch.ops.trimtab.int8_quantize(x, length, affine)
    else:
        codes, scale, zero = impl_reference.quantize(x, length, affine)
    if check and not bool(scale.isfinite().all()):
        raise ModelError(
            "NaN or infinity in a tensor to be quantized to 8 bits", "reload or recompute the tensor"
        )
    return Int8Tensor(codes, scale, zero, length, x.dtype)


def dequantize(tensor: Int8Tensor, dtype: torch.dtype, impl: str) -> torch.Tensor:
    """See `trimtab.kernels.int8.dequantize`; `impl` is resolved."""
    arguments = (tensor.codes, tensor.scale, tensor.zero_point, tensor.length, dtype)
    if impl == "triton":
        return torch.ops.trimtab.int8_dequantize(*arguments)
    return impl_reference.dequantize(*arguments)
