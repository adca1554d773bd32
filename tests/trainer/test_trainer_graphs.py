"""When microbatches are captured, run eagerly and recaptured, with fake CUDA graphs."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trimtab.facts.errors import ResourceError
from trimtab.trainer.graphs import WARM_UP, Graphs


class Squares:
    """The sum of squares of a linear layer's output: the two halves that `Graphs` requires."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(3, 2)

    def inputs(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": batch}

    def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs["x"]).square().sum()
        return out


class Replayed:
    """A fake CUDA graph: a replay repeats the arithmetic from and into the same tensors."""

    replay: Any = None

    def pool(self) -> Any:
        raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")


class Watched(Graphs):
    """Records how many graphs exist whenever a microbatch runs eagerly."""

    def __init__(self, loss: Squares) -> None:
        super().__init__(loss, dict(loss.layer.named_parameters()), torch.device("cpu"))
        self.graphs_during_eager: list[int] = []

    def _run_eager(self, inputs: dict[str, torch.Tensor], factor: float) -> torch.Tensor:
        self.graphs_during_eager.append(len(self._captured))
        return super()._run_eager(inputs, factor)

    def _capture(self, graph: Any, static: dict[str, torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        parameters = list(self.parameters.values())
        first, loss = parameters[0].grad is None, torch.zeros(())
        gradients = [torch.zeros_like(p) if first else p.grad for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

        def replay() -> None:
            value = self.loss.compute(static)
            for gradient, new in zip(gradients, torch.autograd.grad(value * factor, parameters), strict=True):
                assert gradient is not None
                gradient.copy_(new if first else gradient + new)
            loss.copy_(value.detach())

        graph.replay = replay
        return loss


class Stopped(Watched):
    """Graphs whose capture fails halfway."""

    error: BaseException = RuntimeError("no memory")

    def _capture(self, graph: Any, static: dict[str, torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, float("nan"))
        raise self.error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("synchronize", "empty_cache", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: object())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return Watched(Squares())


def step(graphs: Watched, rows: list[int]) -> None:
    """Runs a step of microbatches with these numbers of rows; checks losses and gradients against eager ones."""
    batches = [torch.randn(count, 3) for count in rows]
    for batch in batches:
        expected = graphs.loss.compute({"x": batch}).detach()
        assert torch.equal(graphs.backward(batch, 0.5), expected)
    found = [parameter.grad for parameter in graphs.parameters.values()]
    for parameter in graphs.parameters.values():
        parameter.grad = None
    for batch in batches:
        (graphs.loss.compute({"x": batch}) * 0.5).backward()
    for parameter, gradient in zip(graphs.parameters.values(), found, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad)
        parameter.grad = None


@pytest.mark.parametrize("rows", [[2, 4, 4], [4, 2, 4], [4, 4, 2]])
def test_smaller_microbatches_never_run_while_graphs_are_allocated(watched: Watched, rows: list[int]) -> None:
    for _ in range(WARM_UP):
        step(watched, [4, 4, 4])
    step(watched, [4, 4, 4])
    assert len(watched._captured) == 2
    step(watched, rows)
    assert not any(watched.graphs_during_eager), "an eager microbatch while the graphs' memory is allocated"
    step(watched, [4, 4, 4])
    assert len(watched._captured) == 2, "captured again"
    num_eager = len(watched.graphs_during_eager)
    step(watched, [4, 4, 4])
    assert len(watched.graphs_during_eager) == num_eager, "and replayed"


@pytest.mark.parametrize("short", [1, WARM_UP, WARM_UP + 2])
def test_a_session_that_begins_with_fewer_rows_captures_full_microbatches(
    watched: Watched, short: int
) -> None:
    for _ in range(short):
        step(watched, [2])
    for _ in range(WARM_UP + 2):
        step(watched, [4])
    assert watched._captured[True].inputs["x"].shape == (4, 3)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ResourceError("no memory on the host"), RuntimeError("full")]
)
def test_a_failed_capture_leaves_nothing_behind(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ended: list[str] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *_, name=name: ended.append(name), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    graphs = Stopped(Squares())
    graphs.error = error
    for _ in range(WARM_UP):
        step(graphs, [4])
    if isinstance(error, RuntimeError):
        step(graphs, [4])  # continues eagerly
    else:
        with pytest.raises(type(error)):
            graphs.backward(torch.randn(4, 3), 0.5)
        assert all(parameter.grad is None for parameter in graphs.parameters.values())
    assert ended == ["_cuda_endAllocateToPool", "_cuda_releasePool"]
    assert graphs.failed


class Allocator:
    """How torch's allocator counts the references to memory pools of CUDA graphs: `CUDACachingAllocator.cpp`."""

    def __init__(self, version: str) -> None:
        self.version = version
        """2.11; 2.12, which stops allocating to the pool of a capture that CUDA rejected; or a later one, in which
        resetting a graph drops its reference even then."""
        self.references: Counter[Any] = Counter()
        self.underway: set[Any] = set()
        self.aborted: list[str] = []
        """Errors raised in destructors, each of which would abort the process."""

    def begin(self, pool: Any) -> None:
        assert pool not in self.underway
        self.underway.add(pool)
        self.references[pool] += 1

    def end(self, _: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, _: int, pool: Any) -> None:
        if pool not in self.references:
            raise RuntimeError("it != graph_pools.end() INTERNAL ASSERT FAILED")
        self.references[pool] -= 1
        if self.references[pool] < 0:
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED")

    def empty_cache(self) -> None:
        for pool, count in list(self.references.items()):
            if count < 0:
                raise RuntimeError("use_count == 0 INTERNAL ASSERT FAILED")
            if not count:
                del self.references[pool]


class CountedGraph:
    """A fake CUDA graph that begins, ends and is destroyed as torch's (`CUDAGraph.cpp`); it cannot be replayed."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.handle = allocator, None
        self.ended = self.referenced = False

    def begin(self, pool: Any) -> None:
        self.handle, self.referenced = pool, True
        self.allocator.begin(pool)

    def end(self, rejected: bool) -> None:
        if not rejected or self.allocator.version != "2.11":
            self.allocator.end(0, self.handle)
        if rejected:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.ended = True

    def pool(self) -> Any:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.handle

    def reset(self) -> None:
        if self.ended or (self.referenced and self.allocator.version == "later"):
            self.allocator.release(0, self.handle)
        self.ended = self.referenced = False

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        try:
            self.reset()
        except RuntimeError as error:
            self.allocator.aborted.append(str(error))


class Capture:
    """Fakes torch.cuda.graph: only ending the capture fails if CUDA has rejected it."""

    rejected = False
    active = False
    on_begin: Callable[[], None] | None = None

    def __init__(self, graph: CountedGraph, pool: Any, **_: Any) -> None:
        self.graph, self.pool = graph, pool

    def __enter__(self) -> None:
        if Capture.on_begin is not None:
            Capture.on_begin()
        self.graph.begin(self.pool)
        Capture.active = True

    def __exit__(self, *_: Any) -> None:
        Capture.active = False
        self.graph.end(Capture.rejected)


class FailingSquares(Squares):
    """Fails while it is captured: the first microbatch of a step, or a later one."""

    def __init__(self, error: Callable[[], BaseException], later: bool, rejected: bool) -> None:
        super().__init__()
        self.error, self.later, self.rejected = error, later, rejected

    def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().compute(inputs)
        if Capture.active and (not self.later or self.layer.weight.grad is not None):
            Capture.rejected = self.rejected
            raise self.error()  # a new one: an exception that is kept keeps the graph
        return out


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Allocator:
    allocator = Allocator(request.param)
    pools = iter(range(100))
    for name, double in {
        "synchronize": lambda *_: None,
        "empty_cache": allocator.empty_cache,
        "current_device": lambda: 0,
        "current_stream": lambda *_: None,
        "stream": lambda *_: nullcontext(),
        "Stream": lambda *_: object(),
        "graph_pool_handle": lambda: (0, next(pools)),
        "CUDAGraph": lambda: CountedGraph(allocator),
        "graph": Capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    for name, function in {
        "_cuda_endAllocateToPool": allocator.end,
        "_cuda_releasePool": allocator.release,
        "_cuda_clearCublasWorkspaces": lambda: None,
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, value in (("rejected", False), ("active", False), ("on_begin", None)):
        monkeypatch.setattr(Capture, name, value)
    return allocator


def captured_steps(loss: Squares) -> tuple[Graphs, list[str]]:
    """Graphs after warm-up and a step of two microbatches that is captured, and what was said."""
    said: list[str] = []
    graphs = Graphs(loss, dict(loss.layer.named_parameters()), torch.device("cpu"), on_event=said.append)
    for _ in range(WARM_UP + 1):
        for _ in range(2):
            graphs.backward(torch.randn(4, 3), 0.5)
        if graphs.steps <= WARM_UP:
            loss.layer.zero_grad()
    return graphs, said


every_version = pytest.mark.parametrize("capture", ["2.11", "2.12", "later"], indirect=True)


@every_version
@pytest.mark.parametrize("later", [False, True], ids=["the first graph", "the second"])
@pytest.mark.parametrize("rejected", [False, True], ids=["ended by torch", "rejected by CUDA"])
def test_out_of_memory_in_a_capture_never_drops_a_reference_twice(
    capture: Allocator, later: bool, rejected: bool
) -> None:
    """CUDA does not know that torch's allocator refused an allocation: torch ends the capture as usual."""
    loss = FailingSquares(lambda: torch.OutOfMemoryError("CUDA out of memory."), later, rejected)
    graphs, said = captured_steps(loss)
    assert said == ["CUDA graph capture failed, and steps run eagerly: CUDA out of memory."]
    for _ in range(2):
        loss.layer.zero_grad()
        batch = torch.randn(4, 3)
        graphs.backward(batch, 0.5)
        found = loss.layer.weight.grad
        loss.layer.zero_grad()
        (loss.compute({"x": batch}) * 0.5).backward()
        assert found is not None
        assert loss.layer.weight.grad is not None
        assert torch.equal(found, loss.layer.weight.grad)
    assert not graphs._captured
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    assert not capture.aborted
    assert not capture.references
    assert not capture.underway


@every_version
@pytest.mark.parametrize("rejected", [False, True], ids=["ended by torch", "rejected by CUDA"])
def test_ctrl_c_in_a_capture_is_raised_and_drops_the_reference_once(
    capture: Allocator, rejected: bool
) -> None:
    loss = FailingSquares(KeyboardInterrupt, later=False, rejected=rejected)
    with pytest.raises(KeyboardInterrupt):
        captured_steps(loss)
    gc.collect()
    torch.cuda.empty_cache()
    assert not capture.aborted
    assert not capture.references
    assert not capture.underway


@every_version
def test_a_capture_that_does_not_begin_keeps_the_other_graphs_reference(
    capture: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_second() -> None:
        if capture.references:
            raise RuntimeError("no stream")

    monkeypatch.setattr(Capture, "on_begin", fail_second)
    graphs, said = captured_steps(Squares())
    assert said == ["CUDA graph capture failed, and steps run eagerly: no stream"]
    assert list(graphs._captured) == [True]
    assert list(capture.references.values()) == [1], "the first graph's"
    graphs.release()
    gc.collect()
    torch.cuda.empty_cache()
    assert not capture.aborted
    assert not capture.references
