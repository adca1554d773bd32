"""Memory timelines and profiles of runs with known allocations and operations."""

from __future__ import annotations

import pytest
import torch

from trimtab.lab.kernel_kinds import KernelKind, kind_of
from trimtab.lab.memory import memory_timeline, peak_bytes
from trimtab.lab.profiles import profile_run

MIB = 2**20


def step(device: str) -> None:
    first = torch.empty(MIB, dtype=torch.uint8, device=device)
    second = torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    del first
    third = torch.empty(3 * MIB, dtype=torch.uint8, device=device)
    del second, third


def check_timeline(device: str) -> None:
    timeline = memory_timeline(lambda: step(device), device)
    assert [event.nbytes // MIB for event in timeline.events] == [1, 2, -1, 3, -2, -3]
    assert [level // MIB for _, level in timeline.levels()] == [1, 3, 2, 5, 3, 0]
    assert timeline.peak_bytes == 5 * MIB
    seconds = [event.seconds for event in timeline.events]
    assert seconds == sorted(seconds)
    assert peak_bytes(lambda: step(device), device) == 5 * MIB


def test_timeline_on_a_cpu() -> None:
    check_timeline("cpu")


@pytest.mark.gpu
def test_timeline_on_a_gpu() -> None:
    torch.cuda.empty_cache()
    check_timeline("cuda")


def check_profile(device: str, product: str) -> None:
    x = torch.randn(512, 512, device=device)

    def run() -> torch.Tensor:
        return (x @ x) @ x + 1

    run()
    found = profile_run(run, device)
    expensive = found.entries[0]
    assert product in expensive.name
    assert expensive.count == 2
    assert 0.5 < found.busy_seconds / found.span_seconds <= 1.001
    assert found.lines(1)[1].endswith(expensive.name)


def test_profile_on_a_cpu() -> None:
    check_profile("cpu", "aten::mm")


@pytest.mark.gpu
def test_profile_on_a_gpu() -> None:
    x = torch.randn(512, 512, device="cuda")
    found = profile_run(lambda: (x @ x) @ x + 1, "cuda")
    counts = {entry.name: entry.count for entry in found.entries}
    kinds = {kind: sum(counts[name] for name in counts if kind_of(name) is kind) for kind in KernelKind}
    products = kinds.pop(KernelKind.GEMM)
    assert products in (2, 4), "cuBLAS may split a product into two kernels"
    assert {kind.value: count for kind, count in kinds.items() if count} == {"elementwise": 1}
