"""The weighted sum compared with torch's own product and torch.compile, from the cases of its spec."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.passes import Entry, compiled, two_passes
from trimtab.kernels.weighted_sum import spec, weighted_sum
from trimtab.lab.contests import Contest


def entries() -> tuple[dict[str, Entry], dict[str, str]]:
    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weighted_sum(x, w, impl="reference")

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weighted_sum(x, w, impl="triton")

    return {
        "triton": Entry(ours, ours=True),
        "reference": Entry(reference),
        "torch.mv": Entry(lambda x, w: torch.mv(x, w)),
        "torch.compile": Entry(compiled(reference)),
    }, {}


def cases() -> list[Contest]:
    """Forward and backward at a model's size."""
    case = spec.LARGE_CASES[0]

    def make() -> dict[str, torch.Tensor]:
        return dict(zip(("x", "w"), spec.make_inputs(case, "bf16", "cuda"), strict=True))

    moved = partial(spec.bytes_moved, case.N, case.D, "bf16")
    return two_passes(
        "weighted_sum",
        f"{case.N}x{case.D}",
        make=make,
        entries=entries,
        bytes_moved=lambda backward: moved(backward=backward),
    )
