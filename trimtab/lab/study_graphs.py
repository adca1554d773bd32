"""A part of a study step as CUDA graphs: captured once, replayed as one launch.

A graph has all kernels of a pass with the addresses they read and write, so that the host launches them at once.
Captured are the forward pass, the backward pass behind a captured forward pass, or both in one graph. The optimizer
step runs eagerly behind the replay, as in `trimtab.trainer.graphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.lab.step_settings import Part
from trimtab.lab.study_step import StudyStep
from trimtab.lab.timing import Run

WARM_UP = 3
"""Passes on a side stream before a capture, as torch's documentation asks for: libraries are set up, and kernels
compiled, which a capture must not contain."""


class GraphStep:
    """A captured part of a step. Inputs and gradients stay where they are: every replay writes the same tensors.

    Example:
        >>> captured = GraphStep(step, Part.FORWARD_BACKWARD)                        # doctest: +SKIP
        >>> captured.prepared()()                                                    # doctest: +SKIP
    """

    def __init__(self, step: StudyStep, part: Part) -> None:
        self.step, self.part = step, part
        self._warm_up()
        self._pool: Any = None
        self.loss = torch.empty(0)
        self.first: torch.cuda.CUDAGraph | None = None
        """The forward pass, where it is a graph of its own."""
        if part in (Part.FORWARD, Part.BACKWARD):
            self.first = self._capture(self._forward)
        self.last = self.first
        """What is timed."""
        if part is Part.BACKWARD:
            self.last = self._capture(lambda: step.backward(self.loss))
        elif part is not Part.FORWARD:
            self.last = self._capture(self._forward_backward)

    def prepared(self) -> Run:
        """What is timed; before a backward pass the captured forward pass runs."""
        assert self.last is not None
        if self.part is Part.BACKWARD:
            assert self.first is not None
            self.first.replay()
        if self.part is Part.FULL:
            return self._full
        return self.last.replay

    def verify(self) -> tuple[float, tuple[float, ...]]:
        """(loss, gradient norms) of a replay into zeroed tensors: what is not computed anew is seen to be missing.

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
        """Gradients are dropped before: a captured backward pass writes new ones instead of adding to old ones."""
        self.step.drop_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph
