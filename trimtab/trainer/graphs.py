"""Forward and backward of a microbatch in one launch: captured once as a CUDA graph, then replayed.

A step of a small model launches a few thousand kernels that take a few microseconds each. Launching them one
by one takes longer than running them. A graph contains all of them, with the addresses they read and write.
Inputs that change from step to step are copied into the graph's static input tensors before each replay. A replay
runs the same kernels as an eager step, and its results are bit-identical.

The first steps run eagerly: kernels are compiled, libraries are initialized, and memory is measured. After
that, two graphs are captured, each when it is first needed: one for the first microbatch of a step, which
creates the gradients, and one for the following microbatches, which accumulate into them. The graphs are
released before anything else needs their memory, such as evaluation or a microbatch with fewer rows. Capturing
them again takes about as long as an eager step.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.facts.errors import release_frames
from trimtab.facts.phases import During, RunPhase, no_phase
from trimtab.trainer.gpu_memory import allocate_cublas_workspaces

WARM_UP = 2
"""Eager steps after each start or resume of a run."""

Inputs = dict[str, torch.Tensor]


class TwoPartLoss(Protocol):
    """A loss in two parts: the host prepares the inputs of a microbatch, the device computes the loss."""

    def inputs(self, batch: Any) -> Inputs:
        """Tensors on the host; their names and shapes are the same for every microbatch."""

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """The sum of the token losses, from the same tensors on the device, without synchronization."""


class CaptureResources(Protocol):
    """Resources of a model, apart from its tensors, that must be released or synchronized for graph capture."""

    def release_workspace(self) -> None:
        """Free cached device buffers: they must be neither in a graph's memory pool nor next to it."""

    def clear_copy_events(self) -> None:
        """Discard the events of past copies, whose work has finished."""

    def wait_for_copies(self) -> None:
        """Make the current stream wait for all other streams that have work."""


@dataclass
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    factor: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


