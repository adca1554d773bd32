"""A run folder read back: metrics by kind, plan, choices. Damaged lines are counted, never guessed at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.facts.errors import CheckpointError
from trimtab.facts.files import read_json_object
from trimtab.facts.run_layout import is_empty
from trimtab.facts.units import format_gaps

VERSION = 1
"""The newest format of plan.json that is understood."""

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""JSON has no such numbers, so the log writes words."""


@dataclass
class RunData:
    """What a run folder's files say; everything the pictures are drawn from."""

    folder: Path
    plan: dict[str, Any]
    choices: dict[str, Any]
    environment: dict[str, Any]
    recipe: str
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    damaged_lines: int = 0
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Measured and predicted values of each start of the run (receipts/plan.json), in order."""
    receipt_flaw: str | None = None
    """Why receipts/plan.json could not be read."""
    environment_flaw: str | None = None
    """Why environment.json could not be read; the rest of the report does not need it."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Records of one kind, in order; NaN and infinities are floats in them."""
        return self.records.get(kind, [])

    def eval_names(self) -> list[str]:
        """Names of the evaluated sets, in order of appearance."""
        return list(dict.fromkeys(r["name"] for r in self.of("eval")))

    def before_after(self, kind: str, **match: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """First and last record of a kind whose fields equal `match`; None unless their steps differ."""
        rows = [r for r in self.of(kind) if all(r.get(k) == v for k, v in match.items())]
        return (rows[0], rows[-1]) if rows and rows[0]["step"] != rows[-1]["step"] else None

    def memory(self, when: str) -> dict[str, Any] | None:
        """The last measured buckets of one moment: before, peak or after."""
        rows = [r for r in self.of("memory") if r["when"] == when]
        return rows[-1] if rows else None

    def flaws(self) -> list[str]:
        """What is damaged in metrics.jsonl or missing from it, and a damaged environment.json, a sentence each.

        Every step has a record, and a checkpoint of a step proves that it was trained.
        """
        said = []
        if self.damaged_lines:
            lines = "line" if self.damaged_lines == 1 else "lines"
            were = "was" if self.damaged_lines == 1 else "were"
            said.append(f"{self.damaged_lines} damaged {lines} in metrics.jsonl {were} left out")
        steps = [record["step"] for record in self.of("train")]
        last = max((*steps, _last_checkpoint(self.folder)), default=0)
        missing = format_gaps(steps, last)
        if missing:
            one = missing.isdecimal()
            what, them = (f"step {missing}", "it is") if one else (f"steps {missing}", "they are")
            said.append(f"metrics.jsonl lacks {what} of {last}: {them} not shown")
        if self.receipt_flaw:
            said.append(f"{self.receipt_flaw}: predicted and measured are not compared")
        if self.environment_flaw:
            said.append(f"{self.environment_flaw}: versions and machine are not shown")
        return said

    @property
    def device(self) -> str | None:
        """cpu or cuda, where the run folder says it."""
        found = self.choices.get("device") or section(self.plan, "choices").get("device")
        return found if isinstance(found, str) else None


def _last_checkpoint(folder: Path) -> int:
    """The greatest step among the names of a run's checkpoints; 0 where there are none."""
    found = (folder / "checkpoints").glob("step-*")
    numbers = [path.name.removeprefix("step-") for path in found if not is_empty(path)]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def section(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    """A nested group of a JSON file; empty where it is absent or null."""
    found = mapping.get(name)
    return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> RunData:
    """Reads a run folder's data files.

    Example:
        >>> read_run(Path("runs/demo")).of("train")[-1]["loss"]  # doctest: +SKIP
        1.25
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        missing = (
            "has no metrics.jsonl"
            if folder.is_dir()
            else "is not there"
            if not folder.exists()
            else "is a file"
        )
        raise CheckpointError(f"{folder} {missing}", "give a run folder, such as runs/demo")
    data = RunData(
        folder,
        plan=_plan(folder / "plan.json"),
        choices=_json(folder / "choices.json"),
        environment={},
        recipe=_text(folder / "recipe.yaml"),
    )
    try:
        data.starts = _starts(folder / "receipts" / "plan.json")
    except CheckpointError as error:
        data.receipt_flaw = error.cause
    try:
        data.environment = _json(folder / "environment.json")
    except CheckpointError as error:
        data.environment_flaw = error.cause
    try:
        with metrics.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                record = _record(line)
                if record is None:
                    data.damaged_lines += 1
                else:
                    data.records.setdefault(record["kind"], []).append(record)
    except OSError as error:
        raise _unreadable(metrics, error) from error
    return data


def _text(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}", "check its permissions")


def _json(path: Path) -> dict[str, Any]:
    """A file with one JSON object; empty where there is no file, since a run may stop before it."""
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}", "restore it from a copy, or remove it"
        ) from error


def _plan(path: Path) -> dict[str, Any]:
    plan = _json(path)
    version = plan.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, and this trimtab reads up to {VERSION}",
            "use a newer trimtab",
        )
    try:
        for moment in ("before", "peak"):
            _map_values(_count, section(section(plan, "memory"), moment))
        for place, convert in _PLAN_FIELDS.items():
            group, name = place.split(".")
            value = section(plan, group).get(name)
            if value is not None:
                convert(value)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}", "restore it from a copy, or remove it"
        ) from error
    return plan


def _starts(path: Path) -> list[dict[str, Any]]:
    """The entries whose predictions and measurements are numbers; a later format has none for this version."""
    receipt = _json(path)
    starts = receipt.get("starts")
    if receipt.get("version") != VERSION or not isinstance(starts, list):
        return []
    return [start for start in starts if isinstance(start, dict) and _is_receipt(start)]


def _is_receipt(start: dict[str, Any]) -> bool:
    values = [*section(start, "predicted").values()]
    for name, value in section(start, "measured").items():
        spread = name.endswith("_seconds") and isinstance(value, dict)
        values += value.values() if spread else [value]
    return all(value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in values)


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    # Bounded, so that an integer of hundreds of digits cannot overflow a float later.
    if isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    ):
        return value
    raise ValueError(f"{value!r:.40} is not a number")


def _count(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    raise ValueError(f"{value!r:.40} is not a count")


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r:.40} is not a text")


def _map_values(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: convert(item) for key, item in value.items()}
    raise ValueError(f"{value!r:.40} is not a mapping")


def _scores(value: Any) -> dict[str, float]:
    return _map_values(_number, value)


def _right_of_total(value: Any) -> list[int]:
    if isinstance(value, list) and len(value) == 2:
        return [_count(item) for item in value]
    raise ValueError(f"{value!r:.40} is not a pair of counts")


def _topics(value: Any) -> dict[str, list[int]]:
    return _map_values(_right_of_total, value)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r:.40} is not true or false")


def _runs(value: Any) -> list[tuple[str, bool]]:
    if isinstance(value, list) and all(isinstance(run, list) and len(run) == 2 for run in value):
        return [(_words(text), _flag(trained)) for text, trained in value]
    raise ValueError(f"{value!r:.40} is not a list of stretches")


def _item_results(value: Any) -> str:
    """A digit per item, "1" where it was right."""
    if isinstance(value, str) and set(value) <= {"0", "1"}:
        return value
    raise ValueError(f"{value!r:.40} is not a list of results")


def _results_by_kind(value: Any) -> dict[str, str]:
    return _map_values(_item_results, value)


def _counts_by_kind(value: Any) -> dict[str, int]:
    return _map_values(_count, value)


def _unit_losses(value: Any) -> dict[str, Any]:
    """Mean loss and tokens of each document: {"unit", "losses", "tokens"}."""
    lists = [value.get(name) for name in ("losses", "tokens")] if isinstance(value, dict) else [None]
    if not all(isinstance(found, list) for found in lists):
        raise ValueError(f"{value!r:.40} are no losses by document")
    losses, tokens = [_number(item) for item in value["losses"]], [_count(item) for item in value["tokens"]]
    if len(losses) != len(tokens) or not all(tokens) or not all(map(math.isfinite, losses)):
        raise ValueError("losses and tokens by document do not belong together")
    return {"unit": _words(value.get("unit")), "losses": losses, "tokens": tokens}


_PLAN_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model.name", "model.family", "memory.moment", "time.basis"), _words),
    **dict.fromkeys(("memory.needed", "memory.outside", "memory.available"), _count),
    **dict.fromkeys(("model.parameters", "data.windows", "data.tokens", "data.steps"), _count),
    **dict.fromkeys(("disk.checkpoint_bytes", "disk.total_bytes"), _count),
    **dict.fromkeys(("data.fill", "time.seconds", "time.floor_seconds"), _number),
}
"""What the pictures read from plan.json, each of which may be absent or null."""

_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "train": {
        "step": _count,
        "tokens": _count,
        **dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_second", "seconds", "memory_bytes"), _number),
    },
    "eval": {"step": _count, "name": _words, "loss": _number, "perplexity": _number},
    "probe": {"step": _count, "scores": _scores},
    "answers": {"step": _count, "exact": _count, "total": _count, "by_topic": _topics},
    "sample": {"step": _count, "prompt": _words, "completion": _words},
    "example": {
        "step": _count,
        "origin": _words,
        "tokens": _count,
        "trained": _count,
        "cut": _flag,
        "runs": _runs,
    },
    "memory": {
        "when": _words,
        **dict.fromkeys(("weights", "gradients", "optimizer", "activations", "other"), _count),
    },
    "compile": {
        "step": _count,
        "count": _count,
        "seconds": _number,
    },  # and `first_step_seconds` after that one
    "checkpoint": {"step": _count},
    "event": {"step": _count, "message": _words},
}
"""What a record of each kind must hold; one that does not counts as damaged."""

_OPTIONAL_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "eval": {"units": _unit_losses},
    "probe": {"items": _counts_by_kind, "right": _results_by_kind, "digest": _words},
    "answers": {"right": _item_results, "digest": _words},
}
"""What a record may hold besides: results by item, which logs of older versions do not have."""


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        fields = dict(_FIELDS[record["kind"]])
        optional = _OPTIONAL_FIELDS.get(record["kind"], {})
        fields |= {name: convert for name, convert in optional.items() if record.get(name) is not None}
        return {**record, **{name: convert(record[name]) for name, convert in fields.items()}}
    except (
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
    ):  # torn, nested too deep, incomplete, not an object
        return None
