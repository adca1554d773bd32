"""Runs every test this machine can run and says what was left out and why. Called by `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def left_out() -> list[str]:
    notes = []
    if shutil.which("nvidia-smi") is None:
        notes.append("GPU tests: no NVIDIA GPU here (run `pytest -m gpu` on a machine that has one)")
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        notes.append("browser tests: no chromium on the PATH (Debian: apt-get install chromium)")
    return notes


def main() -> int:
    for note in left_out():
        print(f"left out: {note}", flush=True)
    # One thread a worker: two workers on two cores, and bit-equal results whatever the machine's core count.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    workers = str(max(1, min(4, os.cpu_count() or 1)))
    command = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadfile", *sys.argv[1:]]
    code = subprocess.run(command, env=environment).returncode
    if code == 5:  # pytest's code for "nothing was selected"
        print("error: no test was selected", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
