"""The AdamW step in torch, in chunks that bound the memory of fp32 copies."""

# N elements of a flattened parameter

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.adamw.spec import STREAMS
from trimtab.kernels.adamw8bit.spec import CHUNK
from trimtab.kernels.adamw8bit.update import Snapshot, apply_, moments_
from trimtab.kernels.stochastic_rounding import stochastic_round_


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    step: int,
    grad_scale: torch.Tensor | float = 1.0,
    seed: int = 0,
    param_index: int = 0,
    stochastic_rounding: bool = True,
    skip: torch.Tensor | None = None,
    **hyper: float,
) -> None:
    """See `trimtab.kernels.adamw.adamw_step`."""
    stored = {"weight": param.view(-1), "exp_avg": exp_avg.view(-1), "exp_avg_sq": exp_avg_sq.view(-1)}
    grad_N = grad.reshape(-1)
    place: dict[str, Any] = {"seed": seed, "step": step, "param_index": param_index}
    size = CHUNK["cpu" if param.device.type == "cpu" else "cuda"]
    for start in range(0, param.numel(), size):
        piece = slice(start, start + size)
        kept = Snapshot([t[piece] for t in stored.values()], skip)
        # .float() of an fp32 tensor returns the tensor itself, so that its update is in place
        values = {key: t[piece].float() for key, t in stored.items()}
        gradient = grad_N[piece].float() * grad_scale
        moments_(values["exp_avg"], values["exp_avg_sq"], gradient, beta1=beta1, beta2=beta2)
        apply_(
            values["weight"], values["exp_avg"], values["exp_avg_sq"].sqrt(),
            beta1=beta1, beta2=beta2, step=step, **hyper,
        )  # fmt: skip
        for key, value in values.items():
            out = stored[key][piece]
            if out.dtype == torch.float32:
                continue
            if stochastic_rounding:
                stochastic_round_(out, value, **place, stream=STREAMS[key], offset=start)
            else:
                out.copy_(value)
        kept.restore()
