"""Results as JSON lines with their provenance: one line per finished case, appended as soon as it is measured.

A stopped command continues where it ended: `read_records` returns the finished cases, `is_recorded` decides whether a
case needs no further run. A torn line is ignored when reading, and never corrupts the next one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path, *keys: str) -> dict[Any, Record]:
    """The last record of each case, by one key or a tuple of several; torn lines and records without the keys are
    skipped.

    Example:
        >>> read_records(Path("missing.jsonl"), "case")
        {}
    """
    records: dict[Any, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            name = tuple(record[key] for key in keys)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        records[name if len(keys) > 1 else name[0]] = record
    return records


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line, and creates the folder if needed. A torn last line is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        torn = file.read(1) not in (b"", b"\n")
        file.write(("\n" * torn + json.dumps(record, ensure_ascii=False) + "\n").encode())


def is_recorded(record: Mapping[str, Any] | None, same: Mapping[str, Any]) -> bool:
    """Whether a case needs no further run: it has a record that did not fail and equals `same` in its keys.

    Example:
        >>> is_recorded({"commit": "a", "ms": 3.0}, {"commit": "a"}), is_recorded({"failed": "no memory"}, {})
        (True, False)
    """
    if record is None or record.get("failed"):
        return False
    return all(record.get(key) == value for key, value in same.items())


def provenance(
    device: str, packages: Sequence[str] = ("torch", "triton"), commit: str | None = None
) -> Record:
    """The provenance in every record: device, versions, commit and time.

    Example:
        >>> sorted(provenance("cpu"))
        ['commit', 'device', 'time', 'versions']
    """
    return {
        "commit": commit or checkout_commit(),
        "device": device_name(device),
        "versions": versions(packages, cuda=device.startswith("cuda")),
        "time": timestamp(),
    }


def timestamp() -> str:
    """The current time, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(packages: Sequence[str], *, cuda: bool = False) -> dict[str, str]:
    """Versions of Python and of the installed packages; imports only torch, and only for CUDA's version.

    trimtab's is that of the running code: an editable install lists no package of that name.

    Example:
        >>> "python" in versions(["no_such_package"])
        True
    """
    known: dict[str, str] = {}
    if cuda:
        import torch

        known["cuda"] = str(torch.version.cuda)
    known["python"] = platform.python_version()
    installed = importlib.metadata.packages_distributions()
    for package in packages:
        if package == "trimtab":
            # The root package is loaded in any case; to import it by name would count as importing the API behind it.
            known[package] = str(vars(sys.modules["trimtab"])["__version__"])
        elif package in installed:
            known[package] = importlib.metadata.version(installed[package][0])
    return known


def checkout_commit() -> str:
    """The commit of this checkout, with "-dirty" if files were changed; "unknown" outside a repository."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def device_name(device: str) -> str:
    """The GPU's name from torch, or the CPU's name from the operating system."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    from trimtab.run.device import detect

    return detect("cpu").name


def file_name(device: str) -> str:
    """A device's name, for use in file names.

    Example:
        >>> file_name("NVIDIA GeForce RTX 4090"), file_name("AMD EPYC 7B13 (64-Core)")
        ('geforce-rtx-4090', 'amd-epyc-7b13-64-core')
    """
    words = re.findall(r"[a-z0-9.]+", device.lower())
    return "-".join(word for word in words if word != "nvidia")
