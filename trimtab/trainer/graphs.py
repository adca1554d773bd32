"""Forward and backward of a microbatch as one launch: recorded once as a CUDA graph, then replayed.

A step of a small model is a few thousand kernels of some microseconds each, and handing them to the GPU one by one
takes longer than computing them. A graph holds them all, with the addresses they read and write: what changes from
step to step is copied into the same tensors before each replay. The kernels are those of the plain step, and so is
every bit.

The first steps run plainly: kernels are compiled, libraries set up, memory measured. Then the first microbatch of a
step (whose gradients are new) and the following ones (which are added to them) are recorded, each when it first comes.
Before anything else needs the memory, evaluation say or a microbatch of fewer rows, the graphs are given up; recording
anew takes about a plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

WARM_UP = 2
"""Plain steps at the beginning of a session."""

Inputs = dict[str, torch.Tensor]


class FixedLoss(Protocol):
    """A loss in two halves: what the host prepares of a microbatch, and what the device computes from that."""

    def inputs(self, batch: Any) -> Inputs:
        """Tensors on the host; their names and shapes are the same for every microbatch."""

    def of(self, inputs: Inputs) -> torch.Tensor:
        """The sum of the token losses, of the same tensors on the device; nothing in it waits for the device."""


class Held(Protocol):
    """What a model holds from step to step besides its tensors, and a graph must know of."""

    def forget(self) -> None:
        """Gives up device memory that is only kept to be used again: it must not lie in a graph's, nor beside it."""

    def settle(self) -> None:
        """Everything queued is done: nothing of it needs to be waited for any more."""

    def join(self) -> None:
        """The current stream waits for all others that have been given work."""


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    factor: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


class Graphs:
    """Forward and backward of microbatches on a CUDA device, replayed once they are recorded.

    Args:
        loss: the two halves.
        parameters: those that are trained, by name.
        device: where they are.
        held: what the model holds besides.
        on_event: told if recording fails; the run then goes on plainly.

    Example:
        >>> graphs = Graphs(loss, dict(model.named_parameters()), torch.device("cuda"))  # doctest: +SKIP
        >>> graphs.backward(batch, 1 / num_targets)  # doctest: +SKIP
    """

    def __init__(
        self,
        loss: FixedLoss,
        parameters: dict[str, torch.nn.Parameter],
        device: torch.device,
        *,
        held: Held | None = None,
        on_event: Callable[[str], None] = print,
    ) -> None:
        self.loss, self.parameters, self.device = loss, parameters, device
        self.held, self.on_event = held, on_event
        self.steps = 0
        self.failed = False
        self._recorded_step = False
        """Whether the gradients there are, are those of a graph."""
        self._shapes: dict[str, torch.Size] = {}
        """Of the largest microbatch's inputs that came before a recording: those that are recorded."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._recorded: dict[bool, _Recorded] = {}

    def backward(self, batch: Any, factor: float) -> torch.Tensor:
        """Adds the gradients of `factor` times a microbatch's loss to the parameters; returns the loss, a sum.

        The returned tensor is written again by the next call.
        """
        first = all(parameter.grad is None for parameter in self.parameters.values())
        self.steps += first
        if first and self.failed:
            self.release()  # of one that was recorded before another could not be
        inputs = {name: tensor.pin_memory() for name, tensor in self.loss.inputs(batch).items()}
        recorded = self._fitting(first, inputs)
        if recorded is None:
            if first:
                self._recorded_step = False
            if self._recorded and not self.failed:
                self._make_room()
            return self._plain(inputs, factor)
        if first:
            self._recorded_step = True
        for name, tensor in inputs.items():
            recorded.inputs[name].copy_(tensor, non_blocking=True)
        recorded.factor.fill_(factor)
        recorded.graph.replay()
        for name, parameter in self.parameters.items():
            parameter.grad = recorded.gradients[name]
        return recorded.loss

    def release(self) -> None:
        """Gives up the graphs and their memory, gradients included; the next microbatch is recorded anew."""
        if not self._recorded:
            return
        torch.cuda.synchronize(self.device)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._recorded.clear()
        if self.failed:
            self._give_back()
        self._pool = None
        self._forget()
        torch.cuda.empty_cache()

    def _make_room(self) -> None:
        """For a plain microbatch amid recorded ones: their memory, the gradients so far put elsewhere meanwhile."""
        waiting = {name: p.grad.cpu() for name, p in self.parameters.items() if p.grad is not None}
        self.release()
        for name, gradient in waiting.items():
            self.parameters[name].grad = gradient.to(self.device)
        self._recorded_step = False

    def _abandon(self, before: dict[str, torch.Tensor | None]) -> None:
        """A recording that failed: the gradients as they were before it, and no other is tried."""
        for name, parameter in self.parameters.items():
            parameter.grad = before[name]
        self.failed = True
        self._unwind()

    def _unwind(self) -> None:
        """After a recording that failed: torch's allocator still believes in it (2.11), and holds on to the memory that
        was taken for it (2.13 too). Where torch has seen to that itself, it says so."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        if self._recorded:
            return  # the other graph is in the same memory, until it is released
        self._give_back()
        self._pool = None
        self._forget()
        torch.cuda.empty_cache()

    def _give_back(self) -> None:
        """What a recording that failed has taken of the graphs' memory; the graphs that did not are gone by now."""
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(self._index, self._pool)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _forget(self) -> None:
        """What is kept for the stream that runs next to nothing from now on."""
        torch._C._cuda_clearCublasWorkspaces()
        if self.held is not None:
            self.held.forget()

    def _fitting(self, first: bool, inputs: Inputs) -> _Recorded | None:
        """The graph that serves a microbatch; None if it has to run plainly."""
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        if not self._recorded and _numbers(shapes) > _numbers(self._shapes):
            self._shapes = shapes  # those of a session's first microbatch may be an epoch's last rows
        if self.steps <= WARM_UP or self.failed or shapes != self._shapes:
            return None
        if not (first or self._recorded_step):
            return None  # what is added to gradients of a plain microbatch is not where a graph looks for it
        return self._recorded.get(first) or self._record(first, inputs)

    def _plain(self, inputs: Inputs, factor: float) -> torch.Tensor:
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        loss = self.loss.of(moved)
        (loss * factor).backward()
        return loss.detach()

    def _record(self, first: bool, inputs: Inputs) -> _Recorded | None:
        """Records without computing anything; None if that cannot be done here."""
        torch.cuda.synchronize(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._forget()
        if self.held is not None:
            self.held.settle()
        static = {name: torch.empty_like(tensor, device=self.device) for name, tensor in inputs.items()}
        factor = torch.zeros((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        failure = ""
        try:
            loss = self._capture(graph, static, factor)
        except RuntimeError as error:  # running out of memory is one as well
            failure = (str(error).strip() or type(error).__name__).splitlines()[0]
        except BaseException:
            # A second Ctrl-C, a host without memory: nothing to go on from, but torch has to know.
            with suppress(RuntimeError):
                self._abandon(before)
            raise
        if self.held is not None:
            self.held.settle()
        if failure:
            self._abandon(before)
            self.on_event(f"a step could not be recorded as a CUDA graph and runs plainly: {failure}")
            return None
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._recorded[first] = _Recorded(graph, static, factor, loss, gradients)
        return self._recorded[first]

    def _capture(self, graph: torch.cuda.CUDAGraph, static: Inputs, factor: torch.Tensor) -> torch.Tensor:
        # Other threads (a checkpoint being written) may go on with what they do.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = self.loss.of(static)
            (loss * factor).backward()
            if self.held is not None:
                self.held.join()
        return loss.detach()


def _numbers(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
