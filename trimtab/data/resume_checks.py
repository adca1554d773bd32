"""Checks on resume: the data and the loader's settings must be those that the run began with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from trimtab.data.fingerprints import FileStamp

SourceSettings = tuple[str | int | float, ...]
"""Name, fingerprint and tokenizer's fingerprint of a source, then its sequences and the number drawn (cached), or its
weight (streamed)."""


@dataclass(frozen=True)
class CorpusManifest:
    """The files that a corpus was read from; stored in the run folder to detect changed data on resume."""

    source: str
    fingerprint: str
    files: tuple[tuple[str, int, str], ...]
    """(name, bytes, digest) of each file."""

    @staticmethod
    def of(name: str, fingerprint: str, stamps: Iterable[FileStamp]) -> CorpusManifest:
        """The manifest of files that were read."""
        return CorpusManifest(
            name, fingerprint, tuple((stamp.name, stamp.size, stamp.digest) for stamp in stamps)
        )

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> CorpusManifest:
        """The inverse of `to_dict`."""
        return CorpusManifest(
            saved["source"], saved["fingerprint"], tuple(tuple(file) for file in saved["files"])
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        files = [list(file) for file in self.files]
        return {"version": 1, "source": self.source, "fingerprint": self.fingerprint, "files": files}

    def check(self, now: CorpusManifest) -> None:
        """Raises a DataError that names the changed files if `now` has other data."""
        if self.fingerprint == now.fingerprint:
            return
        before = {name: digest for name, _, digest in self.files}
        after = {name: digest for name, _, digest in now.files}
        changes = [
            ("missing", [name for name in before if name not in after]),
            ("changed", [name for name in before if name in after and before[name] != after[name]]),
            ("new", [name for name in after if name not in before]),
        ]
        descriptions = [
            f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for what, names in changes
            if names
        ]
        raise DataError(
            f"the data of {now.source} has changed since the run began"
            f" ({'; '.join(descriptions) or 'it is read with different settings'})",
            "restore the files, or start a new run",
        )


@dataclass(frozen=True)
class LoaderSettings:
    """The settings that decide which tokens each step of a loader sees."""

    seed: int
    max_seq_length: int
    packing: bool
    sources: tuple[SourceSettings, ...]
    replay_share: float | None = None
    """Only of a streamed loader; a cached one has it in the counts of its sources."""
    group_by_length: tuple[int, int] | None = None
    """(sequences per microbatch, sequences per step) if grouped by length: they determine the groups."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a position as JSON."""
        settings: dict[str, Any] = {
            "seed": self.seed,
            "max_seq_length": self.max_seq_length,
            "packing": self.packing,
        }
        if self.replay_share is not None:
            settings["replay_share"] = self.replay_share
        settings["sources"] = [list(source) for source in self.sources]
        if self.group_by_length is not None:
            settings["group_by_length"] = list(self.group_by_length)
        return settings

    def check(self, position: Mapping[str, Any]) -> None:
        """Raises an error that names the first setting in which a saved position differs."""
        saved, now = position.get("settings"), self.to_dict()
        if position.get("version") != 1 or not isinstance(saved, dict):
            raise CheckpointError(
                "the checkpoint's data position cannot be read",
                "resume with the trimtab version that wrote it",
            )
        for name in [key for key in now if key != "sources"]:
            if saved.get(name) != now[name]:
                raise CheckpointError(
                    f"the run began with {name} {saved.get(name)} and now has {now[name]}",
                    f"restore the former {name}, or start a new run",
                )
        if len(saved["sources"]) != len(now["sources"]):
            raise CheckpointError(
                f"the run began with {len(saved['sources'])} sources and now has {len(now['sources'])}",
                "restore the recipe's data section, or start a new run",
            )
        for before, after in zip(saved["sources"], now["sources"], strict=True):
            if list(before) != after:
                raise DataError(
                    f"the data of {after[0]} has changed since the run began",
                    "restore the files, their weights and the tokenizer, or start a new run",
                )
