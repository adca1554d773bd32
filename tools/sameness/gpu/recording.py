"""Recordings of one commit in a folder: a compressed file for each case, and one for each compiled kernel."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.sameness.gpu.compiled import Compiled
from tools.sameness.gpu.log import Entry, Specialization


@dataclass(frozen=True)
class Recording:
    """The log of one case."""

    case: str
    entries: list[Entry] = field(default_factory=list)
    specializations: dict[str, Specialization] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


class Store:
    """The folder of a commit.

    Example:
        >>> store = Store(Path("recordings/58221e4"))  # doctest: +SKIP
        >>> store.read("call/rope/bf16/64").entries[-1].name  # doctest: +SKIP
        'launch rope._rope_kernel'
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self, cases: Iterable[str]) -> list[str]:
        """The cases that have to be recorded."""
        return [case for case in cases if not self._case(case).exists()]

    def recover(self) -> None:
        """Remove incomplete results of killed processes: kernels that they claimed, and the cases that need them."""
        stopped = {path.stem: path for path in self.folder.glob("kernels/*.json") if not path.stat().st_size}
        if not stopped:
            return
        for path in self.folder.glob("cases/*.json.gz"):
            recording = self._read(path)
            if stopped.keys() & recording.specializations:
                path.unlink()
        for path in stopped.values():
            path.unlink()

    def write(self, recording: Recording) -> None:
        """Write a case atomically."""
        path = self._case(recording.case)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".writing")
        with gzip.open(draft, "wt", encoding="utf-8", compresslevel=3) as out:
            json.dump(asdict(recording), out)
        draft.rename(path)

    def read(self, case: str) -> Recording | None:
        """A case; None if it was not recorded."""
        return self._read(self._case(case)) if self._case(case).exists() else None

    def _read(self, path: Path) -> Recording:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            kept = json.load(file)
        kept["entries"] = [Entry(**one) for one in kept["entries"]]
        kept["specializations"] = {
            key: Specialization(**{**one, "aligned": tuple(one["aligned"])})
            for key, one in kept["specializations"].items()
        }
        return Recording(**kept)

    def claim(self, key: str) -> bool:
        """Whether this process must compile a kernel: True for the first process that calls this."""
        self._kernel(key).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._kernel(key).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def write_kernel(self, key: str, compiled: Compiled | None, error: str | None = None) -> None:
        """Stores a kernel that was claimed, or its compilation error."""
        kept = {"compiled": compiled and asdict(compiled), "error": error}
        self._kernel(key).write_text(json.dumps(kept), encoding="utf-8")

    def read_kernel(self, key: str) -> Compiled | str:
        """A compiled kernel, or the error."""
        text = self._kernel(key).read_text(encoding="utf-8") if self._kernel(key).exists() else ""
        if not text:
            return "its compilation was stopped"
        kept = json.loads(text)
        return Compiled(**kept["compiled"]) if kept["compiled"] else str(kept["error"])

    def write_launchable(self, kernels: Iterable[str]) -> None:
        """Stores module and function of all kernels that the commit has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "launchable.json").write_text(json.dumps(sorted(kernels)), encoding="utf-8")

    def launchable(self) -> set[str]:
        """Module and function of all kernels that the commit has."""
        return set(json.loads((self.folder / "launchable.json").read_text(encoding="utf-8")))

    def _case(self, case: str) -> Path:
        return self.folder / "cases" / f"{case.replace('/', '~')}.json.gz"

    def _kernel(self, key: str) -> Path:
        return self.folder / "kernels" / f"{key}.json"
