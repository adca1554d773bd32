"""Matrix products of training: the shapes of linear layers and their gradients, per dtype.

Legend: m tokens, n output features, k input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn import functional as F

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES, TORCH_NAMES
from trimtab.facts.operations import OperationKind
from trimtab.lab.probes import Probe, ProbeGroup, matmul_precision
from trimtab.lab.timing import time_once

Sizes = tuple[int, int, int]
"""(m, n, k)."""

TOKENS = {"cuda": (4096, 512, 2048, 8192, 16384), "cpu": (512, 128, 2048)}
"""The most informative first: a slow device skips the last ones."""
WIDTHS = {
    "cuda": (
        (4096, 4096), (2048, 2048), (1024, 1024), (14336, 4096), (4096, 14336), (3072, 1024), (1024, 3072),
        (8192, 2048), (2048, 8192), (1024, 4096), (512, 2048), (2048, 1024), (1024, 2048), (16, 4096), (4096, 16),
        (16, 1024), (1024, 16), (576, 576), (1536, 576), (576, 1536), (4864, 896), (896, 4864), (128, 896),
        (8960, 1536), (1536, 8960), (6144, 2048), (2048, 6144), (16, 2048), (2048, 16), (8192, 8192), (28672, 8192),
        (8192, 28672),
    ),
    "cpu": (
        (1024, 1024), (576, 576), (256, 256), (1536, 576), (576, 1536), (3072, 1024), (1024, 3072), (2048, 2048),
        (16, 576), (576, 16),
    ),
}  # fmt: skip
"""(n, k) of layers of models from 0.1 to 70 B parameters, and of adapters of rank 16."""
BRIEF = 6
"""Number of products in dtypes other than the training dtype."""
LONGEST_SECONDS = {"cuda": 0.02, "cpu": 0.03}
"""Estimated seconds of one product; longer ones are skipped."""
SLOWEST = 10.0
"""A dtype that is this many times slower than fp32 on a CPU is skipped."""
PROBED = {"cuda": 4096, "cpu": 256}
"""Size of the square product that estimates a rate."""


def product_dtypes(device: DeviceFacts) -> tuple[str, ...]:
    """The dtypes to measure, the training dtype first.

    Example:
        >>> product_dtypes(DeviceFacts("a GPU", "cuda", 2**34, capability=(7, 5)))
        ('fp32', 'fp16')
    """
    if device.kind == "cuda":
        ampere = device.bf16
        return ("bf16", "fp16", "tf32", "fp32") if ampere else ("fp32", "fp16")
    usual = ("bf16", "fp32") if device.bf16 else ("fp32", "bf16")
    return (*usual, "fp16")


def probe_rate(kind: str, dtype: str) -> float:
    """Estimates FLOP/s from a square product: the best of three."""
    size = PROBED[kind]
    a, b = (torch.randn(size, size, device=kind).to(torch_dtype(dtype)) for _ in range(2))
    with matmul_precision("high" if dtype == "tf32" else "highest"):
        times = [time_once(lambda: a @ b, kind) for _ in range(4)]
    return 2.0 * size**3 / min(times[1:])


def product_groups(
    device: DeviceFacts, dtype: str, rate: float, free_bytes: int, *, brief: bool = False
) -> Iterator[ProbeGroup]:
    """Groups of one dtype, the most informative first.

    Args:
        device: the device to measure.
        dtype: fp32, tf32, bf16 or fp16.
        rate: from `probe_rate`.
        free_bytes: free memory of the device; larger groups are skipped.
        brief: only the first sizes, for a dtype in which nothing is trained by default.
    """
    kind = device.kind
    for m in TOKENS[kind][: 1 if brief else None]:
        for n, k in WIDTHS[kind][: BRIEF if brief else None]:
            nbytes = (m * k + n * k + m * n) * BYTES["fp32" if dtype == "tf32" else dtype] * 2
            if 2.0 * m * n * k / rate > LONGEST_SECONDS[kind] or nbytes > free_bytes // 4:
                continue
            precision = partial(matmul_precision, "high") if dtype == "tf32" else nullcontext
            label = f"{dtype} product {m} × {n} × {k}"
            yield ProbeGroup(label, partial(_products, kind, dtype, (m, n, k)), nbytes, precision)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name; fp32 for TF32, whose operands are fp32 tensors."""
    dtype = getattr(torch, TORCH_NAMES["fp32" if name == "tf32" else name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _products(device: str, dtype: str, sizes: Sizes) -> list[Probe]:
    """A linear layer's product, and the products of its input gradient and weight gradient."""
    m, n, k = sizes
    kind = torch_dtype(dtype)
    x_MK = torch.randn(m, k, device=device, dtype=kind)
    weight_NK = torch.randn(n, k, device=device, dtype=kind)
    grad_MN = torch.randn(m, n, device=device, dtype=kind)
    flops = 2.0 * m * n * k
    moved = float((m * k + n * k + m * n) * kind.itemsize)
    runs = (
        (lambda: F.linear(x_MK, weight_NK), "", (m, n, k)),
        (lambda: grad_MN @ weight_NK, "input gradient", (m, k, n)),
        (lambda: grad_MN.t() @ x_MK, "weight gradient", (n, k, m)),
    )
    return [
        Probe(OperationKind.PRODUCT, dtype, flops, moved, run, backward=bool(impl), impl=impl, dims=dims)
        for run, impl, dims in runs
    ]
