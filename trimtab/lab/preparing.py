"""Compiles in a process alongside others, so that a timed cell finds its kernels in the caches on disk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trimtab.adapt.compiling import use_cache_folder

CHOSEN = ".best_config"
"""How the names of files end in which torch's compiler notes the fastest of a kernel's launch configurations."""


@contextlib.contextmanager
def without_tuning(folder: Path | None = None) -> Iterator[None]:
    """Keeps the code that is compiled inside, and forgets which launch configurations were fastest.

    They are timed while other processes use the GPU. The timed cell chooses again, alone, which takes milliseconds.

    Args:
        folder: the compile cache; trimtab's by default.
    """
    folder = folder or use_cache_folder()
    start = time.time()
    try:
        yield
    finally:
        _forget_since(folder, start - 1)  # a file system's clock may be coarse


def _forget_since(folder: Path, start: float) -> None:
    """Removes the notes written since `start`, while other processes add and remove files and folders."""
    for parent, _, names in os.walk(folder):  # unlike `Path.rglob`, passes over folders that are gone
        for name in names:
            if name.endswith(CHOSEN):
                file = Path(parent, name)
                with contextlib.suppress(FileNotFoundError):
                    if file.stat().st_mtime >= start:
                        file.unlink()
