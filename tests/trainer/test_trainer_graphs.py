"""When microbatches are captured, run eagerly and recaptured, with fake CUDA graphs; on a GPU, by runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.facts.errors import ResourceError
from trimtab.trainer.graphs import WARM_UP, Graphs


class Squares:
    """The sum of squares of a linear layer's output: the two halves that `Graphs` asks for."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(3, 2)

    def inputs(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": batch}

    def of(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs["x"]).square().sum()
        return out


class Replayed:
    """What a graph does when it is replayed: the same arithmetic, from the same tensors into the same tensors."""

    replay: Any = None


class Watched(Graphs):
    """Tells what was captured whenever a microbatch runs eagerly."""

    def __init__(self, loss: Squares) -> None:
        super().__init__(loss, dict(loss.layer.named_parameters()), torch.device("cpu"))
        self.beside: list[int] = []

    def _plain(self, inputs: dict[str, torch.Tensor], factor: float) -> torch.Tensor:
        self.beside.append(len(self._recorded))
        return super()._plain(inputs, factor)

    def _capture(self, graph: Any, static: dict[str, torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        parameters = list(self.parameters.values())
        first, loss = parameters[0].grad is None, torch.zeros(())
        gradients = [torch.zeros_like(p) if first else p.grad for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

        def replay() -> None:
            value = self.loss.of(static)
            for gradient, new in zip(gradients, torch.autograd.grad(value * factor, parameters), strict=True):
                assert gradient is not None
                gradient.copy_(new if first else gradient + new)
            loss.copy_(value.detach())

        graph.replay = replay
        return loss


class Stopped(Watched):
    """Whose recording is stopped amid it."""

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
    """A step of microbatches of so many rows; its losses and gradients are a plain step's."""
    batches = [torch.randn(count, 3) for count in rows]
    for batch in batches:
        expected = graphs.loss.of({"x": batch}).detach()
        assert torch.equal(graphs.backward(batch, 0.5), expected)
    found = [parameter.grad for parameter in graphs.parameters.values()]
    for parameter in graphs.parameters.values():
        parameter.grad = None
    for batch in batches:
        (graphs.loss.of({"x": batch}) * 0.5).backward()
    for parameter, gradient in zip(graphs.parameters.values(), found, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad)
        parameter.grad = None


@pytest.mark.parametrize("rows", [[2, 4, 4], [4, 2, 4], [4, 4, 2]])
def test_fewer_rows_never_run_beside_what_is_recorded(watched: Watched, rows: list[int]) -> None:
    for _ in range(WARM_UP):
        step(watched, [4, 4, 4])
    step(watched, [4, 4, 4])
    assert len(watched._recorded) == 2
    step(watched, rows)
    assert not any(watched.beside), "a plain microbatch and the graphs' memory at once"
    step(watched, [4, 4, 4])
    assert len(watched._recorded) == 2, "recorded anew"
    plain = len(watched.beside)
    step(watched, [4, 4, 4])
    assert len(watched.beside) == plain, "and replayed"


@pytest.mark.parametrize("short", [1, WARM_UP, WARM_UP + 2])
def test_a_session_that_begins_with_fewer_rows_records_whole_ones(watched: Watched, short: int) -> None:
    for _ in range(short):
        step(watched, [2])
    for _ in range(WARM_UP + 2):
        step(watched, [4])
    assert watched._recorded[True].inputs["x"].shape == (4, 3)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ResourceError("no memory on the host"), RuntimeError("full")]
)
def test_a_recording_that_is_stopped_leaves_nothing_behind(
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
