"""Captures a part of a study step as CUDA graphs, which replay with one launch.

A graph contains all kernels of a pass with their addresses. It captures the forward pass, the backward pass after a
captured forward pass, or both in one graph. The optimizer step runs eagerly after the replay, as in
`trimtab.trainer.graphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.lab.step_settings import TimedPart
from trimtab.lab.study_step import StudyStep
from trimtab.lab.timing import Run

WARM_UP = 3
"""Passes on a side stream before a capture, as torch's documentation requires: they initialize libraries and compile
kernels, which a capture must not contain."""


class GraphStep:
    """A captured part of a step. Inputs and gradients are static: every replay writes the same tensors.

    Example:
        >>> captured = GraphStep(step, TimedPart.FORWARD_BACKWARD)                        # doctest: +SKIP
        >>> captured.prepared()()                                                    # doctest: +SKIP
    """

    def __init__(self, step: StudyStep, part: TimedPart) -> None:
        self.step, self.part = step, part
        self._warm_up()
        self._pool: Any = None
        self.loss = torch.empty(0)
        self.first: torch.cuda.CUDAGraph | None = None
        """The forward pass, if it is a separate graph."""
        if part in (TimedPart.FORWARD, TimedPart.BACKWARD):
            self.first = self._capture(self._forward)
        self.last = self.first
        """The timed graph."""
        if part is TimedPart.BACKWARD:
            self.last = self._capture(lambda: step.backward(self.loss))
        elif part is not TimedPart.FORWARD:
            self.last = self._capture(self._forward_backward)

    def prepared(self) -> Run:
        """Returns the timed run; before a backward pass it replays the captured forward pass."""
        assert self.last is not None
        if self.part is TimedPart.BACKWARD:
            assert self.first is not None
            self.first.replay()
        if self.part is TimedPart.FULL:
            return self._full
        return self.last.replay

    def verify(self) -> tuple[float, tuple[float, ...]]:
        """(loss, gradient norms) of a replay into zeroed tensors, which reveals values that are not recomputed.

        A forward pass alone has no gradients.
        """
        gradients = [p.grad for p in self.step.parameters if p.grad is not None]
        for tensor in (self.loss.detach(), *gradients):
            tensor.zero_()
        for graph in dict.fromkeys((self.first, self.last)):
            if graph is not None:
                graph.replay()
        norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).tolist() if gradients else []
        return float(self.loss.detach()), tuple(norms)

    def _forward(self) -> None:
        self.loss = self.step.forward()

    def _forward_backward(self) -> None:
        self._forward()
        self.step.backward(self.loss)

    def _full(self) -> None:
        assert self.last is not None
        self.last.replay()
        self.step.optimizer.step()

    def _warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.step.forward_backward()
                self.step.drop_gradients()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures a run, after freeing gradients: a captured backward pass then writes gradients instead of adding."""
        self.step.drop_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph
