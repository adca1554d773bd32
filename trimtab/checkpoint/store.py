"""Checkpoint store of a run: save in the background, find the latest valid checkpoint, load in place."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from trimtab.checkpoint import layout, manifest
from trimtab.checkpoint import scalars as scalar_json
from trimtab.checkpoint import tensors as tensor_files
from trimtab.checkpoint.lock import FileLock
from trimtab.checkpoint.manifest import DamagedCheckpoint, Manifest, TensorEntry
from trimtab.checkpoint.ranks import Ranks
from trimtab.checkpoint.spec import FILE_BYTES, STATE_BYTES, TENSOR_OVERHEAD
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError, ResourceError, TrimtabError
from trimtab.facts.files import FileDigest, digest, write_atomic
from trimtab.facts.units import format_bytes, format_seconds

BEST = "best"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUM_NAMED = 3


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint. `verified`: all checksums were compared."""

    step: int
    path: Path
    verified: bool = False


@dataclass(frozen=True)
class _Save:
    """A save that is being written to disk."""

    step: int
    tags: tuple[str, ...]
    copies: dict[str, torch.Tensor]
    table: dict[str, TensorEntry]
    state: str
    needed: int


class Store:
    """Checkpoints of one run in `folder`. With several ranks, construct and call it on all of them.

    `save` copies the state to host memory and returns; a background thread writes it, one save at a time. An error in
    that thread is reported immediately and raised by `wait` or `close`. `on_event` receives one-line messages, partly
    from that thread; `on_published` receives the step of every complete checkpoint, from that thread on rank 0.
    `base` identifies the frozen weights, which are not saved; it is stored in every manifest.

    Example:
        >>> store = Store("run/checkpoints", keep_last=2)                           # doctest: +SKIP
        >>> store.save(100, {"weight": weight}, {"loader": {"sequence": 7}})        # doctest: +SKIP
        >>> found = store.latest()                                                  # doctest: +SKIP
        >>> store.load(found, {"weight": weight})                                   # doctest: +SKIP
        {'loader': {'sequence': 7}}
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = 2,
        on_event: Callable[[str], None] = print,
        on_published: Callable[[int], None] | None = None,
        file_bytes: int = FILE_BYTES,
        base: BaseWeights | None = None,
    ) -> None:
        assert keep_last is None or keep_last >= 1, "keep at least the last checkpoint, or None for all"
        self.folder = Path(folder)
        self.keep_last = keep_last
        self._report = on_event
        self._on_published = on_published
        self._file_bytes = file_bytes
        self._base = base
        self._ranks = Ranks()
        self._host = tensor_files.HostCopy()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._published: str | None = None

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        scalars: dict[str, Any],
        *,
        tags: Collection[str] = (),
        wait: bool = False,
    ) -> None:
        """Save a snapshot of the state; the caller may change the tensors after the call.

        `scalars` are plain JSON values, the same on every rank; tuples are loaded as lists. A tag (`best`) protects
        the newest checkpoint with that tag from pruning; a step saved twice in a row keeps its tags. Raises
        ResourceError, before copying anything, if the disk is full. An error of an earlier background save was
        reported to `on_event`; it does not prevent this save.
        """
        assert step >= 0
        for tag in tags:
            assert tag.isidentifier(), f"{tag!r} cannot be a tag"
            assert tag != layout.LATEST, "the latest checkpoint is known without a tag"
        own = tensor_files.describe(tensors)
        state = scalar_json.encode(scalars)
        if self._pending is not None and not self._pending[1].done():
            self._notify(f"waiting until the checkpoint of step {self._pending[0]} is written")
        # Errors of an earlier save were reported when they happened; they do not prevent this one.
        with suppress(TrimtabError):
            self.wait()
        table = {name: entry for part in self._ranks.run_on_all(lambda: own) for name, entry in part.items()}
        needed = sum(tensor_files.nbytes(entry) + TENSOR_OVERHEAD for entry in table.values())
        needed += len(state) + STATE_BYTES
        self._ranks.run_on_leader(lambda: self._check_space(step, needed))
        save = _Save(step, tuple(sorted(set(tags))), self._host.copy(tensors), table, state, needed)
        self._pending = (step, self._thread.submit(self._write, save))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the background save; raises its error once."""
        if self._pending is not None:
            _, future = self._pending
            try:
                future.result()
            finally:
                if future.done():  # not when the wait itself was interrupted
                    self._pending = None

    def close(self) -> None:
        """Wait for the background save, then stop the thread and destroy the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._ranks.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def latest(self, verify: bool = True) -> SavedCheckpoint | None:
        """The latest valid checkpoint, or None. Damaged ones are skipped with a message that names the file.

        `verify` reads every byte of the candidate; without it only manifest and sizes are checked. Files of
        interrupted saves are removed as well, unless a process is writing.
        """
        return self._find(None, verify)

    def best(self, verify: bool = True) -> SavedCheckpoint | None:
        """The newest valid checkpoint with the tag `best`, or None."""
        return self._find(BEST, verify)

    def at(self, step: int, verify: bool = True) -> SavedCheckpoint | None:
        """The valid checkpoint of one step, or None."""
        self.wait()
        return self._ranks.run_on_leader(lambda: self._search(None, verify, step))

    def steps(self) -> list[int]:
        """Sorted steps of the checkpoints with a valid manifest and valid file sizes; checksums are not compared."""
        self.wait()
        return self._ranks.run_on_leader(
            lambda: sorted(entry.step for _, entry in layout.list_checkpoints(self.folder))
        )

    def prune(self, checkpoint: SavedCheckpoint) -> None:
        """Remove all but the `keep_last` newest checkpoints, as after a save, if `checkpoint` is the newest one.

        It must be verified. If a later one exists, that one is damaged and nothing is removed.

        Example:
            >>> store.prune(store.latest())                                             # doctest: +SKIP
        """

        def work() -> None:
            ordered = layout.list_checkpoints(self.folder)
            if not ordered or ordered[0][0] != checkpoint.path:
                return
            try:
                for name in layout.prune(self.folder, self.keep_last):
                    self._report(f"removed {name}: save_total_limit is {self.keep_last}")
            except OSError as error:  # the next save checks the free space
                self._report(f"could not remove old checkpoints in {self.folder}: {error.strerror or error}")

        self._ranks.run_on_leader(work)

    def load(
        self, found: SavedCheckpoint, tensors: dict[str, torch.Tensor], *, partial: bool = False
    ) -> dict[str, Any]:
        """Load `tensors` in place, in their current sharding, and return the scalars.

        Names, shapes and dtypes must match the checkpoint's, otherwise CheckpointError names the first differences and
        nothing is changed. With `partial` the checkpoint may contain more tensors (load weights without optimizer
        states).
        """
        self.wait()
        wanted = tensor_files.describe(tensors)
        stored = self._ranks.run_on_leader(lambda: manifest.verify(found.path, checksums=not found.verified))
        # A pipeline rank requests only its own stage; a tensor that no rank requests is a difference.
        requested = {name for names in self._ranks.run_on_all(lambda: list(wanted)) for name in names}
        have = {
            name: entry
            for name, entry in stored.tensors.items()
            if name in wanted or not (partial or name in requested)
        }
        self._ranks.run_on_all(lambda: _compare(found.path, have, wanted))
        self._published = None
        if requested:
            tensor_files.read(found.path, tensors, self._ranks)
        return self.scalars(found)

    def scalars(self, found: SavedCheckpoint) -> dict[str, Any]:
        """Read only the scalars of a checkpoint."""
        return scalar_json.decode((found.path / manifest.STATE).read_text(encoding="utf-8"))

    def _find(self, tag: str | None, verify: bool) -> SavedCheckpoint | None:
        self.wait()
        return self._ranks.run_on_leader(lambda: self._search(tag, verify))

    def _search(self, tag: str | None, verify: bool, step: int | None = None) -> SavedCheckpoint | None:
        if not self.folder.is_dir():
            return None
        self._recover()
        for path, stored in layout.list_checkpoints(self.folder, self._report):
            if (tag is not None and tag not in stored.tags) or step not in (None, stored.step):
                continue
            try:
                manifest.verify(path, checksums=verify)
            except DamagedCheckpoint as error:
                self._report(f"skipping a damaged checkpoint: {error}")
                continue
            return SavedCheckpoint(stored.step, path, verified=verify)
        return None

    def _recover(self) -> None:
        lock = FileLock(self.folder / layout.WRITER_LOCK)
        try:
            if lock.try_acquire():
                for name in layout.recover(self.folder):
                    self._report(f"removed {name}, left by an interrupted save")
        except OSError as error:
            # A read-only or full file system can still be read.
            self._report(f"could not clean up {self.folder}: {error.strerror or error}")
        finally:
            lock.release()

    def _check_space(self, step: int, needed: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise _explain(error, self.folder, step, needed, self.keep_last) from error
        if free < needed:
            raise _no_space(self.folder, step, needed, free, self.keep_last)

    def _write(self, save: _Save) -> None:
        """Write, check, publish and prune; runs in the background thread of every rank."""
        started = time.monotonic()
        lock = FileLock(self.folder / layout.WRITER_LOCK)
        staging: Path | None = None
        try:
            staging = self._ranks.run_on_leader(lambda: self._begin(save, lock))
            tensor_files.write(staging, save.copies, self._ranks, self._file_bytes)
            assert staging is not None
            written: dict[str, FileDigest] = {}
            for part in self._ranks.run_on_all(lambda: self._check(staging, save)):
                written.update(part)
            gone = self._ranks.run_on_leader(lambda: self._publish(staging, save, written))
        except (OSError, TrimtabError) as error:
            known = (
                _explain(error, self.folder, save.step, save.needed, self.keep_last)
                if isinstance(error, OSError)
                else error
            )
            self._notify(f"the checkpoint of step {save.step} was not written: {known}")
            raise known from error
        finally:
            if self._ranks.is_leader:
                if staging is not None and staging.exists():
                    shutil.rmtree(staging, ignore_errors=True)
                lock.release()
        size = format_bytes(sum(file.size for file in written.values()))
        took = format_seconds(time.monotonic() - started)
        removed = f", removed {', '.join(gone)}" if gone else ""
        self._notify(f"saved {layout.step_name(save.step)} ({size} in {took}){removed}")

    def _begin(self, save: _Save, lock: FileLock) -> Path:
        if not lock.try_acquire():
            raise CheckpointError(
                f"{lock.holder()} is writing a checkpoint in {self.folder}",
                "let one run at a time use the folder",
            )
        layout.recover(self.folder)
        staging = layout.staging_path(self.folder, save.step)
        staging.mkdir()
        return staging

    def _check(self, staging: Path, save: _Save) -> dict[str, FileDigest]:
        own = tensor_files.own_files(staging, self._ranks)
        written = manifest.digests(own, sync=True)
        tensor_files.read_back(own, save.copies)
        return written

    def _publish(self, staging: Path, save: _Save, written: dict[str, FileDigest]) -> list[str]:
        write_atomic(staging / manifest.STATE, save.state)
        written[manifest.STATE] = digest(staging / manifest.STATE)
        tags = set(save.tags)
        sequence = 1
        for path, old in layout.list_checkpoints(self.folder):
            sequence = max(sequence, old.sequence + 1)
            if path.name == layout.step_name(save.step) == self._published:
                # A step saved again at the end of a run keeps its tags (`best`).
                tags |= set(old.tags)
        new = Manifest(save.step, sequence, tuple(sorted(tags)), written, save.table, self._base)
        write_atomic(staging / manifest.NAME, manifest.to_text(new))  # and syncs the folder
        manifest.verify(staging, checksums=False)
        self._published = layout.publish(self.folder, staging, save.step).name
        if self._on_published is not None:
            self._on_published(save.step)
        layout.update_pointers(self.folder)
        return layout.prune(self.folder, self.keep_last)

    def _notify(self, message: str) -> None:
        if self._ranks.is_leader:
            self._report(message)


def _compare(path: Path, have: dict[str, TensorEntry], want: dict[str, TensorEntry]) -> None:
    """Raise CheckpointError with the first differences between a checkpoint's tensors and the requested ones."""
    both = [name for name in want if name in have]
    kinds = {
        "missing in the checkpoint": [name for name in want if name not in have],
        "only in the checkpoint": [name for name in have if name not in want],
        "different shape": [
            f"{name} {list(have[name].shape)} in the checkpoint, {list(want[name].shape)} in this run"
            for name in both
            if have[name].shape != want[name].shape
        ],
        "different dtype": [
            f"{name} {have[name].dtype} in the checkpoint, {want[name].dtype} in this run"
            for name in both
            if have[name].dtype != want[name].dtype
        ],
    }
    parts = []
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            parts.append(f"{kind}: {', '.join(names[:_NUM_NAMED])}{more}")
    if parts:
        raise CheckpointError(
            f"{path} is a checkpoint from another model or optimizer ({'; '.join(parts)})",
            "resume with the recipe that wrote it, or set another output_dir",
        )