class Graphs:
    """Forward and backward of microbatches on a CUDA device, replayed once they are captured.

    The model's `CaptureResources`, if it has any, are released or synchronized around each capture.

    Args:
        loss: computes the loss from inputs that the host prepares.
        parameters: the trainable parameters, by name.
        device: the device of the parameters.
        on_event: called if capture fails; the run then falls back to eager.
        during: called with each phase; the context manager that it returns explains out-of-memory errors raised inside.

    Example:
        >>> graphs = Graphs(loss, dict(model.named_parameters()), torch.device("cuda"))  # doctest: +SKIP
        >>> graphs.backward(batch, 1 / num_targets)  # doctest: +SKIP
    """

    def __init__(
        self,
        loss: TwoPartLoss,
        parameters: dict[str, torch.nn.Parameter],
        device: torch.device,
        *,
        resources: CaptureResources | None = None,
        on_event: Callable[[str], None] = print,
        during: During = no_phase,
    ) -> None:
        self.loss, self.parameters, self.device = loss, parameters, device
        self.resources = resources
        self.on_event, self.during = on_event, during
        self.steps = 0
        self.captures = 0
        """The number of attempted captures, including failed ones."""
        self.failed = False
        self._gradients_from_graph = False
        """Whether the current gradients were written by a graph."""
        self._shapes: dict[str, torch.Size] = {}
        """Input shapes of the largest microbatch seen before a capture: the shapes that are captured."""
        self._pool: Any = None
        self._begun = False
        """Whether the last capture began."""
        self._stream: torch.cuda.Stream | None = None
        self._captured: dict[bool, _CapturedGraph] = {}

    def backward(self, batch: Any, factor: float) -> torch.Tensor:
        """Accumulate the gradients of `factor` times the loss; returns the sum of the token losses.

        The next call overwrites the returned tensor.
        """
        first = all(parameter.grad is None for parameter in self.parameters.values())
        self.steps += first
        if first and self.failed:
            self.release()  # a graph that was captured before another capture failed
        inputs = {name: tensor.pin_memory() for name, tensor in self.loss.inputs(batch).items()}
        captured = self._graph_for(first, inputs)
        if captured is None:
            if first:
                self._gradients_from_graph = False
            if self._captured and not self.failed:
                self._make_room()
            return self._run_eager(inputs, factor)
        if first:
            self._gradients_from_graph = True
        for name, tensor in inputs.items():
            captured.inputs[name].copy_(tensor, non_blocking=True)
        captured.factor.fill_(factor)
        captured.graph.replay()
        for name, parameter in self.parameters.items():
            parameter.grad = captured.gradients[name]
        return captured.loss

    def release(self) -> None:
        """Release the graphs and their memory, gradients included; the next microbatch is captured again."""
        if not self._captured:
            return
        torch.cuda.synchronize(self.device)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._captured.clear()
        self._free_pool()

    def _make_room(self) -> None:
        """Free the graphs for an eager microbatch within a captured step; copy the gradients out of their pool."""
        waiting = {name: p.grad.cpu() for name, p in self.parameters.items() if p.grad is not None}
        self.release()
        for name, gradient in waiting.items():
            self.parameters[name].grad = gradient.to(self.device)
        self._gradients_from_graph = False

    def _abandon(self, graph: torch.cuda.CUDAGraph, before: dict[str, torch.Tensor | None]) -> None:
        """After a failed capture: restore the gradients from before it, and do not try to capture again."""
        for name, parameter in self.parameters.items():
            parameter.grad = before[name]
        self.failed = True
        self._discard(graph)
        if not self._captured:  # otherwise the other graph uses the pool until it is released
            self._free_pool()

    def _discard(self, graph: torch.cuda.CUDAGraph) -> None:
        """Drop a failed capture's reference to the memory pool, exactly once.

        The destructor of a graph drops the reference if torch has ended the capture. That is so unless CUDA itself
        rejected the capture: running out of memory and Ctrl-C do not affect CUDA. A reference that is dropped twice
        makes the destructor throw, which aborts the process.
        """
        if _is_ended(graph):
            graph.reset()
            return
        begun = self._begun
        # torch 2.13 has already stopped allocating to the pool, torch 2.11 has not.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
            begun = True
        # The destructor of a capture that has not ended drops no reference in torch 2.13; later versions may. It
        # never runs: neither it nor torch's allocator of pinned memory, which keeps a pointer to the graph, can fail.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        if begun:
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._index, self._pool)

    def _free_pool(self) -> None:
        """Free the memory of the pool, to which no graph refers any longer."""
        self._pool = None
        self._free_workspaces()
        torch.cuda.empty_cache()
        with suppress(RuntimeError):  # without memory for them, the next product says so
            allocate_cublas_workspaces(self.device)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _free_workspaces(self) -> None:
        """Free the cuBLAS workspaces and buffers cached for a stream that is hardly used from now on."""
        torch._C._cuda_clearCublasWorkspaces()
        if self.resources is not None:
            self.resources.release_workspace()

    def _graph_for(self, first: bool, inputs: Inputs) -> _CapturedGraph | None:
        """The graph for a microbatch; None if it has to run eagerly."""
        shapes = {name: tensor.shape for name, tensor in inputs.items()}
        if not self._captured and _num_elements(shapes) > _num_elements(self._shapes):
            self._shapes = shapes  # a session's first microbatch may be the short last one of an epoch
        if self.steps <= WARM_UP or self.failed or shapes != self._shapes:
            return None
        if not (first or self._gradients_from_graph):
            return None  # an eager microbatch's gradients are not at the addresses that the graph uses
        return self._captured.get(first) or self._capture_graph(first, inputs)

    def _run_eager(self, inputs: Inputs, factor: float) -> torch.Tensor:
        with self.during(RunPhase.FORWARD):
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
            loss = self.loss.compute(moved)
        with self.during(RunPhase.BACKWARD):
            (loss * factor).backward()
        return loss.detach()

    def _capture_graph(self, first: bool, inputs: Inputs) -> _CapturedGraph | None:
        """Capture without running any kernel; None if capture fails here."""
        self.captures += 1
        torch.cuda.synchronize(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._free_workspaces()
        if self.resources is not None:
            self.resources.clear_copy_events()
        static = {name: torch.empty_like(tensor, device=self.device) for name, tensor in inputs.items()}
        factor = torch.zeros((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        failure = ""
        self._begun = False
        try:
            loss = self._capture(graph, static, factor)
        except RuntimeError as error:  # an out-of-memory error is one too
            failure = (str(error).strip() or type(error).__name__).splitlines()[0]
            release_frames(error)  # they reference tensors in the graph's memory pool
            gc.collect()  # tensors in reference cycles; offloaded ones return buffers whose events are cleared below
        except BaseException:
            # A second Ctrl-C, or no host memory left: the run ends, but torch must end the capture.
            with suppress(RuntimeError):
                self._abandon(graph, before)
            raise
        if self.resources is not None:
            self.resources.clear_copy_events()
        if failure:
            self._abandon(graph, before)
            self.on_event(f"CUDA graph capture failed, and steps run eagerly: {failure}")
            return None
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._captured[first] = _CapturedGraph(graph, static, factor, loss, gradients)
        return self._captured[first]

    def _capture(self, graph: torch.cuda.CUDAGraph, static: Inputs, factor: torch.Tensor) -> torch.Tensor:
        first_error: BaseException | None = None
        try:
            # Other threads (a checkpoint being written) may continue their work. The outer context restores the
            # current stream: torch.cuda.graph does not if ending the capture fails.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                self._begun = True
                try:
                    allocate_cublas_workspaces(self.device)
                    loss = self.loss.compute(static)
                    (loss * factor).backward()
                    if self.resources is not None:
                        self.resources.wait_for_copies()
                except BaseException as error:
                    first_error = error
                    raise
        except RuntimeError as error:
            if first_error is None or first_error is error:
                raise
            raise first_error from None  # what failed, rather than that the capture could not be ended after it
        finally:
            first_error = None  # its traceback references this frame
        return loss.detach()


def _is_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether torch has ended the capture of a graph, whatever was raised in it."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _num_elements(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())
