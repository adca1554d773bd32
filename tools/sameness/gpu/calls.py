"""Calls of every kernel package's public functions, in the dtypes and sizes that training uses.

Names and arguments are those that all compared commits have. Values do not matter: kernels are not run.
"""

# B batch, T tokens, S keys, H query heads, K key/value heads, D head size, N rows, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (64, 576, 896, 1024, 2048, 2560, 3584, 4096, 5120, 8192)
"""Hidden sizes of well-known models, from SmolLM2-135M to Llama 70B."""
HEADS = {64: ((4, 4), (14, 2), (9, 3)), 128: ((4, 1), (16, 16), (10, 2))}
"""By head size: (query heads, key/value heads) besides 8 and 2."""


def ones(*shape: int, dtype: str = "bf16", trained: bool = True) -> torch.Tensor:
    """A tensor on the device."""
    return torch.ones(shape, dtype=DTYPES[dtype], device="cuda").requires_grad_(trained)


def backward(*outputs: torch.Tensor) -> None:
    """The backward pass from gradients of ones."""
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])


def _attention(
    dtype: str,
    D: int,
    *,
    packed: bool,
    heads: tuple[int, int] = (8, 2),
    window: int | None = None,
    softcap: float | None = None,
    spare: int = 0,
) -> None:
    """`spare` elements lie between two heads, so that TMA cannot read them."""
    from trimtab.kernels.attention import Layout, attention

    (H, K), T = heads, 512
    q, k, v = (ones(2, T, n, D + spare, dtype=dtype)[..., :D] for n in (H, K, K))
    documents_BT = torch.arange(2 * T).reshape(2, T) // 200
    layout = Layout.packed(documents_BT) if packed else Layout.causal()
    backward(attention(q, k, v, layout=layout, window=window, softcap=softcap, impl="triton"))


def _attention_options(
    dtype: str, D: int, *, packed: bool = False, part: bool = False, **options: Any
) -> None:
    """With log-sum-exp and sinks, both with gradients; `part`: queries of later positions than the keys."""
    from trimtab.kernels.attention import Layout, attention

    T, S = (256, 192) if part else (256, 256)
    q, k, v = (ones(2, t, n, D, dtype=dtype) for t, n in ((T, 8), (S, 2), (S, 2)))
    documents_BL = torch.arange(2 * 448).reshape(2, 448) // 200
    layout = Layout.packed(documents_BL[:, :T]) if packed else Layout.causal()
    if part:
        layout = Layout.packed(documents_BL).from_key(0) if packed else layout
        options["offset"] = 192
    sinks_H = ones(8, dtype=dtype)
    backward(*attention(q, k, v, layout=layout, sinks_H=sinks_H, return_lse=True, impl="triton", **options))


def _decode(dtype: str, D: int) -> None:
    """One query against a key/value cache."""
    from trimtab.kernels.attention import Layout, attention

    q, k, v = (ones(2, t, n, D, dtype=dtype, trained=False) for t, n in ((1, 8), (257, 2), (257, 2)))
    attention(q, k, v, layout=Layout.causal(), impl="triton")


def attention_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every tile configuration of an H200; group sizes, windows, soft caps, strides."""
    for kind in ("packed", "causal"):
        call = partial(_attention, packed=kind == "packed")
        for dtype in DTYPES:
            for D in (64, 80, 96, 128, 256):
                yield f"attention/{dtype}/{D}/{kind}", partial(call, dtype, D)
        for D, found in HEADS.items():
            for heads in found:
                yield (
                    f"attention/bf16/{D}/{kind}/heads-{heads[0]}-{heads[1]}",
                    partial(call, "bf16", D, heads=heads),
                )
        for D in (64, 128):
            yield f"attention/bf16/{D}/{kind}/window", partial(call, "bf16", D, window=96)
        yield f"attention/bf16/128/{kind}/softcap", partial(call, "bf16", 128, softcap=50.0)
        yield f"attention/bf16/64/{kind}/strided", partial(call, "bf16", 64, spare=1)
        for D in (64, 128, 256):
            options = partial(_attention_options, "bf16", D, packed=kind == "packed")
            yield f"attention/bf16/{D}/{kind}/lse-sinks", options
            yield f"attention/bf16/{D}/{kind}/part", partial(options, part=True)
            yield f"attention/bf16/{D}/{kind}/bidirectional", partial(options, causal=False)
            yield f"attention/bf16/{D}/{kind}/bidirectional-window", partial(options, causal=False, window=96)
    for dtype in DTYPES:
        yield f"attention/{dtype}/128/decode", partial(_decode, dtype, 128)


def _norm(dtype: str, D: int, *, added: bool, weight: str | None = None, trained: bool = True) -> None:
    from trimtab.kernels.rms_norm import add_rms_norm, rms_norm

    x, w = ones(2, 256, D, dtype=dtype), ones(D, dtype=weight or dtype, trained=trained)
    if added:
        backward(*add_rms_norm(x, ones(2, 256, D, dtype=dtype), w, 1e-6, impl="triton"))
    else:
        backward(rms_norm(x, w, 1e-6, impl="triton"))


def _branch(dtype: str, D: int, *, following: bool, trained: bool = True) -> None:
    from trimtab.kernels.rms_norm import norm_add, norm_add_norm

    x, residual = (ones(2, 256, D, dtype=dtype) for _ in range(2))
    weights = [ones(D, dtype=dtype, trained=trained) for _ in range(1 + following)]
    if following:
        backward(*norm_add_norm(x, residual, *weights, 1e-6, offset=1.0, impl="triton"))
    else:
        backward(norm_add(x, residual, *weights, 1e-6, offset=1.0, impl="triton"))


def norm_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Both norms at every width; frozen weights (adapters), weights of fp32."""
    for name, added in (("rms_norm", False), ("add_rms_norm", True)):
        for D in WIDTHS:
            yield f"{name}/bf16/{D}", partial(_norm, "bf16", D, added=added)
        for D in (576, 1024, 4096):
            for dtype in ("fp16", "fp32"):
                yield f"{name}/{dtype}/{D}", partial(_norm, dtype, D, added=added)
            yield f"{name}/bf16/{D}/frozen", partial(_norm, "bf16", D, added=added, trained=False)
            yield f"{name}/bf16/{D}/weight-fp32", partial(_norm, "bf16", D, added=added, weight="fp32")
    for name, following in (("norm_add", False), ("norm_add_norm", True)):
        for dtype in DTYPES:
            yield f"{name}/{dtype}/1024", partial(_branch, dtype, 1024, following=following)
        for D in (576, 4096):
            yield f"{name}/bf16/{D}", partial(_branch, "bf16", D, following=following)
        yield f"{name}/bf16/1024/frozen", partial(_branch, "bf16", 1024, following=following, trained=False)


