"""The gated activation with launches computed by torch, so that models run on a CPU and every storage is tracked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F


class Launched:
    """A function in place of a kernel."""

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
    """Replaces the launches until the test ends; skips it without Triton."""
    pytest.importorskip("triton")
    from trimtab.kernels.gated_mlp import impl_triton

    monkeypatch.setattr(impl_triton, "_gated_mlp_forward_kernel", Launched(_forward))
    monkeypatch.setattr(impl_triton, "_gated_mlp_backward_kernel", Launched(_backward))
