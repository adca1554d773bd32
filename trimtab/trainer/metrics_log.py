"""metrics.jsonl: one JSON object per line, appended during training, truncated when a run is resumed."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.facts.errors import CheckpointError, ResourceError, TrimtabError
from trimtab.facts.files import write_atomic


@dataclass(frozen=True)
class LogTruncation:
    """What `MetricsLog.truncate_after` removed, and the remaining steps."""

    removed: int = 0
    """Records of later steps."""
    damaged: tuple[int, ...] = ()
    """Numbers, from 1, of lines that could not be read, including an incomplete last line."""
    steps: frozenset[int] = field(default_factory=frozenset)
    """Training steps that remain in the log."""


class MetricsLog:
    """Appends records to a file, one complete line at a time; several threads may write.

    Every record reaches the operating system before `append` returns, so a killed process loses none; `sync`
    forces them to disk; call it before saving a checkpoint. NaN and infinities are written as the strings
    "NaN", "Infinity" and "-Infinity": JSON has no numbers for them, and null would hide them.

    Example:
        >>> with MetricsLog("run/metrics.jsonl") as log:                        # doctest: +SKIP
        ...     log.append({"kind": "train", "step": 1, "loss": 2.5})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._torn: tuple[int, ...] = ()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._drop_torn_line()
        except OSError as error:
            raise _explain(error, self.path) from error

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record. Raises ResourceError if the disk is full, and then leaves the file unchanged."""
        # Pure ASCII: str.splitlines also breaks at U+2028, which JSON would otherwise leave in a text.
        line = json.dumps(_valid(record), allow_nan=False).encode() + b"\n"
        with self._lock:
            end = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except OSError as error:
                os.ftruncate(self._file.fileno(), end)
                raise _explain(error, self.path) from error

    def sync(self) -> None:
        """Forces everything appended so far to disk."""
        with self._lock:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise _explain(error, self.path) from error

    def truncate_after(self, step: int) -> LogTruncation:
        """Removes the records after `step`, the checkpoint's step; returns what was removed and the remaining steps.

        It removes records of later steps, records without a step that follow such a record, and lines that
        cannot be read. The file is replaced atomically.
        """
        with self._lock:
            remaining: list[bytes] = []
            damaged, steps = list(self._torn), set()
            removed, past = 0, False
            for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
                record = _parse(line)
                if record is None:
                    damaged.append(number)
                    continue
                at = record.get("step")
                past = past or (isinstance(at, int) and at > step)
                if at > step if isinstance(at, int) else past:
                    removed += 1
                    continue
                remaining.append(line)
                if record.get("kind") == "train" and isinstance(at, int):
                    steps.add(at)
            if removed or damaged:
                try:
                    self._replace(b"".join(remaining))
                except OSError as error:
                    raise _explain(error, self.path) from error
            self._torn = ()
        return LogTruncation(removed, tuple(sorted(damaged)), frozenset(steps))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drop_torn_line(self) -> None:
        """Truncates a partial last line: a record appended to it would be lost."""
        size = os.fstat(self._file.fileno()).st_size
        if size:
            content = self.path.read_bytes()
            complete = content.rfind(b"\n") + 1
            if complete < size:
                self._torn = (content.count(b"\n") + 1,)
                os.ftruncate(self._file.fileno(), complete)

    def _replace(self, content: bytes) -> None:
        self._file.close()
        try:
            write_atomic(self.path, content)
        finally:
            self._file = self.path.open("ab", buffering=0)


class NoLog:
    """The log of every process of a mesh except the first; only the first one writes."""

    def append(self, record: dict[str, Any]) -> None:
        """Does nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def truncate_after(self, step: int) -> LogTruncation:
        """Does nothing."""
        return LogTruncation()

    def close(self) -> None:
        """Does nothing."""


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None when it is torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


def _valid(value: Any) -> Any:
    """`value` with non-finite numbers as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value


def _explain(error: OSError, path: Path) -> TrimtabError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(
            f"no space left for {path}", "free some space and resume; records already written are kept"
        )
    return CheckpointError(f"cannot write {path}: {error.strerror or error}", "check the run folder")
