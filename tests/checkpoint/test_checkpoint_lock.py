"""One writer per folder, by locks that are released when their process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.checkpoint import RunLock
from trimtab.checkpoint.lock import FileLock
from trimtab.facts.errors import CheckpointError

HOLDER = """
import os, sys, time
from trimtab.checkpoint import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print("locked", os.getpid(), flush=True)
time.sleep(60)
"""


def start_holder(folder: Path, kind: str = "plain") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), kind], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("locked")
    return process


def test_a_second_run_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    process = start_holder(tmp_path / "run")
    try:
        with pytest.raises(CheckpointError, match=f"in use by process {process.pid} on "):
            RunLock(tmp_path / "run").acquire()
    finally:
        process.kill()
        process.wait()
    with RunLock(tmp_path / "run"):  # kill −9 leaves the file, not the lock
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    process = start_holder(tmp_path, "fork")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    orphans = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    process.kill()
    process.wait()
    try:
        deadline = time.monotonic() + 5
        lock = FileLock(tmp_path / RunLock.NAME)
        while not (taken := lock.try_acquire()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert taken
        lock.release()
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)


def test_release_and_acquire_again(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    first.release()
    assert second.try_acquire()
    second.release()


def test_the_holder_of_an_unreadable_lock_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff\x00nonsense")
    assert FileLock(tmp_path / "lock").holder() == "another process"


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot write in the run folder"):
        RunLock(tmp_path / "file").acquire()
