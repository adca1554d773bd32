"""SwiGLU and GeGLU compared with torch, torch.compile and Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.passes import Entry, compiled, two_passes
from trimtab.kernels.gated_mlp import gated_activation, spec
from trimtab.lab.contests import Contest, missing


def caller(impl: str, activation: str) -> Callable[..., Any]:
    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gated_activation(gate, up, activation=activation, impl=impl)

    return call


def entries(case: spec.Contest) -> tuple[dict[str, Entry], dict[str, str]]:
    found = {
        "triton": Entry(caller("triton", case.activation), ours=True),
        "reference": Entry(caller("reference", case.activation)),
        "torch.compile": Entry(compiled(caller("reference", case.activation))),
    }
    absent = {}
    if reason := missing("liger_kernel"):
        absent["Liger"] = reason
    else:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        function = LigerSiLUMulFunction if case.activation == "silu" else LigerGELUMulFunction
        # its backward overwrites gate and up with the gradients
        found["Liger"] = Entry(lambda gate, up: function.apply(gate, up), in_place=True)
    return found, absent


def cases() -> list[Contest]:
    """The intermediate sizes of a Llama and a Gemma model."""
    found: list[Contest] = []
    for case in spec.LARGE_CASES:
        moved = partial(spec.bytes_moved, case.N, case.W, "bf16")
        found += two_passes(
            "gated_mlp",
            case.name,
            make=partial(spec.make_inputs, case, "bf16", "cuda"),
            entries=partial(entries, case),
            bytes_moved=lambda backward, moved=moved: moved(backward=backward),  # type: ignore[misc]
        )
    return found
