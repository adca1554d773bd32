"""Runs every test that this machine can run and reports the skipped ones. Called by `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def skipped() -> list[str]:
    notes = []
    if shutil.which("nvidia-smi") is None:
        notes.append("GPU tests: no NVIDIA GPU (run `pytest -m gpu` on a machine that has one)")
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        notes.append("browser tests: no chromium on the PATH (Debian: apt-get install chromium)")
    return notes


def main() -> int:
    for note in skipped():
        print(f"skipped: {note}", flush=True)
    # One thread per worker: results are bitwise identical whatever the core count.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    workers = str(max(1, min(4, os.cpu_count() or 1)))
    command = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "loadfile", *sys.argv[1:]]
    code = subprocess.run(command, env=environment).returncode
    if code == 5:  # pytest's code for "nothing was selected"
        print("error: no test was selected", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
