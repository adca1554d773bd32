"""Checksums of a model's files, remembered as those of data are, so that a large file is read once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trimtab.data import fingerprints
from trimtab.facts.files import FileDigest, digest

WORTH = 1 << 26
"""Bytes from which on a file is worth a note: less is read in a moment."""


def remembered(paths: Iterable[Path], folder: Path | None = None) -> dict[str, FileDigest]:
    """Size and sha256 of files by their names, read where there is no note of them that holds.

    Args:
        paths: the files; no two of one name.
        folder: where notes are kept; by default in the user's cache. If it cannot be used, the files are read.

    Example:
        >>> remembered([Path("model.safetensors")])["model.safetensors"].size  # doctest: +SKIP
        269060552
    """
    ordered, memory = sorted(paths), folder or _cache()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda path: _file(path, memory), ordered)
        return dict(zip((path.name for path in ordered), found, strict=True))


def _file(path: Path, memory: Path | None) -> FileDigest:
    stat = fingerprints.stat_of(path)
    if stat[0] < WORTH:
        return digest(path)
    checksum = fingerprints.remembered(path, stat, memory, lambda path: digest(path).sha256)
    return FileDigest(stat[0], checksum)


def _cache() -> Path | None:
    """None for a user without a home."""
    try:
        return Path.home() / ".cache" / "trimtab" / "checksums"
    except RuntimeError:
        return None
