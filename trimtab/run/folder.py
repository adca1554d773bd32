"""A run folder: what lies where, and how its small files are written so that none is ever half there."""

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
from trimtab.checkpoint.lock import is_held
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
"""All that a run folder has before its first step."""
EXPLAINED = ("oom.json", "oom.txt")
"""Why a run ran out of memory: it stays, and so does what the run can be started from."""
KEPT = (RunLock.NAME, "recipe.yaml")
"""What stays to the last when a folder is emptied."""
LATER = ("receipts", "report.html", ".demo")
"""What a run, or a demo, adds to it."""
_ON_THE_WAY = re.compile(
    r"\.[a-z]+\.(?:(?:yaml|jsonl?|html)\.tmp-[0-9a-f]+|jsonl\.tmp)|\.start\.tmp-[0-9a-f]+"
)
"""Names of files and folders whose writer was killed before they got their own."""


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
        """What the run was expected to take."""
        return self.path / "plan.json"

    @property
    def choices(self) -> Path:
        """Every `auto` of the recipe as it was decided at the first start."""
        return self.path / "choices.json"

    @property
    def environment(self) -> Path:
        """Versions and machine."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """`step-…` folders."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """config.json and the tokenizer: with a checkpoint, all that is needed to use the model."""
        return self.path / "model"

    @property
    def receipts(self) -> Path:
        """Proofs of exports, and what the run took beside what was predicted."""
        return self.path / "receipts"

    @property
    def measured(self) -> Path:
        """What every start of the run took, beside what was predicted."""
        return self.receipts / "plan.json"

    @property
    def oom(self) -> Path:
        """Why the run ran out of memory."""
        return self.path / EXPLAINED[0]

    @property
    def oom_text(self) -> Path:
        """The same to read."""
        return self.path / EXPLAINED[1]

    @property
    def report(self) -> Path:
        """The one-page report."""
        return self.path / "report.html"

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is one of ours."""
        return (path / "recipe.yaml").is_file() and (path / "choices.json").is_file()

    def began(self) -> bool:
        """Whether anything was learnt here: a checkpoint, or a logged step."""
        if step_folders(self.checkpoints):
            return True
        if not self.metrics.is_file():
            return False
        with self.metrics.open("rb") as lines:
            return any(b'"kind": "train"' in line for line in lines)

    def checkpoint_bytes(self) -> int:
        """What the run's checkpoints take on the disk; 0 where there are none."""
        return sum(path.stat().st_size for path in self.checkpoints.glob("step-*/*") if path.is_file())

    def check_new(self, key: str = "output_dir") -> None:
        """Refuses a folder that a new run would spoil: one with a run, or with anything that is not ours.

        `key` is what names the folder, for messages.
        """
        if self.began():
            raise CheckpointError(
                f"{self.path} already holds a run",
                f"continue it with {self.resuming()}, or give another {key}",
            )
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file, not a folder", f"give another {key}")
        found = sorted(p.name for p in self.path.iterdir())
        foreign = [name for name in found if not _is_ours(name)]
        if foreign or (found and RunLock.NAME not in found):
            raise CheckpointError(
                f"{self.path} is not empty ({(foreign or found)[0]} is in it)", f"give another {key}"
            )

    @contextmanager
    def create(self, recipe: str) -> Iterator[None]:
        """Creates and locks the folder of a new run; a start that fails before the first step removes it again, unless
        it ran out of memory: then the recipe and the report of that stay, and `resume` starts it with other keys.

        `recipe` is the text of recipe.yaml. It is in the folder from the first instant on and goes last, so that a
        start that is killed at any instant leaves a folder that `resume` can begin again, or none at all. From the
        first step on there is something to keep: the loop saves before any error leaves it.
        """
        lock, own = self._take(recipe)
        with ExitStack() as held:
            held.callback(lock.release)
            self.check_new()
            try:
                write_text(self.recipe, recipe)
                self._clear()
                yield
            finally:
                if not self.began() and self.oom.is_file():
                    self._clear(keep=(*KEPT, *EXPLAINED, "start"))
                elif not self.began():
                    self._clear()
                    self._vanish(own)

    @contextmanager
    def begin_again(self) -> Iterator[None]:
        """Empties the folder of a run that was never begun, but for its recipe and the weights it begins from; the
        caller holds the lock. If nothing is trained this time either, these alone are left."""
        self._clear(keep=(*KEPT, "start"))
        try:
            yield
        finally:
            if not self.began():
                self._clear(keep=(*KEPT, *EXPLAINED, "start"))

    def _take(self, recipe: str) -> tuple[RunLock, bool]:
        """(the folder's lock, held; whether a run made the folder, so that a failed start removes it)."""
        while True:
            # Looked at twice: another start that fails removes its folder as a whole.
            theirs = self.path.exists() and not self.recipe.exists() and self.path.exists()
            lock = self._appear(recipe)
            if lock is not None:
                return lock, not theirs
            lock = self.lock("output_dir")
            try:
                lock.acquire(create=False)
            except FileNotFoundError:  # removed just now
                continue
            return lock, not theirs

    def _appear(self, recipe: str) -> RunLock | None:
        """Publishes the folder, with recipe and lock file in it, by one rename; returns its lock, held since before.

        Returns None where files are there already, or another process was quicker.
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
                return None  # another process was quicker; the lock decides whose it is
            raise CheckpointError(
                f"cannot write in the run folder {self.path}: {error.strerror or error}",
                "choose an output_dir that can be written",
            ) from error

    def _vanish(self, own: bool) -> None:
        """Removes recipe and lock, and the folder itself where a run made it (`own`)."""
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
        """Removes what killed starts left; the draft of a process that lives, or whose lock is held, is its own."""
        for path in self.path.parent.iterdir():
            if not path.name.startswith(self._draft_prefix) or is_held(path / RunLock.NAME):
                continue
            pid = path.name.removeprefix(self._draft_prefix).partition("-")[0]
            if not (pid.isdecimal() and _lives(int(pid))):
                shutil.rmtree(path, ignore_errors=True)

    def foreign(self) -> list[str]:
        """Names in the folder that no run writes."""
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if not _is_ours(name) and name not in LATER]

    def clear(self) -> None:
        """Removes a whole run, finished or not, but for lock and recipe; the caller holds the lock."""
        assert not self.foreign(), self.foreign()
        self._clear(LATER)

    def _clear(self, more: tuple[str, ...] = (), keep: tuple[str, ...] = KEPT) -> None:
        """Removes what a run writes before its first step, and `more`, but for `keep`.

        choices.json goes first: without it a folder is known to be a run that was not begun.
        """
        self.choices.unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.name in keep or not (_is_ours(path.name) or path.name in more):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove_explanations(self) -> None:
        """Removes the report of an earlier start that ran out of memory."""
        for name in EXPLAINED:
            (self.path / name).unlink(missing_ok=True)

    def lock(self, elsewhere: str | None = None) -> RunLock:
        """One process at a time: `with folder.lock():`. `elsewhere` is the key that names another folder."""
        return RunLock(self.path, elsewhere=elsewhere)

    def open(self) -> None:
        """Checks that a run can be continued here, or begun again from its recipe; says what is missing if not."""
        if not self.path.is_dir():
            what = "is a file, not a run folder" if self.path.exists() else "does not exist"
            raise CheckpointError(f"{self.path} {what}", "give the run folder that training printed")
        if self.choices.is_file():
            return
        if self.began():
            raise self._without_choices()
        names = {path.name for path in self.path.iterdir()}
        if self.recipe.is_file():
            # A start that was killed leaves lock and recipe. A user's own folder is never emptied for another start.
            if RunLock.NAME in names and not self.foreign():
                return
            raise CheckpointError(
                f"{self.path} holds a recipe and no run",
                f"start the recipe: `trimtab train {shlex.quote(str(self.recipe))}`",
            )
        if not names or (RunLock.NAME in names and all(_is_ours(name) for name in names)):
            raise CheckpointError(
                f"no run was begun in {self.path} (there is no recipe.yaml in it)",
                f"start it with `trimtab train RECIPE output_dir={shlex.quote(str(self.path))}`",
            )
        raise CheckpointError(
            f"{self.path} is not a run folder (no recipe.yaml in it)",
            "give the run folder that training printed",
        )

    def _without_choices(self) -> CheckpointError:
        """The error for a run that was trained and whose choices.json is gone."""
        missing = [path.name for path in (self.choices, self.recipe) if not path.is_file()]
        cause = f"{self.path} was trained and lacks {' and '.join(missing)}"
        if len(missing) > 1:
            return CheckpointError(cause, "restore both files from a copy")
        return CheckpointError(cause, f"restore it from a copy, or train it again: {self.anew()}")

    def resuming(self) -> str:
        """The command that continues this run."""
        return f"`trimtab train --resume {shlex.quote(str(self.path))}`"

    def anew(self) -> str:
        """The command that trains this folder's recipe from its beginning in another folder."""
        again = shlex.quote(f"{self.path}-again")
        return f"`trimtab train {shlex.quote(str(self.recipe))} output_dir={again}`"


def _lives(pid: int) -> bool:
    """Whether another process of this machine has this id; a draft with our own was left by an earlier process."""
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
    return name in OURS or _ON_THE_WAY.fullmatch(name) is not None


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old one or the new one, never a part."""
    with _writing(path):
        files.write_atomic(path, text)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """`write_text` of readable JSON, its keys in their order."""
    with _writing(path):
        files.write_json(path, data)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be written: {error.strerror}", "free some space or check rights"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run folder; CheckpointError where it is damaged."""
    try:
        return files.read_json_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            f"restore it from a copy, or train it again: {RunFolder(path.parent).anew()}",
        ) from error
