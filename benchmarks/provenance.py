"""Where a number comes from: versions and the commit, for every benchmark's data."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python and of whatever of the packages is installed; nothing is imported."""
    known = {"python": platform.python_version()}
    installed = importlib.metadata.packages_distributions()
    for package in packages:
        if package in installed:
            known[package] = importlib.metadata.version(installed[package][0])
    return known


def commit() -> str:
    """The checkout's, marked where files were changed; "unknown" outside a repository."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
