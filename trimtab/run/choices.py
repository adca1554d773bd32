"""choices.json of a run folder: read and validated. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.facts.errors import CheckpointError
from trimtab.plan.resolved_json import REQUIRED, VERSION
from trimtab.run.folder import RunFolder, read_json

FIELDS = ("model_commit", "tokenizer_commit", "data", "recipe", *REQUIRED)
"""What a run needs to be continued; its model can be opened with the recipe alone."""
_TYPES: dict[str, type] = {
    "data": dict,
    "recipe": dict,
    "attention": dict,
    "device": str,
    "dtype": str,
    "weights_dtype": str,
    "gradient_dtype": str,
    "threads": int,
    "deterministic": bool,
}


def read_choices(folder: RunFolder, fields: Sequence[str] = FIELDS) -> dict[str, Any]:
    """Returns a run's choices.json, which has `fields`.

    Raises CheckpointError where it is damaged or was written by a newer trimtab.

    Example:
        >>> read_choices(RunFolder(Path("runs/demo")))["device"]  # doctest: +SKIP
        'cpu'
    """
    kept = read_json(folder.choices)
    wrong = damage(kept, fields)
    if wrong is not None:
        raise CheckpointError(
            f"{folder.choices} {wrong}", f"restore it from a copy, or train it again: {folder.anew()}"
        )
    if kept.get("version", 0) > VERSION:
        raise CheckpointError(f"{folder.path} is of a newer trimtab", "use that version")
    return kept


def damage(kept: Mapping[str, Any], fields: Sequence[str] = FIELDS) -> str | None:
    """What is wrong with the content of choices.json; None for nothing, or where a newer trimtab wrote it.

    Example:
        >>> damage({"version": None})
        'has no valid version'
    """
    version = kept.get("version", 0)
    if type(version) is not int:
        return "has no valid version"
    if version > VERSION:
        return None
    missing = [name for name in fields if name not in kept]
    if missing:
        return f"lacks {', '.join(missing)}"
    invalid = [name for name, kind in _TYPES.items() if name in fields and type(kept[name]) is not kind]
    return f"has no valid {' and '.join(invalid)}" if invalid else None
