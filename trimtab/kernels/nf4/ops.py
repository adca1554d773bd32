"""The NF4 torch operators (schemas, fakes, gradients) and the implementation of the public functions.

The Triton versions are operators, so that `torch.compile` and fake tensors can trace them; the reference is
plain torch and needs none.
"""

# M rows of x, N output features, K input features

from __future__ import annotations

from typing import Any

import torch

from trimtab.facts.errors import RecipeError
from trimtab.kernels.nf4 import impl_reference, spec
from trimtab.kernels.nf4.weight import NF4Weight, check_finite

STATE = (
    "Tensor codes, Tensor absmax, Tensor quant_map, "
    "Tensor? nested_absmax, Tensor? nested_quant_map, Tensor? offset, SymInt[] shape, "
)

_library = torch.library.Library("trimtab", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "nf4_quantize(Tensor weight, Tensor bins, int block, int zero_code) -> (Tensor, Tensor)", tags=_tags
)
_library.define(
    "nf4_quantize_scales(Tensor absmax, Tensor offset, Tensor nested_quant_map, int block) -> (Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    f"nf4_dequantize({STATE}ScalarType dtype, int block, int nested_block, bool transposed) -> Tensor",
    tags=_tags,
)
_library.define(
    f"nf4_dequantize_into({STATE}int block, int nested_block, bool transposed, Tensor(a!) out) -> ()",
    tags=_tags,
)
_library.define(f"nf4_matmul(Tensor x, {STATE}int block, int nested_block) -> Tensor", tags=_tags)


def _quantize(weight: torch.Tensor, bins: torch.Tensor, block: int, zero_code: int) -> Any:
    from trimtab.kernels.nf4 import impl_triton

    return impl_triton.quantize_blocks(weight, bins, block, zero_code)


def _quantize_scales(absmax: torch.Tensor, offset: torch.Tensor, table: torch.Tensor, block: int) -> Any:
    from trimtab.kernels.nf4 import impl_triton

    return impl_triton.quantize_scales(absmax, offset, table, block)


def _dequantize(*arguments: Any) -> torch.Tensor:
    from trimtab.kernels.nf4 import impl_triton

    return impl_triton.dequantize(*arguments)


def _dequantize_into(*arguments: Any) -> None:
    from trimtab.kernels.nf4 import impl_triton

    out = arguments[-1]
    reordered: tuple[Any, ...] = (*arguments[:7], out.dtype, *arguments[7:])
    impl_triton.dequantize(*reordered)


def _matmul(x: torch.Tensor, *state: Any) -> torch.Tensor:
    from trimtab.kernels.nf4 import impl_triton_matmul

    return impl_triton_matmul.matmul(x, *state)


