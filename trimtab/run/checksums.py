"""Checksums of large files, remembered beside what tells that a file was written to, so that it is read once.

A note is believed while size, both times and inode are the file's. One is made only of a file that had been left alone
for a while before it was read: what is written within a clock's grain of that leaves the times as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimtab.checkpoint.manifest import File, digests
from trimtab.data.fingerprints import digest_of, stat_of
from trimtab.facts.errors import ResourceError
from trimtab.run.folder import write_text

WORTH = 1 << 26
"""Bytes from which on a file is worth a note: less is read in a moment."""
SETTLED_NS = 2_000_000_000
"""How long before it is read a file must have been left alone; the grain of the coarsest clocks."""


def remembered(paths: Iterable[Path], folder: Path | None = None) -> dict[str, File]:
    """Size and sha256 of files by their names, read where there is no note of them that holds.

    Args:
        paths: the files; no two of one name.
        folder: where notes are kept; by default in the user's cache. If it cannot be used, the files are read.

    Example:
        >>> remembered([Path("model.safetensors")])["model.safetensors"].size  # doctest: +SKIP
        269060552
    """
    stats = {path: stat_of(path) for path in sorted(paths)}
    notes = {path: _note(path, folder) for path, stat in stats.items() if stat[0] >= WORTH}
    known = {
        path.name: file for path, note in notes.items() if (file := _read(note, stats[path])) is not None
    }
    began = time.time_ns()
    read = digests(path for path in stats if path.name not in known)
    for path, note in notes.items():
        if path.name in read and _settled(path, stats[path], began):
            _write(note, {"stat": stats[path], "sha256": read[path.name].sha256})
    return {path.name: known.get(path.name) or read[path.name] for path in stats}


def _note(path: Path, folder: Path | None) -> Path | None:
    """Where a file's checksum is noted; None for a user without a home."""
    try:
        folder = folder or Path.home() / ".cache" / "trimtab" / "checksums"
    except RuntimeError:
        return None
    return folder / f"{digest_of(str(path.resolve()))}.json"


def _settled(path: Path, stat: tuple[int, int, int, int], began: int) -> bool:
    """Whether a file is as it was before it was read, and had been so for a while."""
    _, modified, changed, _ = stat
    return began - max(modified, changed) > SETTLED_NS and stat_of(path) == stat


def _read(note: Path | None, stat: tuple[int, int, int, int]) -> File | None:
    """What a note says of a file that is still the one it is about."""
    if note is None:
        return None
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        if noted["stat"] == list(stat) and _is_sha256(noted["sha256"]):
            return File(size=stat[0], sha256=noted["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # not there or not whole: the file itself is read
    return None


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _write(note: Path | None, content: dict[str, Any]) -> None:
    """Keeps a note where that is possible: without one the file is read again."""
    if note is None:
        return
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(content))
    except (OSError, ResourceError):
        return
