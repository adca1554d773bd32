"""Recorded values of a run: every number as exact text, by name and in order."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MEASURED = {"train": ("loss", "grad_norm", "lr", "tokens"), "eval": ("loss", "tokens", "units")}
"""Kinds of log records and the fields that are numbers of the training, not of the machine."""
SHOWN = ("probe", "answers", "sample", "example")
"""Kinds of records that are compared completely, except for times."""
TIMES = ("seconds", "tokens_per_second", "time")


def exact(value: Any) -> str:
    """A value as lossless text, with floats in hexadecimal.

    Example:
        >>> exact({"b": [0.5, 1], "a": "x"})
        '{"a": "x", "b": ["0x1.0000000000000p-1", 1]}'
    """
    return json.dumps(_exact(value), sort_keys=True)


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _exact(one) for key, one in value.items()}
    return [_exact(one) for one in value] if isinstance(value, list | tuple) else value


def read_metrics(folder: Path) -> dict[str, str]:
    """Every logged number of a run folder, by step and name."""
    found: dict[str, str] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kind = record["kind"]
        where = f"step {record.get('step')}"
        if kind == "train":
            for key in MEASURED["train"]:
                _add(found, f"{where} {key}", exact(record.get(key)))
        elif kind == "eval":
            for key in MEASURED["eval"]:
                _add(found, f"{where} {record['name']} {key}", exact(record.get(key)))
        elif kind in SHOWN:
            kept = {key: value for key, value in record.items() if key not in TIMES}
            _add(found, f"{where} {kind}", exact(kept))
    return found


def read_checkpoint(folder: Path) -> dict[str, str]:
    """Checksums of the newest checkpoint's tensors, weights and optimizer states, by name."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {f"checkpoint {name}": text for name, text in read_tensors(newest).items()}


def read_tensors(folder: Path) -> dict[str, str]:
    """Checksum, dtype and shape of every tensor in the safetensors files of a folder, by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, about in sorted(header.items()):
            if name == "__metadata__":
                continue
            begin, end = about["data_offsets"]
            digest = hashlib.sha256(data[8 + size + begin : 8 + size + end]).hexdigest()[:24]
            _add(found, name, f"{about['dtype']} {about['shape']} {digest}")
    return found


def _add(found: dict[str, str], name: str, value: str) -> None:
    """Add a value under its name, numbered if the name exists."""
    count, free = 1, name
    while free in found:
        count += 1
        free = f"{name} #{count}"
    found[free] = value
