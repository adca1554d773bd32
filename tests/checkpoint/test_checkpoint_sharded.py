"""Two ranks save shards, one process loads them, and vice versa, in one launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimtab.checkpoint import Store, read_manifest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import sharded_rank as ranks  # noqa: E402


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_and_one_process_load_each_others_checkpoints(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    said: list[str] = []
    with Store(tmp_path / "single", on_event=said.append) as store:
        store.save(5, {name: ranks.whole(name) for name in ranks.SHAPES}, {}, wait=True)

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharded_rank.py"), str(rank), str(tmp_path), device],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks.WORLD)
    ]  # fmt: skip
    try:
        for process in started:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()

    with Store(tmp_path / "two", on_event=said.append) as store:
        found = store.latest()
        assert found is not None
        shards = [path.name[:11] for path in found.path.glob("*.safetensors")]
        assert set(shards) == {"shard-00001", "shard-00002"}
        expected = {name: ranks.whole(name) for name in ranks.SHAPES}
        expected |= {"replicated": torch.arange(10.0), **ranks.own_stage(0), **ranks.own_stage(1)}
        expected |= ranks.model(0).state_dict()
        assert set(read_manifest(found.path).tensors) == set(expected)
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        assert store.load(found, target) == {"windows": 12}
    for name, tensor in expected.items():
        assert torch.equal(target[name], tensor), name
