"""What is done to a GPU's allocator before each microbatch; on a GPU, a run at its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.trainer import gpu_memory
from trimtab.trainer.gpu_memory import GpuMemory, allocate_cublas_workspaces
from trimtab.trainer.microstep import LossSum, MicroStep


class Allocator:
    """Stands for torch's allocator: counts the calls, and `retries` as it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.retries = self.emptied = self.workspaces = 0
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(
            torch.cuda.memory,
            "memory_stats_as_nested_dict",
            lambda device: {"num_alloc_retries": self.retries},
        )
        monkeypatch.setattr(gpu_memory, "allocate_cublas_workspaces", self._allocate)

    def _empty(self) -> None:
        self.emptied += 1

    def _allocate(self, device: torch.device) -> None:
        self.workspaces += 1


def test_memory_is_returned_after_a_microbatch_that_had_to(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.retries = 3  # from before the run
    memory = GpuMemory(torch.device("cuda"), limited=True)
    for _ in range(3):
        memory()
    assert (allocator.workspaces, allocator.emptied) == (1, 0)
    allocator.retries = 5
    memory()
    assert allocator.emptied == 1
    memory()
    assert (allocator.workspaces, allocator.emptied) == (1, 1), "once per microbatch that returned memory"


def test_without_a_limit_the_allocator_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    memory = GpuMemory(torch.device("cuda"), limited=False)
    memory()
    allocator.retries = 9
    memory()
    assert (allocator.workspaces, allocator.emptied) == (1, 0)


def test_a_cpu_has_no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    GpuMemory(torch.device("cpu"), limited=True)()
    assert (allocator.workspaces, allocator.emptied) == (0, 0)


def test_it_is_called_before_each_microbatch() -> None:
    calls: list[Any] = []
    weight = torch.nn.Parameter(torch.ones(2))

    def loss(batch: torch.Tensor) -> LossSum:
        calls.append("loss")
        return LossSum((weight * batch).sum(), 2)

    step = MicroStep(loss, prepare=lambda: calls.append("prepare"))
    for _ in range(2):
        step.backward(torch.ones(2), 1.0)
    assert calls == ["prepare", "loss"] * 2


@pytest.mark.gpu
def test_both_workspaces_are_allocated_once() -> None:
    device = torch.device("cuda")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    allocate_cublas_workspaces(device)
    first = torch.cuda.memory_allocated() - before
    assert first >= 2 * 2**20
    factor = torch.ones(64, 64, device=device, requires_grad=True)
    with torch.enable_grad():
        (factor @ factor).sum().backward()
    del factor
    assert torch.cuda.memory_allocated() - before == first, "later products use them"
