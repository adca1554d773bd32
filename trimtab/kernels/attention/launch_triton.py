"""Launches the Triton kernels: strides, tiles, outputs. Also works with interpreted kernels."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size, G = H / K

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.kernels_backward import attention_key_kernel, attention_query_kernel
from trimtab.kernels.attention.kernels_forward import attention_forward_kernel
from trimtab.kernels.attention.tiles import Tiles, padded, tiles

NO_WINDOW = 1 << 30
MAX_HEAD_DIM = 256
# Offsets inside a tile are 32 bits wide, its start 64: row strides of up to 2³¹ / 256 elements.
MAX_STRIDE = 1 << 23


@dataclass(frozen=True)
class KernelArguments:
    """The non-tensor arguments of all three kernels."""

    window: int
    scale: float
    softcap: float
    """0 for no soft cap."""
    causal: bool
    """Without a causal mask, a window extends as far to the right as to the left."""
    offset: int | None = None
    """Position of the first query among the keys; None if the queries are the last positions."""


def forward(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    first_BT: torch.Tensor | None,
    arguments: KernelArguments,
    *,
    sinks_H: torch.Tensor | None = None,
    query_last_BT: torch.Tensor | None = None,
    with_tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (o_BTHD, lse_BTH): the output, and log Σ exp of each row's scores, −∞ for fully masked rows.

    `first_BT` and, for non-causal attention, `query_last_BT` are the bounds of each query's document (`layout.Bounds`).
    """
    q, k, v = (_with_supported_strides(x) for x in (q_BTHD, k_BSKD, v_BSKD))
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    check(q, k, v)
    assert arguments.scale > 0, "scale must be positive: a row's maximum is taken before it is scaled"
    o_BTHD = torch.empty((B, T, H, D), dtype=q.dtype, device=q.device)
    lse_BTH = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or S == 0:
        return o_BTHD.zero_(), lse_BTH.fill_(-math.inf) if sinks_H is None else lse_BTH.copy_(sinks_H)
    sinks_H = None if sinks_H is None else sinks_H.contiguous()
    capability = _capability(q)
    chosen = with_tiles or tiles("forward", D, q.element_size(), capability, packed=first_BT is not None)
    grid = (triton.cdiv(T * (H // K), chosen.rows) * B * K,)
    k_tiles, v_tiles, tma = _as_kernel_arguments(k, v, 1, chosen.keys, capability)
    attention_forward_kernel[grid](
        q, k_tiles, v_tiles, k, v, o_BTHD, lse_BTH, q if first_BT is None else first_BT,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        T, S, K, arguments.window, *_factors(arguments), sinks_H, query_last_BT, arguments.offset,
        **_constants(q, H // K, first_BT, arguments, chosen), TMA=tma,
    )  # fmt: skip
    return o_BTHD, lse_BTH


def backward(
    do_BTHD: torch.Tensor,
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    o_BTHD: torch.Tensor,
    lse_BTH: torch.Tensor,
    first_BT: torch.Tensor | None,
    last_BS: torch.Tensor | None,
    arguments: KernelArguments,
    *,
    dlse_BTH: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    query_last_BT: torch.Tensor | None = None,
    key_first_BS: torch.Tensor | None = None,
    with_tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns (dq, dk, dv), contiguous and deterministic; `dlse_BTH` is the gradient of the log-sum-exp, if any.

    With sinks, their gradient is the fourth result; the kernels do not read them: the log-sum-exp includes them.
    `last_BS` and, for non-causal attention, `key_first_BS` are the bounds of each key's document.
    """
    do, q, k, v = (_with_supported_strides(x) for x in (do_BTHD, q_BTHD, k_BSKD, v_BSKD))
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or S == 0:
        delta_BTH = torch.zeros_like(lse_BTH) if dlse_BTH is None else -dlse_BTH
        return dq.zero_(), dk.zero_(), dv.zero_(), *_sink_gradient(sinks_H, lse_BTH, delta_BTH)
    delta_BTH = torch.empty(lse_BTH.shape, dtype=torch.float32, device=q.device)
    dlse_BTH = None if dlse_BTH is None else dlse_BTH.contiguous()
    lse_BTH, o_BTHD = lse_BTH.contiguous(), o_BTHD.contiguous()
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    numbers = (T, S, K, arguments.window, *_factors(arguments), arguments.scale)
    # For packed rows the second pass assumes that queries and keys have the same positions, unless given an offset.
    offset = S - T if arguments.offset is None and last_BS is not None and T != S else arguments.offset
    width, capability = q.element_size(), _capability(q)
    by_query, by_key = with_tiles or tuple(
        tiles(name, D, width, capability, packed=first_BT is not None) for name in ("query", "key")
    )
    k_tiles, v_tiles, tma = _as_kernel_arguments(k, v, 1, by_query.keys, capability)
    attention_query_kernel[(triton.cdiv(T * (H // K), by_query.rows) * B * K,)](
        q, k_tiles, v_tiles, k, v, o_BTHD, do, lse_BTH, delta_BTH, dq, q if first_BT is None else first_BT,
        *strides, *numbers, dlse_BTH, query_last_BT, offset,
        **_constants(q, H // K, first_BT, arguments, by_query), TMA=tma,
    )  # fmt: skip
    q_tiles, do_tiles, tma = _as_kernel_arguments(q, do, H // K, by_key.rows, capability)
    attention_key_kernel[(triton.cdiv(S, by_key.keys) * B * K,)](
        q_tiles, k, v, do_tiles, q, do, lse_BTH, delta_BTH, dk, dv, q if last_BS is None else last_BS,
        *strides, *numbers, key_first_BS, offset, **_constants(q, H // K, last_BS, arguments, by_key), TMA=tma,
    )  # fmt: skip
    return dq, dk, dv, *_sink_gradient(sinks_H, lse_BTH, delta_BTH)


def _sink_gradient(
    sinks_H: torch.Tensor | None, lse_BTH: torch.Tensor, delta_BTH: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns (dsinks_H,) = −Σ exp(sink − lse) · D, where D includes the gradient of lse; () without sinks."""
    if sinks_H is None:
        return ()
    p_BTH = torch.sub(sinks_H.float(), lse_BTH).exp_()
    p_BTH.masked_fill_(lse_BTH == -math.inf, 0.0)  # a sink of −∞ and a fully masked row: −∞ − −∞
    return (p_BTH.mul_(delta_BTH).sum((0, 1)).neg_().to(sinks_H.dtype),)


def check(q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor) -> None:
    """Raises for inputs that the kernels do not support."""
    if not q_BTHD.is_cuda and isinstance(attention_forward_kernel, triton.runtime.JITFunction):
        raise ModelError(
            f"triton attention requires a GPU, not {q_BTHD.device.type}", "use sdpa_flash on a CPU"
        )
    if q_BTHD.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ModelError(f"triton attention does not support {q_BTHD.dtype}", "use fp32, fp16 or bf16")
    if q_BTHD.shape[-1] > MAX_HEAD_DIM:
        raise ModelError(
            f"triton attention supports head sizes up to {MAX_HEAD_DIM}, not {q_BTHD.shape[-1]}",
            "use sdpa_efficient",
        )
    if q_BTHD.dtype == torch.bfloat16 and q_BTHD.is_cuda and _capability(q_BTHD) < 80:
        raise ModelError("bf16 requires a GPU of capability 8.0", "use fp16")
    assert q_BTHD.dtype == k_BSKD.dtype == v_BSKD.dtype, (q_BTHD.dtype, k_BSKD.dtype, v_BSKD.dtype)
    assert k_BSKD.shape == v_BSKD.shape, (k_BSKD.shape, v_BSKD.shape)
    assert q_BTHD.shape[1] * q_BTHD.shape[2] < 1 << 31, (
        "row indices of one key/value head must fit into 32 bits"
    )


def _with_supported_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns x if the kernels support its strides; a copy if a head is not contiguous or row strides are too large."""
    is_supported = x.stride(-1) == 1 and x.stride(1) < MAX_STRIDE and x.stride(2) < MAX_STRIDE
    return x if is_supported else x.contiguous()


def _as_kernel_arguments(
    x: torch.Tensor, y: torch.Tensor, heads: int, rows: int, capability: int
) -> tuple[Any, Any, bool]:
    """Two tensors as kernel arguments: TMA descriptors where possible, else pointers.

    Tiles are `rows` of (token, head), `heads` per token. Results are bitwise identical.
    """
    if capability < 90 or rows % heads or not (_supports_tma(x) and _supports_tma(y)):
        return x, y, False
    block = [1, rows // heads, heads, padded(x.shape[-1])]
    described = (TensorDescriptor(z, list(z.shape), list(z.stride()), block) for z in (x, y))
    return *described, True


def _supports_tma(x: torch.Tensor) -> bool:
    """Whether TMA supports the strides: multiples of 16 bytes, none of them zero."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.element_size() == 2 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in steps)


def _capability(x: torch.Tensor) -> int:
    if not x.is_cuda:
        return 75  # the interpreter: the smallest tiles, so that small tests cross tile boundaries
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def _factors(arguments: KernelArguments) -> tuple[float, float]:
    """Returns the factors (on the raw product, after tanh) that give scores in units of log 2."""
    if arguments.softcap:
        return arguments.scale / arguments.softcap, arguments.softcap * math.log2(math.e)
    return arguments.scale * math.log2(math.e), 1.0


def _constants(
    q_BTHD: torch.Tensor, group: int, bounds: torch.Tensor | None, arguments: KernelArguments, chosen: Tiles
) -> dict[str, Any]:
    return {
        "G": group,
        "D": q_BTHD.shape[-1],
        "DP": padded(q_BTHD.shape[-1]),
        "BR": chosen.rows,
        "BN": chosen.keys,
        "CAUSAL": arguments.causal,
        "TWO_SIDED": not arguments.causal and (bounds is not None or arguments.window != NO_WINDOW),
        "PACKED": bounds is not None,
        "SOFTCAP": arguments.softcap > 0,
        # the tensor cores' tf32 has an error of 3e-4: far outside the tolerance of fp32
        "PRECISION": "ieee",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
