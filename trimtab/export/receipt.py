"""Receipts of exports: the files, the software versions and the checks that passed. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.facts.files import write_json

RECEIPT_VERSION = 1


def receipt_path(folder: Path, receipts: Path | None, kind: str = "hf") -> Path:
    """Path of the receipt of an export to `folder`; call it before the export.

    In `receipts`, under a name unique to this target; next to the target if `receipts` is None or not writable (the
    caller reports that: the parent folder shows which case applies).
    """
    if receipts is None or not _can_write(receipts):
        return folder.with_name(f"{folder.name}.receipt.json")
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]
    return receipts / f"export-{kind}-{folder.name}-{digest}.json"


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Check:
    """A check that passed; failed checks raise, so receipts contain only passed ones."""

    name: str
    detail: str


@dataclass(frozen=True)
class Receipt:
    """The record of a verified export, saved as JSON.

    Example:
        >>> receipt = export_hf(decoder, tokenizer, "out", dtype="bf16")     # doctest: +SKIP
        >>> [check.name for check in receipt.checks]                         # doctest: +SKIP
        ['names and shapes', 'weights', 'logits', 'tokenizer']
    """

    kind: str
    folder: str
    created: str
    """UTC, ISO 8601."""
    dtype: str
    num_parameters: int
    num_tensors: int
    files: dict[str, dict[str, Any]]
    """File name to {"bytes", "sha256"}."""
    checks: list[Check]
    token_ids: list[int]
    """The token ids for which logits were compared."""
    logits_sha256: str
    """SHA-256 of the fp32 logits of those ids, little-endian; other machines may round differently."""
    versions: dict[str, str]
    source: dict[str, Any] = field(default_factory=dict)
    """The model's origin as given by the caller: run folder, step, base model."""
    version: int = RECEIPT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Receipt:
        """The inverse of `to_dict`."""
        return Receipt(**{**data, "checks": [Check(**check) for check in data["checks"]]})

    def write(self, path: str | Path) -> Path:
        """Write the receipt atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_dict())
        return path
