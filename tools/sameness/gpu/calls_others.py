"""Calls of the quantization, optimizer and loss kernels; see `calls.py`."""

# M rows, N, K sizes of a weight, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tools.sameness.gpu.calls import DTYPES, backward, ones


def _nf4(dtype: str, shape: tuple[int, int], *, block: int = 64, double: bool = True) -> None:
    from trimtab.kernels import nf4

    weight = nf4.quantize(ones(*shape, dtype=dtype, trained=False), block=block, double=double)
    for wanted in DTYPES.values():
        for transposed in (False, True):
            nf4.dequantize(weight, dtype=wanted, transposed=transposed)
    nf4.dequantize(weight, out=torch.empty(shape, dtype=DTYPES[dtype], device="cuda"))
    for rows in (1, 2, 3):
        nf4.matmul(ones(rows, shape[1], dtype=dtype, trained=False), weight)


def _int8(dtype: str, granularity: str, scheme: str, *, columns: int = 1024) -> None:
    from trimtab.kernels import int8

    weight = ones(96, columns, dtype=dtype, trained=False)
    found = int8.quantize(weight, granularity=granularity, scheme=scheme)
    for wanted in DTYPES.values():
        int8.dequantize(found, dtype=wanted)


def quantization_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """NF4 and INT8: quantize, dequantize, products of one and two rows."""
    for dtype in DTYPES:
        yield f"nf4/{dtype}/double", partial(_nf4, dtype, (256, 1024))
        yield f"nf4/{dtype}/single", partial(_nf4, dtype, (256, 1024), double=False)
        yield f"nf4/{dtype}/block-128", partial(_nf4, dtype, (256, 1024), block=128)
        yield f"nf4/{dtype}/large", partial(_nf4, dtype, (4096, 4096))
        yield f"nf4/{dtype}/odd", partial(_nf4, dtype, (131, 576))
        for granularity in ("tensor", "row", "group"):
            for scheme in ("absmax", "affine"):
                yield f"int8/{dtype}/{granularity}/{scheme}", partial(_int8, dtype, granularity, scheme)
        yield f"int8/{dtype}/row/long", partial(_int8, dtype, "row", "absmax", columns=14336)


def _adamw(dtype: str, gradient: str, shape: tuple[int, ...], *, impl: str, stochastic: bool = True) -> None:
    from trimtab.kernels.adamw8bit import adamw8bit_step, new_state

    param = ones(*shape, dtype=dtype, trained=False)
    adamw8bit_step(
        param, ones(*shape, dtype=gradient, trained=False), new_state(param), lr=1e-3, beta1=0.9, beta2=0.999,
        eps=1e-8, weight_decay=0.1, step=3, seed=1, param_index=2, stochastic_rounding=stochastic, impl=impl,
    )  # fmt: skip


def _adamw_floating(weight: str, moment: str, gradient: str, shape: tuple[int, ...]) -> None:
    from trimtab.kernels.adamw import adamw_step

    param, grad = (ones(*shape, dtype=dtype, trained=False) for dtype in (weight, gradient))
    moments = (ones(*shape, dtype=moment, trained=False) for _ in range(2))
    adamw_step(
        param, grad, *moments, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3, seed=1,
        param_index=2, impl="triton",
    )  # fmt: skip


def _rounding(count: int) -> None:
    from trimtab.kernels.stochastic_rounding import stochastic_round_

    out, value = ones(count, trained=False), ones(count, dtype="fp32", trained=False)
    stochastic_round_(out, value, seed=1, step=2, param_index=3, impl="triton")


def _weighted_sum(dtype: str) -> None:
    from trimtab.kernels.weighted_sum import weighted_sum

    backward(weighted_sum(ones(64, 576, dtype=dtype), ones(576, dtype=dtype), impl="triton"))


def optimizer_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """AdamW by dtypes of weight, moments and gradient, stochastic rounding, the example kernel."""
    for impl in ("triton", "triton_exact"):
        for dtype, gradient in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
            for shape in ((256, 1024), (131, 300), (576,)):
                size = "x".join(map(str, shape))
                yield (
                    f"adamw8bit/{impl}/{dtype}-{gradient}/{size}",
                    partial(_adamw, dtype, gradient, shape, impl=impl),
                )
        yield (
            f"adamw8bit/{impl}/nearest",
            partial(_adamw, "bf16", "bf16", (256, 1024), impl=impl, stochastic=False),
        )
    for dtypes in (
        ("bf16", "fp32", "bf16"),
        ("bf16", "fp32", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("fp32", "bf16", "fp32"),
    ):
        for shape in ((256, 1024), (131, 300), (577,)):
            size = "x".join(map(str, shape))
            yield f"adamw/{'-'.join(dtypes)}/{size}", partial(_adamw_floating, *dtypes, shape)
    for count in (4096, 1000):
        yield f"stochastic_rounding/{count}", partial(_rounding, count)
    for dtype in DTYPES:
        yield f"weighted_sum/{dtype}", partial(_weighted_sum, dtype)


def _loss(dtype: str, V: int, *, bias: bool = False, frozen: bool = False, **more: Any) -> None:
    from trimtab.kernels.linear_cross_entropy import linear_cross_entropy

    N, C = 256, 256
    hidden, weight = ones(N, C, dtype=dtype), ones(V, C, dtype=dtype, trained=not frozen)
    labels = torch.arange(N, device="cuda") % V
    bias_V = ones(V, dtype=dtype) if bias else None
    backward(linear_cross_entropy(hidden, weight, labels, bias_V=bias_V, impl="triton", **more))


def loss_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Linear cross-entropy by vocabulary, objective and memory."""
    for dtype in DTYPES:
        for V in (4096, 32000, 128256, 151936):
            yield f"linear_cross_entropy/{dtype}/{V}", partial(_loss, dtype, V, reduction="sum")
    options: dict[str, dict[str, Any]] = {
        "frozen": {"frozen": True},
        "bias": {"bias": True},
        "mean": {"reduction": "mean"},
        "none": {"reduction": "none"},
        "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-3},
        "softcap": {"softcap": 30.0},
        "chunks": {"chunk_tokens": 64},
        "many-chunks": {"chunk_tokens": 4},
        "all-logits": {"memory_bytes": 2**30},
    }
    for name, more in options.items():
        yield (
            f"linear_cross_entropy/bf16/32000/{name}",
            partial(_loss, "bf16", 32000, **{"reduction": "sum", **more}),
        )
