"""The frozen weights that adapters are trained on, named so that they are found again: source, revision, checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.files import FileDigest
from trimtab.facts.names import with_article


@dataclass(frozen=True)
class BaseWeights:
    """Where a base model's weights come from. Checkpoints, exported adapters and receipts hold it as JSON.

    Example:
        >>> BaseWeights("Qwen/Qwen3-0.6B", "abc", {"model.safetensors": FileDigest(3, "00")}).to_dict()
        {'source': 'Qwen/Qwen3-0.6B', 'revision': 'abc', 'files': {'model.safetensors': {'size': 3, 'sha256': '00'}}}
    """

    source: str
    """Hub id, folder, GGUF file or `starter`, as the recipe names it."""
    revision: str | None = None
    """Commit of a hub id."""
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """Size and checksum of each weight file by name; empty where they are not known."""
    seed: int | None = None
    """Of weights that were initialized at random and lie in no file; None for others."""

    @property
    def is_random(self) -> bool:
        """Whether the weights were initialized from a seed."""
        return self.seed is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` is the inverse."""
        files = {name: dataclasses.asdict(file) for name, file in self.files.items()}
        plain = {"source": self.source, "revision": self.revision, "files": files}
        return {**plain, "init": "random", "seed": self.seed} if self.is_random else plain

    @staticmethod
    def from_dict(data: object) -> BaseWeights:
        """From the JSON of a checkpoint or an adapter.

        Raises:
            ValueError: the data is no such object.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"it is {with_article(type(data).__name__)} and not an object")
        source, revision, files = data.get("source"), data.get("revision"), data.get("files")
        seed = data.get("seed") if data.get("init") == "random" else None
        if not isinstance(source, str) or not isinstance(revision, str | None):
            raise ValueError("it names no source, or a revision that is no text")
        if not isinstance(files, dict) or not isinstance(seed, int | None):
            raise ValueError("it lists no files, or its seed is no number")
        return BaseWeights(source, revision, {name: _digest(file) for name, file in files.items()}, seed)


def _digest(data: Any) -> FileDigest:
    if isinstance(data, dict) and type(data.get("size")) is int and isinstance(data.get("sha256"), str):
        return FileDigest(data["size"], data["sha256"])
    raise ValueError("a file in it has no size or no sha256")