def _rope(dtype: str, D: int, *, normed: bool, heads: tuple[int, int] = (8, 2), trained: bool = True) -> None:
    from trimtab.kernels.rope import rope

    (H, K), T = heads, 256
    q, k = (ones(2, T, n, D, dtype=dtype) for n in (H, K))
    angles = [ones(2, T, D // 2, dtype="fp32", trained=False) for _ in range(2)]
    weights = [ones(D, dtype=dtype, trained=trained) if normed else None for _ in range(2)]
    backward(*rope(q, k, *angles, q_weight_D=weights[0], k_weight_D=weights[1], eps=1e-6, impl="triton"))


def _rope_options(
    dtype: str, D: int, *, R: int | None = None, norm: str | None = None, interleaved: bool = False
) -> None:
    """`norm`: of each head, or over all heads of a token."""
    from trimtab.kernels.rope import rope

    q, k = (ones(2, 256, n, D, dtype=dtype) for n in (8, 2))
    angles = [ones(2, 256, (R or D) // 2, dtype="fp32", trained=False) for _ in range(2)]
    options: dict[str, Any] = {"rotary_dim": R, "interleaved": interleaved, "impl": "triton"}
    if norm is not None:
        for name, heads in (("q", 8), ("k", 2)):
            options[f"{name}_weight_D"] = ones(heads * D if norm == "all" else D, dtype=dtype)
        options |= {"offset": 1.0, "norm_all_heads": norm == "all"}
    backward(*rope(q, k, *angles, **options))


def rope_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """With and without the norm of each head."""
    for name, normed in (("rope", False), ("rope-normed", True)):
        for dtype in DTYPES:
            for D in (64, 80, 96, 128, 256):
                yield f"{name}/{dtype}/{D}", partial(_rope, dtype, D, normed=normed)
        for heads in ((14, 2), (9, 3), (32, 8), (16, 16), (4, 1)):
            yield (
                f"{name}/bf16/128/heads-{heads[0]}-{heads[1]}",
                partial(_rope, "bf16", 128, normed=normed, heads=heads),
            )
    yield "rope-normed/bf16/128/frozen", partial(_rope, "bf16", 128, normed=True, trained=False)
    for norm in (None, "each", "all"):
        for interleaved in (False, True):
            for R in (None, 32):
                name = f"norm-{norm}/{'interleaved' if interleaved else 'halves'}/{R or 'whole'}"
                options = partial(_rope_options, norm=norm, interleaved=interleaved, R=R)
                yield f"rope-options/bf16/128/{name}", partial(options, "bf16", 128)


def _gated(dtype: str, width: int, *, activation: str = "silu", halves: bool = False) -> None:
    from trimtab.kernels.gated_mlp import gated_activation

    if halves:
        gate, up = ones(2, 64, 2 * width, dtype=dtype).chunk(2, dim=-1)
    else:
        gate, up = (ones(2, 64, width, dtype=dtype) for _ in range(2))
    backward(gated_activation(gate, up, activation=activation, impl="triton"))


def gated_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Activations, and halves of one product's output."""
    for dtype in DTYPES:
        for activation in ("silu", "gelu_tanh", "gelu"):
            yield f"gated_mlp/{dtype}/{activation}", partial(_gated, dtype, 1536, activation=activation)
        yield f"gated_mlp/{dtype}/halves", partial(_gated, dtype, 1536, halves=True)
        yield f"gated_mlp/{dtype}/14336", partial(_gated, dtype, 14336)
        yield f"gated_mlp/{dtype}/odd", partial(_gated, dtype, 1001)
