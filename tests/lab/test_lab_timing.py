"""The summary of times; on a GPU, that what is timed is told apart and memory is counted."""

from __future__ import annotations

import pytest
import torch

from trimtab.lab.timing import Timing, ceilings, peak_bytes, summary, time_together


def test_summary() -> None:
    assert summary([5.0]) == Timing(5.0, 5.0, 5.0, 1)
    times = [float(x) for x in range(101)]
    assert summary(times[::-1], host_ms=3.0) == Timing(50.0, 10.0, 90.0, 101, 3.0)


@pytest.mark.gpu
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
def test_ceilings_are_those_of_a_gpu() -> None:
    found = ceilings()
    assert 1e11 < found.copy_bytes_per_s < 2e13
    assert 1e12 < found.matmul_flops_per_s < 1e16
    assert found.device == torch.cuda.get_device_name()
