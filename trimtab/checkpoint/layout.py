"""The checkpoint folder of a run: names, pointers, publication by rename, pruning, recovery.

    step-00000100/   complete: a folder gets this name only after it was written, synced, checksummed and re-opened
    latest, best     text files with a checkpoint's name, for users and scripts; the manifests are authoritative
    .tmp-…           being written or deleted; `recover` deletes it if its writer has died (.latest.tmp-… too)
    .replaced-…      the previous version while a step is saved again; restored if the new one was not completed
    .writer.lock     locked while a process writes

A kill between any two operations leaves a folder that `recover` repairs. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from trimtab.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from trimtab.facts.files import sync_folder, write_atomic
from trimtab.facts.run_layout import is_empty

LATEST = "latest"
WRITER_LOCK = ".writer.lock"
_TEMPORARY = ".tmp-"
_POINTER_DRAFT = re.compile(r"\.\w+\.tmp-[0-9a-f]+")
_REPLACED = ".replaced-"
_POINTER_BYTES = 64
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Folder name of a step.

    Example:
        >>> step_name(123)
        'step-00000123'
    """
    return f"step-{step:08d}"


def staging_path(root: Path, step: int) -> Path:
    """The temporary folder of a step that is being written."""
    return root / f"{_TEMPORARY}{step_name(step)}-{os.getpid()}"


def step_folders(root: Path) -> list[Path]:
    """All published checkpoints, sorted by step; empty folders are ignored, and `root` may be missing."""
    if not root.is_dir():
        return []
    named = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    found = [path for path in named if not is_empty(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def list_checkpoints(root: Path, report: Callable[[str], None] | None = None) -> list[tuple[Path, Manifest]]:
    """Checkpoints with a readable manifest and all files of the right size, latest first; others are reported.

    A checkpoint of a later format raises NewerCheckpoint: skipping it would silently rewind the run.
    """
    valid: list[tuple[Path, Manifest]] = []
    for path in step_folders(root):
        try:
            valid.append((path, verify(path, checksums=False)))
        except DamagedCheckpoint as error:
            if report is not None:
                report(f"skipping a damaged checkpoint: {error}")
    return sorted(valid, key=lambda entry: entry[1].sequence, reverse=True)


def publish(root: Path, staging: Path, step: int) -> Path:
    """Rename a complete, synced staging folder to its final name."""
    target = root / step_name(step)
    replaced = root / f"{_REPLACED}{target.name}"
    if target.exists():
        if replaced.exists():
            discard(replaced)
        os.rename(target, replaced)
    os.rename(staging, target)
    sync_folder(root)
    if replaced.exists():
        discard(replaced)
    return target


def update_pointers(root: Path) -> None:
    """Write `latest` and one file per tag, each with the name of its newest checkpoint."""
    pointers = _pointers(list_checkpoints(root))
    for name, target in pointers.items():
        if _read_pointer(root / name) != target.name:
            write_atomic(root / name, target.name + "\n")
    for path in root.iterdir():
        if path.name.isidentifier() and path.name not in pointers and _STEP.fullmatch(_read_pointer(path)):
            path.unlink()


def prune(root: Path, keep_last: int | None) -> list[str]:
    """Remove all but the `keep_last` newest checkpoints and the tagged ones; returns the removed names.

    Call it only after a verified publication. Unreadable folders are not removed: a temporary disk error must not
    delete a checkpoint.
    """
    if keep_last is None:
        return []
    ordered = list_checkpoints(root)
    kept = {path for path, _ in ordered[:keep_last]} | set(_pointers(ordered).values())
    removed = []
    for path, _ in ordered:
        if path not in kept:
            discard(path)
            removed.append(path.name)
    return removed


def discard(path: Path) -> None:
    """Delete a folder; it is renamed to `.tmp-…` first, so that a kill never leaves half a checkpoint."""
    trash = path
    if not path.name.startswith(_TEMPORARY):
        trash = path.parent / f"{_TEMPORARY}gone-{path.name.lstrip('.')}-{os.getpid()}"
        os.rename(path, trash)
    shutil.rmtree(trash)


def recover(root: Path) -> list[str]:
    """Finish or undo interrupted saves; returns the removed names. The caller must have the writer lock."""
    removed = []
    for path in sorted(root.iterdir()):
        original = root / path.name.removeprefix(_REPLACED)
        if path.name.startswith(_REPLACED) and not original.exists():
            os.rename(path, original)
        elif path.name.startswith((_TEMPORARY, _REPLACED)) or _POINTER_DRAFT.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                discard(path)
            else:
                path.unlink()
            removed.append(path.name)
    update_pointers(root)
    return removed


def _read_pointer(path: Path) -> str:
    """The folder name in a pointer file; empty if the file is missing or is no pointer file."""
    if not path.is_file() or path.stat().st_size > _POINTER_BYTES:
        return ""
    return path.read_bytes().decode("utf-8", errors="replace").strip()


def _pointers(ordered: Iterable[tuple[Path, Manifest]]) -> dict[str, Path]:
    pointers: dict[str, Path] = {}
    for path, manifest in ordered:
        for name in (LATEST, *manifest.tags):
            pointers.setdefault(name, path)
    return pointers
