"""Files of rows that appear whole or not at all: written as a draft, forced to the disk, then given their name.

A writer locks its draft. The lock ends with its process, so that a later writer recognizes the drafts of killed ones
and removes them. Small files are `trimtab.facts.files`'.
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
LEFT_AFTER_SECONDS = 60.0
"""A draft that nobody holds is removed when it was not written to for so long: its writer may be about to lock it."""


@contextmanager
def draft(folder: Path, name: str) -> Iterator[tuple[IO[bytes], Callable[[Path], None]]]:
    """A file to write and a function that gives it its path; without a call of that it is removed.

    Example:
        >>> with draft(Path("cache"), "rows") as (file, publish):               # doctest: +SKIP
        ...     file.write(b"{}")
        ...     publish(Path("cache/rows.jsonl"))
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
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


def remove_leftovers(folder: Path) -> None:
    """Removes the drafts of writers that were killed."""
    for part in folder.glob(f".*{SUFFIX}"):
        try:
            with open(part, "rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime < LEFT_AFTER_SECONDS:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
        except (FileNotFoundError, BlockingIOError, PermissionError):
            continue  # it has its name by now, is being written, or belongs to another user


def _rename(part: Path, path: Path) -> None:
    """Gives a complete file its name, unless the same bytes have it already: another run may be reading them."""
    try:
        os.link(part, path)  # never over a file that is there
    except FileExistsError:
        if not filecmp.cmp(part, path, shallow=False):
            os.replace(part, path)
    except OSError:  # a file system without links
        os.replace(part, path)
