"""Local files of a model or dataset, and the validation of names given by users and servers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from trimtab.facts.errors import HubError
from trimtab.facts.names import unusable_name

Kind = Literal["folder", "gguf", "dataset", "local"]
_ID_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class LocalFiles:
    """Local files of a model or a dataset."""

    kind: Kind
    """"folder": a Hugging Face folder; "gguf": one file; "dataset": `files`; "local": data as given."""
    path: Path
    commit: str | None
    """The commit of the files; None for local paths."""
    files: list[Path] = field(default_factory=list)
    """The data files of a dataset, sorted by name."""
    name: str = ""
    config: str | None = None
    split: str | None = None


def looks_local(name: str) -> bool:
    """Whether a name that does not exist is a path, so that the hub is not queried.

    `runs/demp` is a typo and no repository id if a folder `runs` exists.

    Example:
        >>> [looks_local(n) for n in ("./model", "/data/x", "Qwen/Qwen3-0.6B", "runs/a/b")]
        [True, True, False, True]
    """
    parts = name.split("/")
    if unusable_name(name) or name.startswith((".", "/", "~")) or "\\" in name or name.endswith("/"):
        return True
    if len(parts) > 1 and Path(parts[0]).is_dir():
        return True
    return not 1 <= len(parts) <= 2 or not all(_ID_PART.fullmatch(part) for part in parts)


def check_name(name: str, repo_id: str) -> str:
    """Return a file name from a server if it is a plain relative path, otherwise raise HubError."""
    pure = PurePosixPath(name)
    plain = name and not name.startswith("/") and str(pure) == name and ".." not in pure.parts
    if not plain or "\\" in name or ":" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise HubError(
            f"{repo_id} lists a file named {name!r}",
            "the path is outside the repository's folder; use another copy of the repository",
        )
    return name
