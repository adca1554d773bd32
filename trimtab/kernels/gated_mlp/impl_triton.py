"""The gate in Triton: one pass over memory each way, fp32 inside."""

# N rows, W elements per row; rows may have any stride (halves of one tensor), elements of a row are contiguous

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.gated_mlp.spec import BLOCK, WARPS
from trimtab.kernels.launching import as_rows, check_device, once_differentiable


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns (act(x), act'(x)). The tanh form is x · σ(2z), since (1 + tanh z) / 2 = σ(2z): no tanh is needed."""
    if ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 - share)
    else:
        share = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        # for large x the polynomial overflows while the slope is 0: keep their product finite
        clamped = tl.minimum(tl.maximum(x, -64.0), 64.0)
        slope = share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * clamped * clamped)
    return x * share, share + x * slope


@triton.jit
def _gated_mlp_forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, W, blocks, stride_gate, stride_up, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    active, _ = _activate(gate, ACTIVATION)
    tl.store(out_ptr + row * W + column, active * up, mask=inside)


@triton.jit
def _gated_mlp_backward_kernel(  # type: ignore[no-untyped-def]
    g_ptr, gate_ptr, up_ptr, gate_out_ptr, up_out_ptr, W, blocks, stride_g, stride_gate, stride_up,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    g = tl.load(g_ptr + row * stride_g + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    active, slope = _activate(gate, ACTIVATION)
    tl.store(gate_out_ptr + row * W + column, g * up * slope, mask=inside)
    tl.store(up_out_ptr + row * W + column, g * active, mask=inside)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views each as [N, W]; as one row where all are contiguous, so that short rows leave no program half empty."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    return [as_rows(x) for x in tensors]


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str, overwrite_inputs: bool) -> torch.Tensor:
    check_device(_gated_mlp_forward_kernel, gate)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        gate_NW, up_NW = _rows(gate, up)
        N, W = gate_NW.shape
        blocks = triton.cdiv(W, BLOCK)
        _gated_mlp_forward_kernel[(N * blocks,)](
            gate_NW, up_NW, out, W, blocks, gate_NW.stride(0), up_NW.stride(0),
            ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def _backward(
    g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_out, up_out = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _differentiate_into(gate_out, up_out, g, gate, up, activation)
    return gate_out, up_out


def _backward_in_place(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    # Each program reads its elements before it writes them, and no other program reads them.
    _differentiate_into(gate, up, g, gate, up, activation)


def _differentiate_into(
    gate_out: torch.Tensor,
    up_out: torch.Tensor,
    g: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
) -> None:
    check_device(_gated_mlp_backward_kernel, gate)
    if gate.numel():
        g_NW, gate_NW, up_NW = _rows(g, gate, up)
        N, W = gate_NW.shape
        blocks = triton.cdiv(W, BLOCK)
        _gated_mlp_backward_kernel[(N * blocks,)](
            g_NW, gate_NW, up_NW, gate_out, up_out, W, blocks,
            g_NW.stride(0), gate_NW.stride(0), up_NW.stride(0),
            ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


torch.library.define(
    "trimtab::gated_activation",
    "(Tensor gate, Tensor up, str activation, bool overwrite_inputs) -> Tensor",
)
torch.library.define(
    "trimtab::gated_activation_backward",
    "(Tensor g, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
)
torch.library.define(
    "trimtab::gated_activation_backward_",
    "(Tensor g, Tensor(a!) gate, Tensor(b!) up, str activation) -> ()",
)
torch.library.impl("trimtab::gated_activation", ("cpu", "cuda"), _forward)
torch.library.impl("trimtab::gated_activation_backward", ("cpu", "cuda"), _backward)
torch.library.impl("trimtab::gated_activation_backward_", ("cpu", "cuda"), _backward_in_place)


@torch.library.register_fake("trimtab::gated_activation")
def _(gate, up, activation, overwrite_inputs):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape)


@torch.library.register_fake("trimtab::gated_activation_backward")
def _(g, gate, up, activation):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@torch.library.register_fake("trimtab::gated_activation_backward_")
def _(g, gate, up, activation):  # type: ignore[no-untyped-def]
    return None


def _can_overwrite(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether each owns its storage and is contiguous; False for parameters and for tensors that are being traced."""
    if type(gate) is not torch.Tensor:
        return False
    separate_storages = gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
    return separate_storages and gate.is_contiguous() and up.is_contiguous()


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    gate, up, ctx.activation, overwrite_inputs = inputs
    ctx.overwrite = overwrite_inputs and _can_overwrite(gate, up)
    ctx.save_for_backward(gate, up)


def _differentiate(ctx, g):  # type: ignore[no-untyped-def]
    gate, up = ctx.saved_tensors
    if not ctx.overwrite:
        return *torch.ops.trimtab.gated_activation_backward(g, gate, up, ctx.activation), None, None
    torch.ops.trimtab.gated_activation_backward_(g, gate, up, ctx.activation)
    torch.autograd.graph.increment_version([gate, up])  # so that a second backward pass raises
    return gate.detach(), up.detach(), None, None


torch.library.register_autograd("trimtab::gated_activation", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("trimtab::gated_activation_backward", once_differentiable)


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str, overwrite_inputs: bool
) -> torch.Tensor:
    """See `trimtab.kernels.gated_mlp.gated_activation`."""
    out: torch.Tensor = torch.ops.trimtab.gated_activation(gate, up, activation, overwrite_inputs)
    return out
