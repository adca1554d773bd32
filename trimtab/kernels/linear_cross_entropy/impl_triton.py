"""The loss by cuBLAS and three small Triton kernels, with one of two strategies that `schedule` chooses.

rows    Gradients with the loss: logits of as many rows as memory allows, loss and ∂loss/∂logits in one kernel that
        overwrites them, then both products. Three products; the backward only scales.
blocks  The forward saves a log-sum-exp per token. The backward recomputes the logits, one block of the vocabulary at
        a time, in the part of weight's gradient that is not written yet. Four products.
"""

# N tokens, n tokens of a chunk, C hidden size, V vocabulary, v entries of a block, S parts of a row

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from trimtab.kernels.launching import check_device
from trimtab.kernels.linear_cross_entropy import kernels_triton as kernels
from trimtab.kernels.linear_cross_entropy.objective import Objective, combine, losses_of
from trimtab.kernels.linear_cross_entropy.schedule import MAX_CHUNKS, blocks, row_stride

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

PROGRAMS = 264
"""If there are fewer rows, each is split into parts, so that every multiprocessor of a large GPU (132) has two
programs."""
FP16_GRADIENT_SCALE = 1024.0
"""Factor on gradients of logits while they are stored in fp16."""
MAX_FP16_TOKEN_WEIGHT = 32.0
"""Largest token weight in fp16: 32 · 1024 leaves a factor of two below fp16's 65,504, for a z-loss."""
GRADIENT_BLOCKS = 4
"""Blocks of a row per program of the gradient kernel."""


@dataclass(frozen=True)
class Configuration:
    """Launch configuration: `warps` warps read L lanes of E entries at once."""

    L: int
    E: int
    warps: int


