"""One AdamW step on a tensor with 8-bit moments, quantized in blocks of 256 with one fp32 scale each.

    g ← grad_scale · grad                                   in fp32, whatever the dtypes
    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²      moments dequantized; decay does not affect them
    w ← w − lr·wd·w − lr · (m / (1 − β₁ᵗ)) / (√v / √(1 − β₂ᵗ) + ε)
    w written back once (bf16: stochastically rounded), m and √v quantized again

The tensor is viewed as [rows, columns] with columns its last dimension; blocks never span rows, and a row whose
length is not a multiple of 256 ends in a short block. Stored: `codes` uint8 of the parameter's shape and `scale` fp32
[rows, blocks per row] for each moment, so that rows can be resharded without changing a value. README.md has
the quantization maps and why √v is stored instead of v.
"""

# R rows, C columns (last dimension), K blocks per row, N elements

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class State8bit(NamedTuple):
    """Quantized moments of one parameter; the tensors are updated in place."""

    codes1: torch.Tensor
    """uint8, the parameter's shape: first moment, signed code"""
    scale1: torch.Tensor
    """fp32 [rows, blocks]: largest |m| of each block"""
    codes2: torch.Tensor
    """uint8, the parameter's shape: square root of the second moment, unsigned code"""
    scale2: torch.Tensor
    """fp32 [rows, blocks]: largest √v of each block"""


def new_state(param: torch.Tensor) -> State8bit:
    """Creates zero moments for `param`, on its device.

    Example:
        >>> import torch
        >>> [tuple(t.shape) for t in new_state(torch.zeros(3, 300))]
        [(3, 300), (3, 2), (3, 300), (3, 2)]
    """
    from trimtab.kernels.adamw8bit import impl_reference

    return impl_reference.new_state(param)


def adamw8bit_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State8bit,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: torch.Tensor | float = 1.0,
    seed: int = 0,
    param_index: int = 0,
    stochastic_rounding: bool = True,
    offset: int = 0,
    skip: torch.Tensor | None = None,
    impl: str = "reference",
) -> None:
    """Updates `param` (fp32 or bf16, contiguous) and `state` in place from `grad` (any float dtype, strides).

    `step` counts from 1. `grad_scale` multiplies the gradient and may be a 0-dim tensor on the device, without
    synchronization. `seed`, `step`, `param_index` and `offset` (index of the first element in the unsharded tensor)
    determine the random bits of a bf16 weight's rounding; `stochastic_rounding=False` rounds to nearest. If `skip`, a
    0-dim bool tensor on the device, is true, nothing changes. `impl="triton_exact"` is bitwise identical to
    "reference" on the same GPU; "triton" fuses operations and executes two fifths of the instructions.
    `table.ParameterTable` updates many tensors in one launch.

    Example:
        >>> import torch
        >>> w = torch.ones(2, 300)
        >>> state = new_state(w)
        >>> adamw8bit_step(w, torch.ones_like(w), state, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8,
        ...                weight_decay=0.0, step=1)
        >>> round(w[0, 0].item(), 4)
        0.9
    """
    if impl == "reference":
        from trimtab.kernels.adamw8bit import impl_reference

        impl_reference.adamw8bit_step(
            param,
            grad,
            state,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
            seed=seed,
            param_index=param_index,
            stochastic_rounding=stochastic_rounding,
            offset=offset,
            skip=skip,
        )
    elif impl in ("triton", "triton_exact"):
        import torch

        from trimtab.kernels.adamw8bit import operator

        operator.step_(
            param, grad, *state, torch.as_tensor(grad_scale, dtype=torch.float32), skip,
            lr, beta1, beta2, eps, weight_decay, step, seed, param_index, stochastic_rounding, offset,
            impl == "triton_exact",
        )  # fmt: skip
    else:
        raise ValueError(f"adamw8bit has no impl {impl!r}: reference, triton or triton_exact")


def moments(state: State8bit) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and second moments in fp32, in the parameter's shape, for inspection and tests."""
    from trimtab.kernels.adamw8bit import impl_reference

    return impl_reference.moments(state)
