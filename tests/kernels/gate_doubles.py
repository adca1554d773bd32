"""The gate's kernels with launches that torch computes, so that whole models run on a CPU and every storage is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F


class Launched:
    """A kernel that a function stands in for."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def _forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any) -> None:
    out.view_as(gate).copy_(F.silu(gate) * up)


def _backward(
    g: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_out: torch.Tensor,
    up_out: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    share = torch.sigmoid(gate)
    d_gate, d_up = g * up * (share + gate * share * (1 - share)), g * gate * share
    gate_out.view_as(gate).copy_(d_gate)
    up_out.view_as(gate).copy_(d_up)


def double_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; skips it where there is no Triton."""
    pytest.importorskip("triton")
    from trimtab.kernels.gated_mlp import impl_triton

    monkeypatch.setattr(impl_triton, "_forward_kernel", Launched(_forward))
    monkeypatch.setattr(impl_triton, "_backward_kernel", Launched(_backward))
