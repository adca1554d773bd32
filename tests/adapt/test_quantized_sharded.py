"""FSDP2 over quantized layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_fsdp2_shards_and_gathers_the_bytes(tmp_path: Path) -> None:
    """Two processes on gloo: see `sharded_quantized_rank.py`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = str(HERE / "sharded_quantized_rank.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in started:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
