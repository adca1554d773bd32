"""RoPE, with and without query and key norms, compared with torch, torch.compile and Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.passes import Entry, compiled, two_passes
from trimtab.kernels.rope import rope, spec
from trimtab.lab.contests import Contest, missing


def caller(impl: str) -> Callable[..., Any]:
    def call(q, k, cos, sin, q_weight=None, k_weight=None):  # type: ignore[no-untyped-def]
        return rope(q, k, cos, sin, q_weight_D=q_weight, k_weight_D=k_weight, eps=1e-6, impl=impl)

    return call


def entries(case: spec.Contest) -> tuple[dict[str, Entry], dict[str, str]]:
    found = {
        "triton": Entry(caller("triton"), ours=True),
        "reference": Entry(caller("reference")),
        "torch.compile": Entry(compiled(caller("reference"))),
    }
    absent = {}
    if reason := missing("liger_kernel"):
        absent["Liger"] = reason
    elif case.norm:
        absent["Liger"] = "its RoPE kernel has no norms"
    else:
        from liger_kernel.ops.rope import LigerRopeFunction

        def liger(q, k, cos, sin):  # type: ignore[no-untyped-def]
            rotated = LigerRopeFunction.apply(
                q.transpose(1, 2), k.transpose(1, 2), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
            )
            return tuple(x.transpose(1, 2) for x in rotated)

        found["Liger"] = Entry(liger, in_place=True)
    return found, absent


def cases() -> list[Contest]:
    """Heads of models at 16,384 tokens."""
    found: list[Contest] = []
    for case in spec.LARGE_CASES:
        moved = partial(spec.bytes_moved, case.B * case.T, case.H, case.K, case.D, "bf16", norm=case.norm)
        found += two_passes(
            "rope",
            case.name,
            make=partial(spec.make_inputs, case, "bf16", "cuda"),
            entries=partial(entries, case),
            bytes_moved=lambda backward, moved=moved: moved(backward=backward),  # type: ignore[misc]
            frozen=("cos", "sin"),
        )
    return found
