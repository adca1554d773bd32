"""The examples of docstrings: what they print is what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "trimtab"


def test_examples_of_docstrings(tmp_path: Path) -> None:
    """All at once in a process of their own: they import every package."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--doctest-modules",
        str(PACKAGE),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
