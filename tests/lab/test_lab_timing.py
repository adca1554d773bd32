"""The summary of times; on a GPU, timed regions are distinguished and memory is counted."""

from __future__ import annotations

import pytest
import torch

from trimtab.lab.memory import peak_bytes
from trimtab.lab.timing import Timing, ceilings, summary, time_together


def test_summary() -> None:
    assert summary([5.0]) == Timing(5.0, 5.0, 5.0, 1)
    times = [float(x) for x in range(101)]
    assert summary(times[::-1], host_ms=3.0) == Timing(50.0, 10.0, 90.0, 101, 3.0)


def test_functions_on_a_cpu_are_distinguished_and_alternate() -> None:
    x, calls = torch.randn(256, 256), {"one": 0, "eight": 0}

    def products(name: str, count: int) -> None:
        calls[name] += 1
        for _ in range(count):
            torch.mm(x, x)

    runs = {"one": lambda: products("one", 1), "eight": lambda: products("eight", 8)}
    found = time_together(runs, device="cpu", rounds=5, budget_ms=20)
    assert found["eight"].median_ms > 3 * found["one"].median_ms
    assert calls["eight"] > found["eight"].runs >= 5
    assert found["one"].low_ms <= found["one"].median_ms <= found["one"].high_ms
    assert found["one"].seconds == pytest.approx(found["one"].median_ms / 1e3)


def test_ceilings_of_a_cpu() -> None:
    found = ceilings("cpu")
    assert 1e8 < found.copy_bytes_per_s < 1e12
    assert 1e8 < found.matmul_flops_per_s < 1e14
    assert found.matmul_dtype == "float32"


@pytest.mark.gpu
@pytest.mark.alone
def test_times_and_memory_on_a_gpu() -> None:
    x = torch.empty(2**26, dtype=torch.int8, device="cuda")
    calls = {"one": 0, "four": 0}

    def copies(name: str, count: int) -> None:
        calls[name] += 1
        for _ in range(count):
            x.clone()

    found = time_together({"one": lambda: copies("one", 1), "four": lambda: copies("four", 4)}, budget_ms=20)
    assert 2.5 < found["four"].median_ms / found["one"].median_ms < 5
    assert calls["one"] >= found["one"].runs >= 5
    assert found["one"].low_ms <= found["one"].median_ms <= found["one"].high_ms
    assert peak_bytes(lambda: x.clone()) == 2**26
    assert peak_bytes(lambda: None) == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_ceilings_are_those_of_a_gpu() -> None:
    found = ceilings()
    assert 1e11 < found.copy_bytes_per_s < 2e13
    assert 1e12 < found.matmul_flops_per_s < 1e16
    assert found.device == torch.cuda.get_device_name()
