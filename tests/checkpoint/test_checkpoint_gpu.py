"""A state on the GPU: copied when save is called, written in the background, loaded bit-identically."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.checkpoint import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_training_continues_while_the_snapshot_is_written(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16),
        "m": torch.randint(0, 256, (4096, 4096), device="cuda", dtype=torch.uint8),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    with Store(tmp_path, on_event=lambda _: None) as store:
        store.save(1, state, {})
        for tensor in state.values():
            tensor.zero_()
        found = store.latest()
        assert found is not None
        store.load(found, state)
    assert all(tensor.is_cuda for tensor in state.values())
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_the_host_copy_needs_no_gpu_memory(tmp_path: Path) -> None:
    state = {"w": torch.randn(64 * 2**20, device="cuda")}
    with Store(tmp_path, on_event=lambda _: None) as store:
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        store.save(1, state, {}, wait=True)
        assert torch.cuda.max_memory_allocated() == allocated
