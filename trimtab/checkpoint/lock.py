"""File locks that the operating system releases when the process that has them dies.

The mere existence of a lock file would survive kill -9 and block the next run; a lock on an open file does not.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import weakref
from pathlib import Path
from types import TracebackType

from trimtab.facts.errors import CheckpointError

# msvcrt locks byte ranges, which no other process can then read: lock a byte far behind the file's content.
_LOCKED_BYTE = 2**30
PROBE_SECONDS = 0.2
"""Seconds before a second attempt: longer than `is_locked` keeps the lock while it tests a file."""


def _lock_now(descriptor: int) -> bool:
    """Acquire the exclusive lock without waiting; False if another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one now at this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a process has the lock on a file; the file is neither created nor written to.

    Example:
        >>> is_locked(Path("runs/demo/.lock"))        # doctest: +SKIP
        False
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock_now(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """An exclusive lock on `path`, which is created and left in place (removing it would open a race).

    Example:
        >>> lock = FileLock(Path("run/.lock"))      # doctest: +SKIP
        >>> if not lock.try_acquire():              # doctest: +SKIP
        ...     print(lock.holder())
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Returns whether the lock was acquired; OSError if the file cannot be opened for writing.

        FileNotFoundError if it was removed or replaced in between: a lock on such a file excludes no other process.
        """
        assert self._descriptor is None, f"{self.path} is already locked by this object"
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock_now(descriptor):
            os.close(descriptor)
            return False
        if not _is_at(self.path, descriptor):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        self._descriptor = descriptor
        _ACQUIRED.add(self)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(holder).encode())
        return True

    def release(self) -> None:
        """Releases the lock; does nothing if it is not locked."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _ACQUIRED.discard(self)

    def holder(self) -> str:
        """The process that last wrote its name into the lock file: `process 4711 on host`."""
        try:
            entry = json.loads(self.path.read_text())
            return f"process {int(entry['pid'])} on {entry['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_ACQUIRED: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker inherits the descriptor and would keep the lock after its parent was killed.
    for lock in list(_ACQUIRED):
        lock._forget()
    _ACQUIRED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class RunLock:
    """The lock of a run folder, which only one process group may use at a time (rank 0 acquires it).

    Args:
        folder: the run folder.
        folder_key: the recipe key or flag that selects another folder, for error messages; None if there is none.

    Example:
        >>> with RunLock("runs/math"):              # doctest: +SKIP
        ...     train()
    """

    NAME = ".lock"

    def __init__(self, folder: str | os.PathLike[str], *, folder_key: str | None = "output_dir") -> None:
        self.folder = Path(folder)
        self.folder_key = folder_key
        self._lock = FileLock(self.folder / self.NAME)

    def acquire(self, *, create: bool = True) -> None:
        """Acquire the folder's lock, or raise CheckpointError that names the process that has it.

        A missing folder is created, or raises FileNotFoundError without `create`.
        """
        try:
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
            taken = self._lock.try_acquire()
            if not taken:  # perhaps only `is_locked` is testing the lock
                time.sleep(PROBE_SECONDS)
                taken = self._lock.try_acquire()
        except FileNotFoundError:
            if not create:
                raise
            raise self._unwritable("it was removed by another process") from None
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if not taken:
            raise self._in_use()

    def _in_use(self) -> CheckpointError:
        cause = f"the run folder {self.folder} is in use by {self._lock.holder()}"
        if self.folder_key is None:
            return CheckpointError(cause, "wait for it to end, or stop it")
        return CheckpointError(cause, f"wait for it to end, stop it, or give another {self.folder_key}")

    def _unwritable(self, why: str) -> CheckpointError:
        cause = f"cannot write in the run folder {self.folder}: {why}"
        if self.folder_key is None:
            return CheckpointError(cause, "check the permissions of the folder and its files")
        return CheckpointError(cause, f"give another {self.folder_key}, in a folder that can be written")

    def release(self) -> None:
        """Releases the lock on the folder; does nothing if it is not locked."""
        self._lock.release()

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
