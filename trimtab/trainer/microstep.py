"""Forward and backward of one microbatch: eager, or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from trimtab.facts.phases import During, RunPhase, no_phase


class LossSum(NamedTuple):
    """The sum of a microbatch's token losses, and the number of target tokens."""

    total: torch.Tensor
    """0-dim, fp32, on the device."""
    num_targets: int


class Graphs(Protocol):
    """Forward and backward of a microbatch in one launch (`trainer.graphs`)."""

    captures: int

    def backward(self, batch: Any, factor: float) -> torch.Tensor: ...
    def release(self) -> None: ...


class MicroStep:
    """Adds the gradients of a microbatch to the parameters.

    Args:
        loss: maps a microbatch to the sum of its token losses and their number.
        graphs: if given, runs forward and backward, captured or eager; `loss` is then called only with `eager=True`.
        prepare: if given, called before each microbatch (`trainer.gpu_memory`).
        during: called with each phase; the context manager that it returns explains out-of-memory errors raised inside.

    Example:
        >>> microstep = MicroStep(lambda batch: LossSum((weight * batch).sum(), 4))  # doctest: +SKIP
        >>> microstep.backward(batch, factor=1 / 4)  # doctest: +SKIP
    """

    def __init__(
        self,
        loss: Callable[[Any], LossSum],
        graphs: Graphs | None = None,
        *,
        prepare: Callable[[], None] | None = None,
        during: During = no_phase,
    ) -> None:
        self.loss, self.graphs, self.prepare, self.during = loss, graphs, prepare, during

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
        if self.prepare is not None:
            self.prepare()
        if self.graphs is not None and not eager:
            return self.graphs.backward(batch, factor)
        with self.during(RunPhase.FORWARD):
            loss = self.loss(batch).total
        if before_backward is not None:
            before_backward(loss.detach())
        with self.during(RunPhase.BACKWARD):
            (loss * factor).backward()
        return loss.detach()

    @property
    def captures(self) -> int:
        """Number of attempted CUDA graph captures so far, failed ones included.

        A step that captures takes longer than the others.
        """
        return self.graphs.captures if self.graphs is not None else 0

    def release(self) -> None:
        """Free the captured graphs and their memory, gradients included; they are captured again when needed."""
        if self.graphs is not None:
            self.graphs.release()
