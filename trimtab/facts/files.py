"""Atomic file writes, JSON objects and checksums. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def temporary_path(path: Path) -> Path:
    """Returns a unique hidden name in the folder of `path`, for a file that will be renamed to `path`.

    Example:
        >>> temporary_path(Path("runs/plan.json")).name.startswith(".plan.json.tmp-")
        True
    """
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Writes a file atomically, through a temporary name: readers see the old content or the new, never a part.

    Args:
        path: the file; its folder exists.
        content: text is written as UTF-8, with line endings unchanged.
        durable: fsync the file and its folder before returning, so that it survives a power failure.

    Raises:
        OSError: the file cannot be written. The old file is unchanged, and the temporary one is removed.

    Example:
        >>> write_atomic(Path("runs/a/recipe.yaml"), "seed: 1\\n")  # doctest: +SKIP
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # a file whose name is too long does not exist and cannot be removed
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name, which the caller does not know
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, data: Mapping[str, Any], *, durable: bool = True) -> None:
    """Writes indented JSON with `write_atomic`; keys keep their order.

    File names that are not UTF-8 contain surrogates, which are escaped: `read_json_object` returns the same names.

    Example:
        >>> write_json(Path("runs/a/plan.json"), {"steps": 100})  # doctest: +SKIP
    """
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode("utf-8", "backslashreplace"), durable=durable)


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, not UTF-8, nested too deeply, or not an object.

    Example:
        >>> read_json_object(Path("runs/a/plan.json"))["steps"]  # doctest: +SKIP
        100
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError(f"its top level is of type {type(data).__name__}")
    return data


def sync_file(path: Path) -> None:
    """Flushes a file's content to disk (fsync)."""
    with path.open("r+b") as file:  # Windows requires a writable descriptor
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to disk (fsync), so that renames in it are durable; no-op on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


def digest(path: Path) -> FileDigest:
    """Returns size and SHA-256 of a file.

    Example:
        >>> digest(Path("model.safetensors")).size  # doctest: +SKIP
        269060552
    """
    return FileDigest(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Returns a file's SHA-256 in hexadecimal, read in chunks.

    Example:
        >>> sha256_of(Path("model.safetensors"))[:8]  # doctest: +SKIP
        '9f86d081'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
