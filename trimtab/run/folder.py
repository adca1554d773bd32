"""The run folder: its paths, how it is created, emptied and locked, and atomic writes of its small files."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint import RunLock
from trimtab.checkpoint.layout import step_folders
from trimtab.checkpoint.lock import is_locked
from trimtab.facts import files
from trimtab.facts.errors import CheckpointError, ResourceError

OURS = (
    RunLock.NAME,
    "recipe.yaml",
    "plan.json",
    "choices.json",
    "environment.json",
    "metrics.jsonl",
    "model",
    "start",
    "checkpoints",
    "tensorboard",
    "wandb",
    "oom.json",
    "oom.txt",
)
"""Everything that a run folder contains before its first step."""
OOM_REPORT = ("oom.json", "oom.txt")
"""The report of a run that ran out of memory; it is kept, with everything that the run can be started from."""
REMOVED_LAST = (RunLock.NAME, "recipe.yaml")
"""Files that are removed last when a folder is emptied."""
ADDED_LATER = ("receipts", "report.html", ".demo")
"""Files and folders that training, the report or a demo add later."""
_TEMPORARY = re.compile(
    r"\.[a-z]+\.(?:(?:yaml|jsonl?|html)\.tmp-[0-9a-f]+|jsonl\.tmp)|\.start\.tmp-[0-9a-f]+"
)
"""Names of temporary files and folders, which remain if their writer was killed before the rename."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder.

    Example:
        >>> RunFolder(Path("runs/a")).metrics.name
        'metrics.jsonl'
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """The plan: predicted memory, time and disk."""
        return self.path / "plan.json"

    @property
    def choices(self) -> Path:
        """The resolved configuration: every `auto` of the recipe as decided at the first start."""
        return self.path / "choices.json"

    @property
    def environment(self) -> Path:
        """Versions and machine."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """The metrics log, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """`step-…` folders."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """config.json and the tokenizer; with a checkpoint this is a complete model."""
        return self.path / "model"

    @property
    def receipts(self) -> Path:
        """Receipts of exports, and measured next to predicted memory and time."""
        return self.path / "receipts"

    @property
    def measured(self) -> Path:
        """Measured and predicted memory and time of every start of the run."""
        return self.receipts / "plan.json"

    @property
    def oom(self) -> Path:
        """The report of running out of memory, as data."""
        return self.path / OOM_REPORT[0]

    @property
    def oom_text(self) -> Path:
        """The same report as text."""
        return self.path / OOM_REPORT[1]

    @property
    def report(self) -> Path:
        """The one-page report."""
        return self.path / "report.html"

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is a run folder."""
        return (path / "recipe.yaml").is_file() and (path / "choices.json").is_file()

    def began(self) -> bool:
        """Whether steps were trained here: there is a checkpoint or a logged step."""
        if step_folders(self.checkpoints):
            return True
        if not self.metrics.is_file():
            return False
        with self.metrics.open("rb") as lines:
            return any(b'"kind": "train"' in line for line in lines)

    def checkpoint_bytes(self) -> int:
        """Disk space of the run's checkpoints; 0 if there are none."""
        return sum(path.stat().st_size for path in self.checkpoints.glob("step-*/*") if path.is_file())

    def check_new(self, key: str = "output_dir") -> None:
        """Raises if a new run would damage the folder's content: a run, or files that trimtab did not write.

        `key` is the recipe key that names the folder, for messages.
        """
        if self.began():
            raise CheckpointError(
                f"{self.path} already contains a run",
                f"resume it with {self.resume_command()}, or give another {key}",
            )
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file, not a folder", f"give another {key}")
        found = sorted(p.name for p in self.path.iterdir())
        foreign = [name for name in found if not _is_ours(name)]
        if foreign or (found and RunLock.NAME not in found):
            raise CheckpointError(
                f"{self.path} is not empty (it contains {(foreign or found)[0]})", f"give another {key}"
            )

    @contextmanager
    def create(self, recipe: str) -> Iterator[None]:
        """Creates and locks the folder of a new run; removes it again if the start fails before the first step.

        After running out of memory, recipe and report are kept, and `resume` can start the run with other keys.

        `recipe` is the text of recipe.yaml. It is created with the folder and removed last. A start that is killed at
        any moment therefore leaves a folder that `resume` can start, or none. After the first step nothing is removed:
        the training loop saves a checkpoint before it raises.
        """
        lock, own = self._acquire(recipe)
        with ExitStack() as stack:
            stack.callback(lock.release)
            self.check_new()
            try:
                write_text(self.recipe, recipe)
                self._clear()
                yield
            finally:
                if not self.began() and self.oom.is_file():
                    self._clear(keep=(*REMOVED_LAST, *OOM_REPORT, "start"))
                elif not self.began():
                    self._clear()
                    self._remove(own)

    @contextmanager
    def restart(self) -> Iterator[None]:
        """Empties the folder of a run that was never started, except for its recipe and initial weights.

        The caller has the lock. If nothing is trained this time either, the folder is emptied again at the end.
        """
        self._clear(keep=(*REMOVED_LAST, "start"))
        try:
            yield
        finally:
            if not self.began():
                self._clear(keep=(*REMOVED_LAST, *OOM_REPORT, "start"))

    def _acquire(self, recipe: str) -> tuple[RunLock, bool]:
        """Returns the folder's acquired lock, and whether a run created it, so that a failed start removes it."""
        while True:
            # `exists` is called twice: another start that fails may remove its folder in between.
            theirs = self.path.exists() and not self.recipe.exists() and self.path.exists()
            lock = self._publish(recipe)
            if lock is not None:
                return lock, not theirs
            lock = self.lock("output_dir")
            try:
                lock.acquire(create=False)
            except FileNotFoundError:  # removed just now
                continue
            return lock, not theirs

    def _publish(self, recipe: str) -> RunLock | None:
        """Creates the folder with recipe and lock file by one rename; returns its lock, which was acquired before that.

        Returns None if the folder already has files, or if another process was first.
        """
        try:
            with suppress(FileNotFoundError):
                if (not self.path.is_dir() and self.path.exists()) or any(self.path.iterdir()):
                    return None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_drafts()
            draft = self._draft()
            draft.mkdir()
            lock = RunLock(draft)
            try:
                lock.acquire()
                write_text(draft / "recipe.yaml", recipe)
                os.rename(draft, self.path)
            except BaseException:
                lock.release()
                raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            return lock
        except OSError as error:
            if self.path.is_dir() or error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None  # another process was first; the lock decides which one owns the folder
            raise CheckpointError(
                f"cannot write in the run folder {self.path}: {error.strerror or error}",
                "choose a writable output_dir",
            ) from error

    def _remove(self, own: bool) -> None:
        """Removes recipe and lock, and the folder itself if a run created it (`own`)."""
        left = {path.name for path in self.path.iterdir()}
        if own and left <= {RunLock.NAME, "recipe.yaml"}:
            draft = self._draft()
            os.rename(self.path, draft)
            shutil.rmtree(draft)
        elif not own:
            self.recipe.unlink(missing_ok=True)

    @property
    def _draft_prefix(self) -> str:
        return f".{self.path.name}.starting-"

    def _draft(self) -> Path:
        return self.path.parent / f"{self._draft_prefix}{os.getpid()}-{time.monotonic_ns()}"

    def _remove_drafts(self) -> None:
        """Removes drafts of killed starts: their process has ended and they are not locked."""
        for path in self.path.parent.iterdir():
            if not path.name.startswith(self._draft_prefix) or is_locked(path / RunLock.NAME):
                continue
            pid = path.name.removeprefix(self._draft_prefix).partition("-")[0]
            if not (pid.isdecimal() and _is_alive(int(pid))):
                shutil.rmtree(path, ignore_errors=True)

    def foreign(self) -> list[str]:
        """Names in the folder that trimtab does not write."""
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if not _is_ours(name) and name not in ADDED_LATER]

    def clear(self) -> None:
        """Removes a run, finished or not, except for lock and recipe; the caller has the lock."""
        assert not self.foreign(), self.foreign()
        self._clear(ADDED_LATER)

    def _clear(self, more: tuple[str, ...] = (), keep: tuple[str, ...] = REMOVED_LAST) -> None:
        """Removes everything that a run writes before its first step, and `more`, except for `keep`.

        choices.json is removed first: without it a folder counts as a run that was not started.
        """
        self.choices.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name in keep or not (_is_ours(path.name) or path.name in more):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove_oom_report(self) -> None:
        """Removes the report of an earlier start that ran out of memory."""
        for name in OOM_REPORT:
            (self.path / name).unlink(missing_ok=True)

    def lock(self, folder_key: str | None = None) -> RunLock:
        """Returns the lock of the folder: `with folder.lock():`. `folder_key` is its recipe key or flag, for errors."""
        return RunLock(self.path, folder_key=folder_key)

    def open(self) -> None:
        """Raises unless the run can be resumed, or started again from its recipe."""
        if not self.path.is_dir():
            what = "is a file, not a run folder" if self.path.exists() else "does not exist"
            raise CheckpointError(f"{self.path} {what}", "give the run folder that training printed")
        if self.choices.is_file():
            return
        if self.began():
            raise self._without_choices()
        names = {path.name for path in self.path.iterdir()}
        if self.recipe.is_file():
            # A start that was killed leaves lock and recipe. A folder with the user's own files is never emptied.
            if RunLock.NAME in names and not self.foreign():
                return
            raise CheckpointError(
                f"{self.path} contains a recipe and no run",
                f"start the recipe: `trimtab train {shlex.quote(str(self.recipe))}`",
            )
        if not names or (RunLock.NAME in names and all(_is_ours(name) for name in names)):
            raise CheckpointError(
                f"no run was started in {self.path} (it contains no recipe.yaml)",
                f"start it with `trimtab train RECIPE output_dir={shlex.quote(str(self.path))}`",
            )
        raise CheckpointError(
            f"{self.path} is not a run folder (it contains no recipe.yaml)",
            "give the run folder that training printed",
        )

    def _without_choices(self) -> CheckpointError:
        """The error for a run that was trained and has no choices.json."""
        missing = [path.name for path in (self.choices, self.recipe) if not path.is_file()]
        cause = f"{self.path} was trained and lacks {' and '.join(missing)}"
        if len(missing) > 1:
            return CheckpointError(cause, "restore both files from a copy")
        return CheckpointError(
            cause, f"restore the file from a copy, or train the recipe again: {self.retrain_command()}"
        )

    def resume_command(self) -> str:
        """The command that resumes this run."""
        return f"`trimtab train --resume {shlex.quote(str(self.path))}`"

    def retrain_command(self) -> str:
        """The command that trains this folder's recipe from step 0 in another folder."""
        again = shlex.quote(f"{self.path}-again")
        return f"`trimtab train {shlex.quote(str(self.recipe))} output_dir={again}`"


def _is_alive(pid: int) -> bool:
    """Whether another process has this id; a draft with this process's own id is left from an earlier process."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_ours(name: str) -> bool:
    return name in OURS or _TEMPORARY.fullmatch(name) is not None


def write_text(path: Path, text: str) -> None:
    """Writes a small file atomically: readers see the old content or the new."""
    with _writing(path):
        files.write_atomic(path, text)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes indented JSON atomically, with keys in their order."""
    with _writing(path):
        files.write_json(path, data)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be written: {error.strerror}", "free some disk space or check the permissions"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a run folder; raises CheckpointError if it is damaged."""
    try:
        return files.read_json_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            f"restore the file from a copy, or train the recipe again: {RunFolder(path.parent).retrain_command()}",
        ) from error
