"""Compiles in a process alongside others, so that a timed cell finds its kernels in the caches on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.adapt.compiling import use_cache_folder

CHOSEN = "*.best_config"
"""Files in which torch's compiler notes the fastest of a kernel's launch configurations."""


@contextmanager
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
        for file in folder.rglob(CHOSEN):
            if file.stat().st_mtime >= start - 1:  # a file system's clock may be coarse
                file.unlink(missing_ok=True)
