"""When microbatches are captured, run eagerly and recaptured, with fake CUDA graphs."""

from __future__ import annotations

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