_library.impl("nf4_quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("nf4_quantize_scales", _quantize_scales, "CompositeExplicitAutograd")
_library.impl("nf4_dequantize", _dequantize, "CompositeExplicitAutograd")
_library.impl("nf4_dequantize_into", _dequantize_into, "CompositeExplicitAutograd")
_library.impl("nf4_matmul", _matmul, "CompositeExplicitAutograd")


@torch.library.register_fake("trimtab::nf4_quantize")
def _(weight: torch.Tensor, bins: torch.Tensor, block: int, zero_code: int) -> Any:
    count = weight.numel()
    codes = weight.new_empty(((count + 1) // 2,), dtype=torch.uint8)
    return codes, weight.new_empty(((count + block - 1) // block,), dtype=torch.float32)


@torch.library.register_fake("trimtab::nf4_quantize_scales")
def _(absmax: torch.Tensor, offset: torch.Tensor, table: torch.Tensor, block: int) -> Any:
    nested = absmax.new_empty(((absmax.numel() + block - 1) // block,), dtype=torch.float32)
    return absmax.new_empty(absmax.shape, dtype=torch.uint8), nested


@torch.library.register_fake("trimtab::nf4_dequantize")
def _(codes: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, shape, dtype, _block, _nested_block, transposed = rest
    if transposed:
        shape = [*shape[:-2], shape[-1], shape[-2]]
    return codes.new_empty(shape, dtype=dtype)


@torch.library.register_fake("trimtab::nf4_dequantize_into")
def _(*arguments: Any) -> None:
    return None


@torch.library.register_fake("trimtab::nf4_matmul")
def _(x: torch.Tensor, *state: Any) -> torch.Tensor:
    shape = state[6]
    return x.new_empty((*x.shape[:-1], shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *state = inputs
    ctx.save_for_backward(*state[:6])
    ctx.rest = state[6:]


def _backward(ctx: Any, grad_MN: torch.Tensor) -> Any:
    """d/dx of x · Wᵀ is grad · W; the weight is dequantized again instead of saved. It is frozen: no gradient."""
    shape, block, nested_block = ctx.rest
    weight_NK = torch.ops.trimtab.nf4_dequantize(
        *ctx.saved_tensors, shape, grad_MN.dtype, block, nested_block, False
    )
    return grad_MN @ weight_NK, *(None,) * 9


torch.library.register_autograd("trimtab::nf4_matmul", _backward, setup_context=_setup_context)


_constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}


def constants(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tables: the 16 values, the 256 of scales, and the quantizer's bins; created once per device, since a
    copy to the device synchronizes.

    Created again for each traced tensor: fake tensors may not mix with real ones, nor be cached.
    """
    plain = type(like) is torch.Tensor
    if plain and like.device in _constants:
        return _constants[like.device]
    table, nested, bins = (
        torch.tensor(values, dtype=torch.float32, device=like.device)
        for values in (spec.TABLE, spec.dynamic_map(), spec.bins())
    )
    if plain:
        _constants[like.device] = (table, nested, bins)
    return table, nested, bins


def quantize(
    weight: torch.Tensor, block: int, double: bool, check: bool, zero_code: int, impl: str
) -> NF4Weight:
    """See `trimtab.kernels.nf4.quantize`; `impl` is resolved."""
    if block not in spec.BLOCKS:
        raise RecipeError(
            f"NF4 does not support blocks of {block}", f"use one of {', '.join(map(str, spec.BLOCKS))}"
        )
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RecipeError(f"NF4 quantizes fp32, fp16 and bf16, not {weight.dtype}", "cast the tensor first")
    assert 0 <= zero_code < 16, zero_code
    weight = weight.detach()
    quant_map, nested_map, bins = constants(weight)
    if impl == "triton":
        codes, absmax = torch.ops.trimtab.nf4_quantize(weight, bins, block, zero_code)
    else:
        codes, absmax = impl_reference.quantize_blocks(weight, block, zero_code)
    shape = tuple(weight.shape)
    if not double:
        result = NF4Weight(codes, absmax, quant_map, shape, weight.dtype, block)
    else:
        # torch's own mean, whose order of summation determines the last bits that bitsandbytes writes
        offset = absmax.mean()
        if impl == "triton":
            scales, nested = torch.ops.trimtab.nf4_quantize_scales(
                absmax, offset, nested_map, spec.NESTED_BLOCK
            )
        else:
            scales, nested = impl_reference.quantize_scales(absmax, offset, nested_map, spec.NESTED_BLOCK)
        result = NF4Weight(
            codes,
            scales,
            quant_map,
            shape,
            weight.dtype,
            block,
            nested,
            nested_map,
            offset,
            spec.NESTED_BLOCK,
        )
    if check:
        check_finite({"weight": result})
    return result


State = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    tuple[int, ...],
]


def _state(weight: NF4Weight) -> State:
    return (
        weight.codes,
        weight.absmax,
        weight.quant_map,
        weight.nested_absmax,
        weight.nested_quant_map,
        weight.offset,
        weight.shape,
    )


def dequantize(
    weight: NF4Weight, dtype: torch.dtype, transposed: bool, out: torch.Tensor | None, impl: str
) -> torch.Tensor:
    """See `trimtab.kernels.nf4.dequantize`; `impl` is resolved."""
    if transposed and len(weight.shape) < 2:
        raise RecipeError(f"a tensor of shape {weight.shape} has no transpose", "omit transposed=True")
    if out is not None:
        check_out(weight, out, transposed)
        rest = (weight.block, weight.nested_block, transposed)
        if impl == "triton":
            torch.ops.trimtab.nf4_dequantize_into(*_state(weight), *rest, out)
            return out
        return impl_reference.dequantize(*_state(weight), out.dtype, *rest, out)
    if impl == "triton":
        return torch.ops.trimtab.nf4_dequantize(
            *_state(weight), dtype, weight.block, weight.nested_block, transposed
        )
    return impl_reference.dequantize(*_state(weight), dtype, weight.block, weight.nested_block, transposed)


def check_out(weight: NF4Weight, out: torch.Tensor, transposed: bool) -> None:
    """Asserts that `out` has the result's shape, is contiguous, and is on the weight's device."""
    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2]) if transposed else weight.shape
    assert tuple(out.shape) == shape, (out.shape, shape)
    assert out.is_contiguous(), out.stride()
    assert out.device == weight.codes.device, (out.device, weight.codes.device)


def matmul(x_MK: torch.Tensor, weight: NF4Weight, impl: str) -> torch.Tensor:
    """See `trimtab.kernels.nf4.matmul`; `impl` is resolved."""
    assert weight.shape[1:] == x_MK.shape[-1:], (x_MK.shape, weight.shape)
    if impl == "triton":
        return torch.ops.trimtab.nf4_matmul(x_MK, *_state(weight), weight.block, weight.nested_block)
    with torch.no_grad():
        weight_NK = dequantize(weight, x_MK.dtype, False, None, impl)
    return torch.nn.functional.linear(x_MK, weight_NK)
