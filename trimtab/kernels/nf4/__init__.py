"""NF4, the 4-bit format of QLoRA, bitwise compatible with bitsandbytes.

A tensor is flattened and split into blocks. A block stores its largest magnitude s = max |w|, and for each element the
index c of the table entry nearest to w / s, so that

    w ≈ TABLE[c] · s

Double quantization stores the scales in 8 bits as well, centered on their mean: s ≈ MAP[a] · t + mean(s) with one t per
256 scales. With blocks of 64 that is 4.13 bits per parameter.
"""

# M rows of x, N output features, K input features

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trimtab.kernels.nf4.weight import NF4Weight, check_finite

__all__ = ["NF4Weight", "check_finite", "dequantize", "matmul", "quantize", "resolve_impl"]


def __getattr__(name: str) -> Any:
    if name in ("NF4Weight", "check_finite"):
        from trimtab.kernels.nf4 import weight

        return getattr(weight, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def resolve_impl(impl: str, tensor: torch.Tensor) -> str:
    """Resolves "auto" to an implementation, and raises for unknown names.

    "auto" is Triton if it runs on the tensor's device, else torch: both are bitwise identical.
    """
    if impl == "auto":
        from trimtab.kernels.triton_support import runs_triton

        return "triton" if runs_triton(tensor.device) else "reference"
    if impl not in ("reference", "triton"):
        raise ValueError(f"nf4 has no impl {impl!r}: auto, reference or triton")
    return impl


def quantize(
    weight: torch.Tensor,
    *,
    block: int = 64,
    double: bool = True,
    check: bool = True,
    zero_code: int = 0,
    impl: str = "auto",
) -> NF4Weight:
    """Quantizes a tensor of any shape in fp32, fp16 or bf16.

    Args:
        weight: any shape; copied if not contiguous.
        block: number of elements that share a scale: 32, 64, … 4096.
        double: quantize the scales to 8 bits, in blocks of 256.
        check: raise if a value is NaN or infinite. Synchronizes with the device once; for many tensors pass False
            and call `check_finite` once for all of them.
        zero_code: the code of blocks that contain only zeros. bitsandbytes' CUDA library writes 0, which is −1 times a
            scale of zero; with double quantization the scale dequantizes to nearly zero, and the zeros with it. 7 gives
            exact zeros, can be read by bitsandbytes, and is what it writes on a CPU.
        impl: auto, reference or triton.

    Example:
        >>> import torch
        >>> weight = quantize(torch.tensor([[0.5, -1.0, 0.0, 0.25]]), block=32, double=False)
        >>> [hex(byte) for byte in weight.codes.tolist()], weight.absmax.tolist()
        (['0xc0', '0x7a'], [1.0])
    """
    from trimtab.kernels.nf4 import ops

    return ops.quantize(weight, block, double, check, zero_code, resolve_impl(impl, weight))


def dequantize(
    weight: NF4Weight,
    *,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Dequantizes to `dtype` (the original's by default): computed in fp32, rounded once.

    `transposed` swaps the last two dimensions and returns a contiguous result, as backward passes need it. `out`, a
    contiguous tensor of the result's shape, is written in its own dtype instead of allocating, and returned.

    Example:
        >>> import torch
        >>> dequantize(quantize(torch.tensor([[0.5, -1.0, 0.0, 0.25]]), block=32, double=False))
        tensor([[ 0.4407, -1.0000,  0.0000,  0.2461]])
    """
    from trimtab.kernels.nf4 import ops

    assert out is None or dtype in (None, out.dtype), (dtype, out.dtype)
    return ops.dequantize(weight, dtype or weight.dtype, transposed, out, resolve_impl(impl, weight.codes))


def matmul(x_MK: torch.Tensor, weight: NF4Weight, *, impl: str = "auto") -> torch.Tensor:
    """x · Wᵀ with a frozen weight [N, K] in NF4: [..., K] → [..., N] in x's dtype; differentiable in x.

    The weight is dequantized to x's dtype before the product. For one or two rows the Triton version dequantizes it
    inside the product, without writing it to memory.

    For layers that users write themselves. trimtab's own (`trimtab.adapt.QuantizedLinear`) call the same kernels
    through operators that share one workspace for dequantized weights.

    Example:
        >>> import torch
        >>> weight = quantize(torch.randn(8, 64))
        >>> matmul(torch.randn(2, 3, 64), weight).shape
        torch.Size([2, 3, 8])
    """
    from trimtab.kernels.nf4 import ops

    return ops.matmul(x_MK, weight, resolve_impl(impl, x_MK))
