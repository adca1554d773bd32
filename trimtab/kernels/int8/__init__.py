"""8-bit integer quantization: absmax (symmetric) or affine (zero point), with a scale per tensor, row or group.

    absmax   s = max|x| / 127                       q = round(x · (1/s))               x̂ = q · s
    affine   lo = min(x, 0), hi = max(x, 0)
             s = hi/255 − lo/255                    z = round(−lo · (1/s)) − 128
                                                    q = round(x · (1/s)) + z           x̂ = (q − z) · s

in fp32, rounding half to even, q clamped to −127…127 (absmax) or −128…127 (affine). Zero is exact in both.

Recipes use absmax with a scale per row (`load_in_8bit`); the other forms are for users' own code.
"""

# R rows, C columns (last dimension), S scales

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from trimtab.kernels.int8.ops import Int8Tensor

__all__ = ["Int8Tensor", "dequantize", "quantize", "resolve_impl"]


def __getattr__(name: str) -> Any:
    if name == "Int8Tensor":
        from trimtab.kernels.int8 import ops

        return ops.Int8Tensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def resolve_impl(impl: str, tensor: torch.Tensor) -> str:
    """Resolves "auto" to an implementation, and raises for unknown names.

    "auto" is Triton if it runs on the tensor's device, else torch: both are bitwise identical.
    """
    if impl == "auto":
        from trimtab.kernels.triton_support import runs_triton

        return "triton" if runs_triton(tensor.device) else "reference"
    if impl not in ("reference", "triton"):
        raise ValueError(f"int8 has no impl {impl!r}: auto, reference or triton")
    return impl


def quantize(
    x: torch.Tensor,
    *,
    granularity: str = "row",
    group: int = 128,
    scheme: str = "absmax",
    check: bool = True,
    impl: str = "auto",
) -> Int8Tensor:
    """Quantizes an fp32, fp16 or bf16 tensor of any shape.

    Args:
        x: [..., C].
        granularity: one scale for the "tensor", each "row" (all but the last dimension), or each "group" of a row.
        group: elements per group; a row's last group may be shorter.
        scheme: "absmax" or "affine".
        check: raise if a value is NaN or infinite; synchronizes with the device once.
        impl: auto, reference or triton.

    Example:
        >>> import torch
        >>> quantize(torch.tensor([[0.0, 0.5, -1.27]])).codes
        tensor([[   0,   50, -127]], dtype=torch.int8)
    """
    from trimtab.kernels.int8 import ops

    return ops.quantize(x, granularity, group, scheme, check, resolve_impl(impl, x))


def dequantize(tensor: Int8Tensor, *, dtype: torch.dtype | None = None, impl: str = "auto") -> torch.Tensor:
    """Dequantizes to `dtype` (the original's by default): computed in fp32, rounded once.

    Example:
        >>> import torch
        >>> dequantize(quantize(torch.tensor([0.0, 0.5, -1.27])))
        tensor([ 0.0000,  0.5000, -1.2700])
    """
    from trimtab.kernels.int8 import ops

    return ops.dequantize(tensor, dtype or tensor.dtype, resolve_impl(impl, tensor.codes))
