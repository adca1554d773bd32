"""Atomic writes of files of rows: written to a draft, synced to disk, then renamed.

A writer locks its draft. The lock ends with its process, so that a later writer can recognize and remove the drafts of
killed processes. For small files see `trimtab.facts.files`.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trimtab.facts.files import sync_folder

SUFFIX = ".part"
STALE_AFTER_SECONDS = 60.0
"""An unlocked draft is removed only after this long without a write: its writer may be about to lock it."""


@contextmanager
def draft(folder: Path, name: str) -> Iterator[tuple[IO[bytes], Callable[[Path], None]]]:
    """Yields a file to write, and a function that publishes it under a path; without that call the file is removed.

    Example:
        >>> with draft(Path("cache"), "rows") as (file, publish):               # doctest: +SKIP
        ...     file.write(b"{}")
        ...     publish(Path("cache/rows.jsonl"))
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_drafts(folder)
    part = folder / f".{name}.{os.getpid()}.{time.monotonic_ns()}{SUFFIX}"
    try:
        with open(part, "xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

            def publish(path: Path) -> None:
                file.flush()
                os.fsync(file.fileno())
                _rename(part, path)
                sync_folder(folder)

            yield file, publish
    finally:
        part.unlink(missing_ok=True)


def remove_stale_drafts(folder: Path) -> None:
    """Removes the drafts of writers that were killed."""
    for part in folder.glob(f".*{SUFFIX}"):
        try:
            with open(part, "rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime < STALE_AFTER_SECONDS:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
        except (FileNotFoundError, BlockingIOError, PermissionError):
            continue  # it was published, is being written, or belongs to another user


def _rename(part: Path, path: Path) -> None:
    """Publishes a complete file, unless one with the same bytes exists: another run may be reading it."""
    try:
        os.link(part, path)  # never overwrites an existing file
    except FileExistsError:
        if not filecmp.cmp(part, path, shallow=False):
            os.replace(part, path)
    except OSError:  # a file system without links
        os.replace(part, path)
