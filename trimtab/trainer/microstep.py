"""Forward and backward of one microbatch: eager, or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class LossSum(NamedTuple):
    """The token losses of a microbatch, added up, and how many there are."""

    total: torch.Tensor
    """0-dim, fp32, on the device."""
    num_targets: int


class Graphs(Protocol):
    """Forward and backward of a microbatch in one launch (`trainer.graphs`)."""

    def backward(self, batch: Any, factor: float) -> torch.Tensor: ...
    def release(self) -> None: ...


class MicroStep:
    """Adds the gradients of a microbatch to the parameters.

    Args:
        loss: a microbatch to the sum of its token losses and their number.
        graphs: runs forward and backward in one launch, where it is given; `loss` and autograd serve what is rare.

    Example:
        >>> microstep = MicroStep(lambda batch: LossSum((weight * batch).sum(), 4))  # doctest: +SKIP
        >>> microstep.backward(batch, factor=1 / 4)  # doctest: +SKIP
    """

    def __init__(self, loss: Callable[[Any], LossSum], graphs: Graphs | None = None) -> None:
        self.loss, self.graphs = loss, graphs

    def backward(
        self,
        batch: Any,
        factor: float,
        before_backward: Callable[[torch.Tensor], None] | None = None,
        *,
        eager: bool = False,
    ) -> torch.Tensor:
        """Accumulate the gradients of `factor` times the loss; returns the sum of the token losses.

        Args:
            batch: the microbatch.
            factor: the loss scale over the number of target tokens of the whole step.
            before_backward: called with the loss before the backward pass; never with CUDA graphs.
            eager: do not use CUDA graphs.
        """
        if self.graphs is not None and not eager:
            return self.graphs.backward(batch, factor)
        loss = self.loss(batch).total
        if before_backward is not None:
            before_backward(loss.detach())
        (loss * factor).backward()
        return loss.detach()

    def release(self) -> None:
        """Free the captured graphs and their memory, gradients included; they are captured again when needed."""
        if self.graphs is not None:
            self.graphs.release()
