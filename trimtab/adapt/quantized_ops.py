"""x · Wᵀ with a frozen quantized weight, as torch operators: schemas, fakes, gradients.

The weight is dequantized to x's dtype into the shared workspace, multiplied and discarded; the gradient of x
dequantizes it again. So no 16-bit weight outlives an operator, and autograd saves only the packed tensors (which exist
anyway) and no activation. The weight is frozen and has no gradient. A dequantized copy (`PLAIN`) is passed to the same
operators, so that the same products run in the same order.
"""

# M rows of x, N output features, K input features

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from trimtab.adapt import workspace
from trimtab.adapt.packed_layout import PLAIN, PackedLayout
from trimtab.kernels.int8 import impl_reference as int8_reference
from trimtab.kernels.nf4 import impl_reference as nf4_reference
from trimtab.kernels.nf4 import spec as nf4_spec

Packed = tuple[torch.Tensor | None, ...]
"""codes, scales, and for NF4: quant_map, nested_absmax, nested_quant_map, offset [1]; None for absent tensors. fp32
scales are passed as bytes (uint8)."""

NUM_PACKED = 6


def dequantize(
    layout: PackedLayout, packed: Packed, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """Returns the weight [N, K] in `dtype`, in `out` if given. Cannot be traced: it launches a kernel directly."""
    if layout.kind == "int8":
        codes, scales = packed[:2]
        assert codes is not None
        assert scales is not None
        scale_N1 = scales.view(torch.float32)
        arguments: tuple[Any, ...] = (codes, scale_N1, codes.new_empty(0), layout.in_features, dtype, out)
        if layout.impl == "triton":
            from trimtab.kernels.int8 import impl_triton as int8_triton

            return int8_triton.dequantize(*arguments)
        return int8_reference.dequantize(*arguments)
    state = (
        *_nf4_state(layout, packed),
        layout.shape,
        dtype,
        layout.block,
        max(layout.nested_block, 1),
        False,
        out,
        layout.first_block,
    )
    if layout.impl == "triton":
        from trimtab.kernels.nf4 import impl_triton as nf4_triton

        return nf4_triton.dequantize(*state)
    return nf4_reference.dequantize(*state)


def _nf4_state(layout: PackedLayout, packed: Packed) -> tuple[Any, ...]:
    """The packed tensors as kernel arguments: the offset as a 0-dim tensor, and scales as fp32 if they are not
    quantized."""
    codes, scales, *tables, offset = packed
    assert scales is not None
    if not layout.nested_block:
        scales = scales.view(torch.float32)
    return (codes, scales, *tables, None if offset is None else offset.view(()))


def is_fused(layout: PackedLayout, rows: int) -> bool:
    """Whether a product of this many rows dequantizes inside the matmul kernel and needs no dequantized weight."""
    return layout.kind == "nf4" and layout.impl == "triton" and 0 < rows <= nf4_spec.FUSED_ROWS


@contextmanager
def weight(
    layout: PackedLayout, packed: Packed, dtype: torch.dtype, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yields W [N, K] in the compute dtype: dequantized into the workspace, or a plain weight itself."""
    if layout.kind == PLAIN:
        weight_NK = packed[0]
        assert weight_NK is not None
        yield weight_NK.to(dtype)
        return
    with workspace.borrow(layout.shape, dtype, device) as space_NK:
        yield dequantize(layout, packed, dtype, space_NK)


def product(x: torch.Tensor, packed: Packed, layout: PackedLayout) -> torch.Tensor:
    """x · Wᵀ: [..., K] → [..., N]. Below autograd, on real tensors."""
    if is_fused(layout, x.numel() // max(layout.in_features, 1)):
        from trimtab.kernels.nf4 import impl_triton_matmul

        # One or two rows, as in generation: dequantized inside the product, 15 µs instead of 27 at 4096×4096 (H200).
        sizes = (layout.shape, layout.block, max(layout.nested_block, 1), layout.first_block)
        state: tuple[Any, ...] = (*_nf4_state(layout, packed), *sizes)
        return impl_triton_matmul.matmul(x, *state)
    with weight(layout, packed, x.dtype, x.device) as weight_NK:
        return F.linear(x, weight_NK)


def product_of_gradient(grad: torch.Tensor, packed: Packed, layout: PackedLayout) -> torch.Tensor:
    """grad · W: [..., N] → [..., K]."""
    with weight(layout, packed, grad.dtype, grad.device) as weight_NK:
        return grad @ weight_NK


_PACKED = (
    "Tensor codes, Tensor? scales, Tensor? quant_map, Tensor? nested_absmax, Tensor? nested_quant_map, "
    "Tensor? offset, str packing"
)
_library = torch.library.Library("trimtab", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"packed_linear(Tensor x, {_PACKED}) -> Tensor", tags=_tags)
_library.define(f"packed_linear_gradient(Tensor grad, {_PACKED}) -> Tensor", tags=_tags)

_library.define(f"packed_weight({_PACKED}, ScalarType dtype) -> Tensor", tags=_tags)


def _weight(*state: Any) -> torch.Tensor:
    *packed, text, dtype = state
    return dequantize(PackedLayout.from_text(text), tuple(packed), dtype, None)


def _linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *packed, text = rest
    return product(x, tuple(packed), PackedLayout.from_text(text))


def _linear_gradient(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    *packed, text = rest
    return product_of_gradient(grad, tuple(packed), PackedLayout.from_text(text))


_library.impl("packed_weight", _weight, "CompositeExplicitAutograd")
_library.impl("packed_linear", _linear, "CompositeExplicitAutograd")
_library.impl("packed_linear_gradient", _linear_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("trimtab::packed_weight")
def _(codes: torch.Tensor, *state: Any) -> torch.Tensor:
    *_packed, text, dtype = state
    return codes.new_empty(PackedLayout.from_text(text).shape, dtype=dtype)


@torch.library.register_fake("trimtab::packed_linear")
def _(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], PackedLayout.from_text(rest[-1]).out_features))


@torch.library.register_fake("trimtab::packed_linear_gradient")
def _(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], PackedLayout.from_text(rest[-1]).in_features))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *packed, ctx.packed_layout = inputs
    ctx.save_for_backward(*packed)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    """d/dx of x · Wᵀ is grad · W."""
    dx = torch.ops.trimtab.packed_linear_gradient(grad, *ctx.saved_tensors, ctx.packed_layout)
    return dx, *(None,) * (NUM_PACKED + 1)


def _double_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Second derivative: the derivative of grad · W with respect to grad is a product with Wᵀ."""
    back = torch.ops.trimtab.packed_linear(grad, *ctx.saved_tensors, ctx.packed_layout)
    return back, *(None,) * (NUM_PACKED + 1)


torch.library.register_autograd("trimtab::packed_linear", _backward, setup_context=_save)
torch.library.register_autograd("trimtab::packed_linear_gradient", _double_backward, setup_context=_save)
