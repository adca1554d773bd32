"""Identity of the frozen base weights of an adapter: source, revision and checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.files import FileDigest
from trimtab.facts.names import with_article


@dataclass(frozen=True)
class BaseWeights:
    """Origin of a base model's weights. Checkpoints, exported adapters and receipts store it as JSON.

    Example:
        >>> BaseWeights("Qwen/Qwen3-0.6B", "abc", {"model.safetensors": FileDigest(3, "00")}).to_dict()
        {'source': 'Qwen/Qwen3-0.6B', 'revision': 'abc', 'files': {'model.safetensors': {'size': 3, 'sha256': '00'}}}
    """

    source: str
    """Hub id, folder, GGUF file or `starter`, as in the recipe."""
    revision: str | None = None
    """Commit of a hub id."""
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """Size and checksum of each weight file by name; empty if unknown."""
    seed: int | None = None
    """Seed of randomly initialized weights; None if the weights are loaded from files."""

    @property
    def is_random(self) -> bool:
        """Whether the weights were initialized from a seed."""
        return self.seed is not None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data; `from_dict` is the inverse."""
        files = {name: dataclasses.asdict(file) for name, file in self.files.items()}
        plain = {"source": self.source, "revision": self.revision, "files": files}
        return {**plain, "init": "random", "seed": self.seed} if self.is_random else plain

    @staticmethod
    def from_dict(data: object) -> BaseWeights:
        """Reads the JSON of a checkpoint or an adapter.

        Raises:
            ValueError: a field is missing or has the wrong type.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"it is {with_article(type(data).__name__)} and not an object")
        source, revision, files = data.get("source"), data.get("revision"), data.get("files")
        seed = data.get("seed") if data.get("init") == "random" else None
        if not isinstance(source, str) or not isinstance(revision, str | None):
            raise ValueError("its source is missing, or its revision is not a string")
        if not isinstance(files, dict) or not isinstance(seed, int | None):
            raise ValueError("its files are missing, or its seed is not an integer")
        return BaseWeights(source, revision, {name: _digest(file) for name, file in files.items()}, seed)


def _digest(data: Any) -> FileDigest:
    if isinstance(data, dict) and type(data.get("size")) is int and isinstance(data.get("sha256"), str):
        return FileDigest(data["size"], data["sha256"])
    raise ValueError("a file in it has no size or no sha256")