def configuration(kernel: str, width: int, columns: int) -> Configuration:
    """Returns the launch configuration of a kernel for rows of `columns` elements of `width` bytes.

    kernel: "rows" (`loss_and_gradient_kernel`), "statistics" or "gradient".

    The same on every GPU (32 to 64 registers, hardly any shared memory). Measured on an H200 in bf16, of eight
    pairs of lanes and warps: "rows" at 49,152 entries 0.52 ms against 0.58 with 512 lanes, at 128,256 entries 0.80
    against 0.82 with 1024; "statistics" and "gradient" reach 4.2 and 3.9 TB/s, the copy bandwidth, with many pairs.
    """
    row_lanes = 1024 if columns * width <= 128 * 1024 else 512
    lanes = {"rows": row_lanes, "statistics": 512, "gradient": 256}[kernel]
    warps = {"rows": 16, "statistics": 8, "gradient": 4}[kernel]
    return Configuration(lanes, 16 // width, warps)


def _parts(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(
    h_nC: torch.Tensor, w_vC: torch.Tensor, bias_v: torch.Tensor | None, out_nv: torch.Tensor
) -> None:
    if bias_v is None:
        torch.mm(h_nC, w_vC.t(), out=out_nv)
    else:
        torch.addmm(bias_v, h_nC, w_vC.t(), out=out_nv)


def _product_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float, alpha: float = 1.0
) -> None:
    """out ← beta · out + alpha · a b, accumulated in fp32; `out` may be wider than a and b."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda:  # cuBLAS writes fp32 from 16-bit factors: no second pass, no copy
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)


def loss_and_gradient_(
    logits_nV: torch.Tensor,
    labels_n: torch.Tensor,
    scale_n: torch.Tensor,
    losses_n: torch.Tensor,
    objective: Objective,
    gradient_scale: float,
) -> None:
    """losses ← scale · loss, logits ← scale · gradient_scale · ∂loss/∂logits."""
    (n, V), (stride, one) = logits_nV.shape, logits_nV.stride()
    assert one == 1 or V == 1, logits_nV.stride()
    chosen = configuration("rows", logits_nV.element_size(), V)
    kernels.loss_and_gradient_kernel[(n,)](
        logits_nV,
        labels_n,
        scale_n,
        losses_n,
        stride,
        V,
        objective.softcap,
        objective.label_smoothing,
        objective.z_loss,
        gradient_scale,
        CAPPED=objective.softcap > 0,
        SMOOTHED=objective.label_smoothing > 0,
        L=chosen.L,
        E=chosen.E,
        num_warps=chosen.warps,
    )


def _part_blocks(columns: int, parts: int, chosen: Configuration) -> int:
    """Blocks per part of a row."""
    return max(-(-columns // (parts * chosen.L * chosen.E)), 1)


def _num_parts(rows: int, columns: int, chosen: Configuration) -> int:
    """Parts per row: enough for `PROGRAMS` programs, at most one per block."""
    least = max(-(-PROGRAMS // max(rows, 1)), 1)
    blocks_of_part = _part_blocks(columns, least, chosen)
    return -(-columns // (blocks_of_part * chosen.L * chosen.E))


def row_statistics(
    logits_nv: torch.Tensor, labels_n: torch.Tensor, first: int, objective: Objective, parts: int
) -> torch.Tensor:
    """partials_4nS of rows whose column 0 is entry `first` of the vocabulary."""
    n, v = logits_nv.shape
    partials_4nS = torch.empty(4, n, parts, dtype=torch.float32, device=logits_nv.device)
    chosen = configuration("statistics", logits_nv.element_size(), v)
    kernels.row_statistics_kernel[(n, parts)](
        logits_nv,
        labels_n,
        partials_4nS,
        logits_nv.stride(0),
        v,
        _part_blocks(v, parts, chosen),
        first,
        parts,
        n * parts,
        objective.softcap,
        CAPPED=objective.softcap > 0,
        L=chosen.L,
        E=chosen.E,
        num_warps=chosen.warps,
    )
    return partials_4nS


def gradient_(
    logits_Nv: torch.Tensor,
    labels_N: torch.Tensor,
    scale_N: torch.Tensor,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    first: int,
    vocabulary: int,
    objective: Objective,
) -> None:
    """logits ← scale · ∂loss/∂logits, where column 0 is entry `first` of `vocabulary` entries."""
    N, v = logits_Nv.shape
    chosen = configuration("gradient", logits_Nv.element_size(), v)
    parts = -(-v // (GRADIENT_BLOCKS * chosen.L * chosen.E))
    kernels.gradient_kernel[(N, parts)](
        logits_Nv,
        labels_N,
        scale_N,
        lse_N,
        nll_N,
        logits_Nv.stride(0),
        v,
        first,
        vocabulary,
        objective.softcap,
        objective.label_smoothing,
        objective.z_loss,
        CAPPED=objective.softcap > 0,
        BLOCKS=GRADIENT_BLOCKS,
        L=chosen.L,
        E=chosen.E,
        num_warps=chosen.warps,
    )


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """x ← x · factor, a device scalar; if the factor is 1, only the launch takes time."""
    assert x.is_contiguous(), x.stride()
    check_device(kernels.scale_kernel, x)
    if x.numel():
        block = 4096
        kernels.scale_kernel[(min(triton.cdiv(x.numel(), block), 4 * PROGRAMS),)](
            x, factor, x.numel(), BLOCK=block, num_warps=8
        )


def summed(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    scale_N: torch.Tensor,
    objective: Objective,
    rows: int,
    wanted: tuple[bool, bool, bool],
    weight_gradient_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (Σ scale · loss, its gradients of hidden, weight and bias; empty where not wanted): strategy "rows".

    A 16-bit gradient of weight is rounded per chunk; above `MAX_CHUNKS` chunks it is accumulated in fp32 instead.
    """
    check_device(kernels.loss_and_gradient_kernel, hidden_NC)
    (N, C), V = hidden_NC.shape, weight_VC.shape[0]
    empty = hidden_NC.new_empty(0)
    grad_hidden_NC = (
        torch.empty_like(hidden_NC, memory_format=torch.contiguous_format) if wanted[0] else empty
    )
    summed_in = torch.float32 if -(-N // rows) > MAX_CHUNKS else weight_gradient_dtype
    grad_weight_VC = hidden_NC.new_empty(V, C, dtype=summed_in) if wanted[1] else empty
    grad_bias_V = hidden_NC.new_zeros(V, dtype=torch.float32) if wanted[2] else empty
    if N == 0:
        grad_weight_VC.zero_()
    losses_N = hidden_NC.new_empty(N, dtype=torch.float32)
    # fp16 cannot represent p = 1e-5 accurately: gradients of logits are stored times 1024, and the products, which
    # accumulate in fp32, divide by it. `operators.triton_loss` keeps scales within `MAX_FP16_TOKEN_WEIGHT` for it.
    gradient_scale = FP16_GRADIENT_SCALE if hidden_NC.dtype == torch.float16 else 1.0
    buffer = hidden_NC.new_empty(min(rows, N), row_stride(V))
    for part in _parts(N, rows):
        h_nC = hidden_NC[part]
        d_nV = buffer[: h_nC.shape[0], :V]
        _logits(h_nC, weight_VC, bias_V, d_nV)
        loss_and_gradient_(d_nV, labels_N[part], scale_N[part], losses_N[part], objective, gradient_scale)
        if wanted[0]:
            _product_(grad_hidden_NC[part], d_nV, weight_VC, beta=0.0, alpha=1 / gradient_scale)
        if wanted[1]:
            _product_(grad_weight_VC, d_nV.t(), h_nC, beta=float(part.start > 0), alpha=1 / gradient_scale)
        if wanted[2]:
            grad_bias_V.add_(d_nV.sum(0, dtype=torch.float32), alpha=1 / gradient_scale)
    if wanted[1]:
        grad_weight_VC = grad_weight_VC.to(weight_gradient_dtype)
    return losses_N.sum(), grad_hidden_NC, grad_weight_VC, grad_bias_V


def partials(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    objective: Objective,
    rows: int,
    first: int = 0,
) -> torch.Tensor:
    """partials_4NS of all rows, the input of `objective.combine`; weight's entries start at `first`."""
    check_device(kernels.row_statistics_kernel, hidden_NC)
    N, V = hidden_NC.shape[0], weight_VC.shape[0]
    rows = max(min(rows, N), 1)
    parts = _num_parts(rows, V, configuration("statistics", hidden_NC.element_size(), V))
    buffer = hidden_NC.new_empty(rows, row_stride(V))
    out_4NS = torch.empty(4, N, parts, dtype=torch.float32, device=hidden_NC.device)
    for part in _parts(N, rows):
        h_nC = hidden_NC[part]
        logits_nV = buffer[: h_nC.shape[0], :V]
        _logits(h_nC, weight_VC, bias_V, logits_nV)
        out_4NS[:, part] = row_statistics(logits_nV, labels_N[part], first, objective, parts)
    return out_4NS


def losses(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    scale_N: torch.Tensor,
    objective: Objective,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (scale · loss, lse, nll) per token."""
    numbers = combine(partials(hidden_NC, weight_VC, bias_V, labels_N, objective, rows))
    losses_N = losses_of(objective, weight_VC.shape[0], *numbers)
    return torch.where(scale_N != 0, scale_N * losses_N, 0.0), numbers[0], numbers[1]


def gradients(
    scale_N: torch.Tensor,
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    lse_N: torch.Tensor,
    nll_N: torch.Tensor,
    objective: Objective,
    first: int,
    vocabulary: int,
    scratch_bytes: int,
    wanted: tuple[bool, bool, bool],
    weight_gradient_dtype: torch.dtype,
) -> Gradients:
    """Gradients of hidden, weight and bias (empty where not wanted) for known lse and nll: backward of "blocks"."""
    check_device(kernels.gradient_kernel, hidden_NC)
    (N, C), V = hidden_NC.shape, weight_VC.shape[0]
    empty, kind = hidden_NC.new_empty(0), hidden_NC.dtype
    sum_NC = hidden_NC.new_empty(N, C, dtype=torch.float32) if wanted[0] else empty
    grad_weight_VC = hidden_NC.new_empty(V, C, dtype=weight_gradient_dtype) if wanted[1] else empty
    grad_bias_V = hidden_NC.new_empty(V, dtype=torch.float32) if wanted[2] else empty
    width, wide = hidden_NC.element_size(), grad_weight_VC.element_size()
    own = place = d_Nv = empty
    for start, stop, borrowed in blocks(N, C, V, width, wide, scratch_bytes, weight_grad=wanted[1]):
        stride = row_stride(stop - start)
        if borrowed:
            place = grad_weight_VC[stop:].view(-1).view(kind)
        else:
            if own.numel() < N * stride:
                own = hidden_NC.new_empty(N * stride)
            place = own
        d_Nv = place[: N * stride].view(N, stride)[:, : stop - start]
        bias_v = None if bias_V is None else bias_V[start:stop]
        _logits(hidden_NC, weight_VC[start:stop], bias_v, d_Nv)
        if N:
            gradient_(d_Nv, labels_N, scale_N, lse_N, nll_N, first + start, vocabulary, objective)
        if wanted[0]:
            _product_(sum_NC, d_Nv, weight_VC[start:stop], beta=float(start > 0))
        if wanted[1]:
            _product_(grad_weight_VC[start:stop], d_Nv.t(), hidden_NC, beta=0.0)
        if wanted[2]:
            torch.sum(d_Nv, 0, dtype=torch.float32, out=grad_bias_V[start:stop])
    own = place = d_Nv = empty  # freed: hidden's gradient may reuse their memory
    return sum_NC.to(kind), grad_weight_VC, grad_bias_V
