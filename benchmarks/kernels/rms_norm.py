"""RMSNorm, alone and with the residual addition, compared with torch, torch.compile and Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.passes import Entry, compiled, two_passes
from trimtab.kernels.rms_norm import add_rms_norm, rms_norm, spec
from trimtab.lab.contests import Contest, missing


def caller(impl: str, eps: float) -> Callable[..., Any]:
    def call(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return rms_norm(x, weight, eps, impl=impl)
        return add_rms_norm(x, residual, weight, eps, impl=impl)

    return call


def entries(case: spec.Contest) -> tuple[dict[str, Entry], dict[str, str]]:
    found = {
        "triton": Entry(caller("triton", case.eps), ours=True),
        "reference": Entry(caller("reference", case.eps)),
        "torch.compile": Entry(compiled(caller("reference", case.eps))),
    }
    absent = {}
    if reason := missing("liger_kernel"):
        absent["Liger"] = reason
    else:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            # "gemma": fp32 arithmetic with one rounding, as in trimtab; gradients in separate tensors
            if residual is None:
                return LigerRMSNormFunction.apply(x, weight, case.eps, 0.0, "gemma", False)
            return LigerFusedAddRMSNormFunction.apply(x, residual, weight, case.eps, 0.0, "gemma", False)

        found["Liger"] = Entry(liger)
    return found, absent


def cases() -> list[Contest]:
    """Widths of models with their token counts, and heads as rows (query and key norms)."""
    found: list[Contest] = []
    for case in spec.LARGE_CASES[:-1]:
        moved = partial(spec.bytes_moved, case.N, case.D, "bf16", residual=case.residual)
        found += two_passes(
            "rms_norm",
            case.name,
            make=partial(spec.make_inputs, case, "bf16", "cuda"),
            entries=partial(entries, case),
            bytes_moved=lambda backward, moved=moved: moved(backward=backward),  # type: ignore[misc]
        )
    return found