def _no_space(folder: Path, step: int, needed: int, free: int, keep_last: int | None) -> ResourceError:
    # The last checkpoint is kept until the next one is complete, so a limit of 1 cannot be lowered.
    fewer = "" if keep_last == 1 else " or keep fewer checkpoints (save_total_limit)"
    return ResourceError(
        f"not enough disk space for the checkpoint of step {step} in {folder}: it needs {format_bytes(needed)} "
        f"({needed} bytes), {format_bytes(free)} ({free} bytes) are free",
        f"free some space{fewer}, then resume; the earlier checkpoints are intact",
    )


def _explain(error: OSError, folder: Path, step: int, needed: int, keep_last: int | None) -> TrimtabError:
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"cannot write the checkpoint of step {step} in {folder}: one of its files is larger than this "
            f"process or file system allows; the checkpoint needs {format_bytes(needed)} ({needed} bytes)",
            "raise the file size limit (ulimit -f), or move the run folder to another disk, then resume; the "
            "earlier checkpoints are intact",
        )
    if error.errno in _FULL:
        return _no_space(folder, step, needed, shutil.disk_usage(folder).free, keep_last)
    return CheckpointError(
        f"cannot write the checkpoint of step {step} in {folder}: {error.strerror or error}",
        "check that the folder exists and can be written; the earlier checkpoints were not touched",
    )
