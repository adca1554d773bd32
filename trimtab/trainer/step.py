"""Forward and backward of one step: gradient accumulation, normalized by the step's token count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.trainer.setup import TrainingSetup


def forward_backward(
    setup: TrainingSetup,
    microbatches: Sequence[Any],
    num_targets: int,
    scale: float,
    before_backward: Callable[[torch.Tensor], None] | None = None,
    *,
    step: int = 0,
) -> torch.Tensor:
    """Gradient accumulation: the mean loss over `num_targets` tokens of all microbatches and processes.

    Each microbatch's summed loss is divided by the token count of the whole step before its backward, so the
    gradient does not depend on how tokens are spread over microbatches or processes. `scale` is fp16's loss
    scale, 1 otherwise. `before_backward` receives each loss. `step` counts from 0.
    """
    total = accumulate(setup, microbatches, num_targets, scale, before_backward, step=step)
    setup.mesh.sum_gradients(setup.parameters.values())
    return setup.mesh.sum_(total) / num_targets


def accumulate(
    setup: TrainingSetup,
    microbatches: Sequence[Any],
    num_targets: int,
    scale: float,
    before_backward: Callable[[torch.Tensor], None] | None = None,
    *,
    step: int = 0,
    first: int = 0,
    eager: bool = False,
) -> torch.Tensor:
    """This process's part of `forward_backward`: the sum of its token losses, without communication.

    `first` is the index of the first microbatch within the step; `eager` uses no CUDA graphs.
    """
    total = torch.zeros((), dtype=torch.float32, device=setup.device)
    for index, batch in enumerate(microbatches, first):
        if setup.before_microbatch is not None:
            setup.before_microbatch(step, index, batch)
        total += setup.microstep.backward(batch, scale / num_targets, before_backward, eager=eager)
    return total
