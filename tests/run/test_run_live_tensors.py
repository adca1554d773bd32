"""Live tensors get the best available name, without unpacking or recomputing anything."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trimtab.facts.tensor_kinds import TensorKind
from trimtab.run.live_tensors import LiveTensor, failure_origin, live_tensors
from trimtab.run.memory_text import group_tensors


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.silu(self.up(x))
        return self.down(wide)


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class States:
    def __init__(self, model: torch.nn.Module) -> None:
        self._moments = {f"exp_avg.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._moments


def of_kind(found: list[LiveTensor], kind: TensorKind) -> dict[str, LiveTensor]:
    return {tensor.name: tensor for tensor in found if tensor.kind is kind}


def test_weights_gradients_and_states_are_named() -> None:
    model = Stack()
    states = States(model)
    model(torch.randn(8, 64)).sum().backward()
    found = live_tensors(MemoryError(), model=model, optimizer=states)
    assert set(of_kind(found, TensorKind.WEIGHTS)) >= {name for name, _ in model.named_parameters()}
    assert "gradient of layers.1.up.weight" in of_kind(found, TensorKind.GRADIENTS)
    assert "optimizer state exp_avg.layers.2.down.bias" in of_kind(found, TensorKind.OPTIMIZER)
    sizes = [tensor.bytes for tensor in found]
    assert sizes == sorted(sizes, reverse=True)


def test_saved_activations_are_found_in_the_graph_and_named_by_their_module() -> None:
    model = Stack()
    loss = model(torch.randn(999, 64)).sum()
    found = live_tensors(MemoryError(), model=model)
    saved = [t for t in found if t.kind is TensorKind.ACTIVATIONS and t.shape == (999, 128)]
    # Per layer the SiLU's input and its output, which is the matrix product's input.
    assert len(saved) == 6
    assert {t.bytes for t in saved} == {999 * 128 * 4}
    assert {t.origin.module for t in saved} == {
        name
        for i in range(3)
        for name in (f"after layers.{i}.up", f"layers.{i}.down")
    }  # fmt: skip
    groups = group_tensors(saved)
    assert {g.count for g in groups} == {3}
    assert {g.module for g in groups} == {"after layers.*.up", "layers.*.down"}
    del loss


def test_frozen_weights_name_their_modules_too() -> None:
    model = Stack().requires_grad_(False)
    loss = model(torch.randn(777, 64, requires_grad=True)).sum()
    found = live_tensors(MemoryError(), model=model)
    saved = {t.origin.module for t in found if t.shape == (777, 128) and t.kind is TensorKind.ACTIVATIONS}
    assert saved == {f"after layers.{i}.up" for i in range(3)}
    del loss


def test_nothing_is_recomputed_or_unpacked() -> None:
    runs: list[int] = []
    layer = Gate()

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return layer(x)

    loss = checkpoint(run, torch.randn(8, 64, requires_grad=True), use_reentrant=False).sum()
    live_tensors(MemoryError(), model=layer)
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2


def test_local_variables_of_the_frames_are_named_with_their_line() -> None:
    def work() -> None:
        scratch = torch.zeros(12345)
        raise MemoryError(scratch.shape)

    with pytest.raises(MemoryError) as raised:
        work()
    found = live_tensors(raised.value)
    (mine,) = [t for t in found if t.shape == (12345,)]
    assert mine.name == "scratch in work"
    assert mine.origin.line is not None
    assert "test_run_live_tensors.py" in mine.origin.line


def test_the_requesting_module_is_named() -> None:
    class Greedy(Gate):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    model = Stack()
    model.layers[2] = Greedy()
    with pytest.raises(MemoryError) as raised:
        model(torch.randn(2, 64))
    assert failure_origin(raised.value, model).module == "layers.2"
    assert failure_origin(raised.value).module == "layers.2"  # the model is found in the frames


def test_tensors_that_share_a_storage_are_listed_once() -> None:
    whole = torch.zeros(54321)
    views = [whole[:10], whole.view(3, -1)]
    found = [t for t in live_tensors(MemoryError()) if t.bytes == 54321 * 4]
    assert len(found) == 1
    assert len(views) == 2


def test_tensors_of_a_compiler_have_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        kept = mode.from_tensor(torch.zeros(4096, 4096))  # its sizes are symbols
    found = live_tensors(MemoryError())
    assert kept is not None
    assert all(type(tensor.bytes) is int and tensor.shape != (4096, 4096) for tensor in found)
