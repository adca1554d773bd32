"""Results as lines of JSON, one a finished case, so that a run that was cut short goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(path: Path, *keys: str) -> dict[Any, dict[str, Any]]:
    """The last record of each case, by one key or several; a line cut short by a stop is left out."""
    records: dict[Any, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        name = tuple(record[key] for key in keys)
        records[name if len(keys) > 1 else name[0]] = record
    return records
