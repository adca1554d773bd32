"""Checkpoint manifests: the list of files with their checksums, and verification against it. No torch.

`manifest.json` is written last and contains its own checksum: `sha256` covers the other keys. `format`, `version` and
this rule are the same in every version, so that an old reader can tell a newer checkpoint from a damaged one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError
from trimtab.facts.files import FileDigest, digest, read_json_object, sync_file

FORMAT = "trimtab-checkpoint"
VERSION = 2
"""2 added `base`. Checkpoints without `base` are written as version 1, which every trimtab reads."""
NAME = "manifest.json"
STATE = "state.json"
TENSOR_SUFFIX = ".safetensors"


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, truncated or changed."""


class NewerCheckpoint(CheckpointError):
    """A checkpoint was written by a later trimtab."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's torch dtype (`bfloat16`) and its full, unsharded shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. `sequence` counts saves: the checkpoint with the highest one is the latest."""

    step: int
    sequence: int
    tags: tuple[str, ...]
    files: dict[str, FileDigest]
    tensors: dict[str, TensorEntry]
    base: BaseWeights | None = None
    """If adapters are trained: the source of the frozen base weights, which the checkpoint does not contain."""

    @property
    def nbytes(self) -> int:
        """Total bytes of the files, without the manifest."""
        return sum(file.size for file in self.files.values())


def digests(paths: Iterable[Path], *, sync: bool = False) -> dict[str, FileDigest]:
    """Size and SHA-256 of files, hashed in parallel threads (hashing releases the GIL); `sync` calls fsync first."""
    ordered = sorted(paths)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return dict(
            zip((p.name for p in ordered), pool.map(lambda p: _digest(p, sync), ordered), strict=True)
        )


def _digest(path: Path, sync: bool) -> FileDigest:
    if sync:
        sync_file(path)
    return digest(path)


def to_text(manifest: Manifest) -> str:
    """The content of manifest.json."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": 1 if manifest.base is None else VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "tags": sorted(manifest.tags),
        "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(manifest.files.items())},
        "tensors": {name: [t.dtype, list(t.shape)] for name, t in sorted(manifest.tensors.items())},
    }
    if manifest.base is not None:
        body["base"] = manifest.base.to_dict()
    return json.dumps({**body, "sha256": _own_checksum(body)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder and verify its own checksum.

    Raises DamagedCheckpoint if it is missing or changed, NewerCheckpoint if a later trimtab wrote it.
    """
    path = folder / NAME
    try:
        body = read_json_object(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{folder.name}/{NAME} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{folder.name}/{NAME} is truncated or changed ({error})") from error
    if body.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{folder.name}/{NAME} is not a checkpoint's manifest")
    if body.pop("sha256", None) != _own_checksum(body):
        raise DamagedCheckpoint(f"{folder.name}/{NAME} does not match its own checksum")
    version = body["version"]
    if version > VERSION:
        raise NewerCheckpoint(
            f"{folder} was written by a later trimtab (checkpoint format {version}, here {VERSION})",
            "install the version of trimtab that wrote it, or a later one",
        )
    return _READERS[version](body)


def verify(folder: Path, *, checksums: bool = True) -> Manifest:
    """Verify a folder's files against its manifest; raises DamagedCheckpoint that names the first wrong file.

    Without `checksums` only names and sizes are compared, which is fast; with them every byte is read (1 to 2 GB/s
    per core).
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        path = folder / name
        # The names are untrusted input: reject paths outside the folder.
        if Path(name).name != name or name in {"", ".", ".."}:
            raise DamagedCheckpoint(f"{folder.name}/{NAME} names a file outside its folder: {name!r}")
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder.name}/{name} is missing")
        size = path.stat().st_size
        if size != file.size:
            raise DamagedCheckpoint(
                f"{folder.name}/{name} has {size:,} bytes, and its manifest says {file.size:,}"
            )
    for path in sorted(folder.iterdir()):
        # The tensor reader opens every safetensors file it finds in the folder.
        if path.name.endswith(TENSOR_SUFFIX) and path.name not in manifest.files:
            raise DamagedCheckpoint(f"{folder.name}/{path.name} does not belong to the checkpoint")
    if checksums:
        for name, found in digests(folder / name for name in manifest.files).items():
            if found.sha256 != manifest.files[name].sha256:
                raise DamagedCheckpoint(f"{folder.name}/{name} does not match its checksum")
    return manifest


def _own_checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_1(body: dict[str, Any]) -> Manifest:
    return Manifest(
        step=body["step"],
        sequence=body["sequence"],
        tags=tuple(body["tags"]),
        files={name: FileDigest(entry["size"], entry["sha256"]) for name, entry in body["files"].items()},
        tensors={name: TensorEntry(dtype, tuple(shape)) for name, (dtype, shape) in body["tensors"].items()},
    )


def _read_2(body: dict[str, Any]) -> Manifest:
    return dataclasses.replace(_read_1(body), base=BaseWeights.from_dict(body["base"]))


# Old versions remain readable; a new version adds its reader here.
_READERS = {1: _read_1, 2: _read_2}
