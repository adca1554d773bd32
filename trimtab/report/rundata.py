"""Reads the data of a run folder: metrics by kind, plan, choices. Damaged lines are counted and ignored."""

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
"""The newest supported format version of plan.json."""

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""JSON has no non-finite numbers, so the metrics file contains strings."""


@dataclass
class RunData:
    """The contents of a run folder's files, from which reports are built."""

    folder: Path
    plan: dict[str, Any]
    choices: dict[str, Any]
    environment: dict[str, Any]
    recipe: str
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    damaged_lines: int = 0
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Measured and predicted values of each start of the run (receipts/plan.json), in order."""
    receipt_problem: str | None = None
    """Reason why receipts/plan.json could not be read."""
    environment_problem: str | None = None
    """Reason why environment.json could not be read; the rest of the report does not need it."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Returns the records of one kind in order, with NaN and infinities as floats."""
        return self.records.get(kind, [])

    def eval_names(self) -> list[str]:
        """Returns the names of the evaluation sets, in order of appearance."""
        return list(dict.fromkeys(r["name"] for r in self.of("eval")))

    def before_after(self, kind: str, **match: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Returns the first and last record of a kind whose fields equal `match`; None unless their steps differ."""
        rows = [r for r in self.of(kind) if all(r.get(k) == v for k, v in match.items())]
        return (rows[0], rows[-1]) if rows and rows[0]["step"] != rows[-1]["step"] else None

    def memory(self, when: str) -> dict[str, Any] | None:
        """Returns the last measured buckets of one moment: before, peak or after."""
        rows = [r for r in self.of("memory") if r["when"] == when]
        return rows[-1] if rows else None

    def problems(self) -> list[str]:
        """Returns a sentence for each problem: damaged or missing lines of metrics.jsonl, other unreadable files.

        Every trained step should have a record, and a checkpoint proves that its step was trained.
        """
        sentences = []
        if self.damaged_lines:
            lines = "line" if self.damaged_lines == 1 else "lines"
            were = "was" if self.damaged_lines == 1 else "were"
            sentences.append(f"{self.damaged_lines} damaged {lines} in metrics.jsonl {were} ignored")
        steps = [record["step"] for record in self.of("train")]
        last = max((*steps, _last_checkpoint(self.folder)), default=0)
        missing = format_gaps(steps, last)
        if missing:
            single = missing.isdecimal()
            what, them = (f"step {missing}", "it is") if single else (f"steps {missing}", "they are")
            sentences.append(f"metrics.jsonl lacks {what} of {last}: {them} not shown")
        if self.receipt_problem:
            sentences.append(f"{self.receipt_problem}: predictions are not compared with measurements")
        if self.environment_problem:
            sentences.append(f"{self.environment_problem}: versions and machine are not shown")
        return sentences

    @property
    def device(self) -> str | None:
        """cpu or cuda; None if the run folder does not contain it."""
        found = self.choices.get("device") or section(self.plan, "choices").get("device")
        return found if isinstance(found, str) else None


def _last_checkpoint(folder: Path) -> int:
    """Returns the largest step among the names of a run's checkpoints; 0 if there are none."""
    found = (folder / "checkpoints").glob("step-*")
    numbers = [path.name.removeprefix("step-") for path in found if not is_empty(path)]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def section(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a nested object of a JSON file; empty if it is absent or null."""
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
            else "does not exist"
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
        data.receipt_problem = error.cause
    try:
        data.environment = _json(folder / "environment.json")
    except CheckpointError as error:
        data.environment_problem = error.cause
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
    """Reads a file with one JSON object; returns {} if it does not exist, since a run may stop before writing it."""
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
            f"{path} has format version {version}, but this trimtab supports versions up to {VERSION}",
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
    """Returns the entries whose predictions and measurements are numbers; none if the format is newer."""
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
    raise ValueError(f"{value!r:.40} is not a string")


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
    raise ValueError(f"{value!r:.40} is not a list of spans")


def _item_results(value: Any) -> str:
    """A string with one digit per item, "1" for a correct result."""
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
        raise ValueError(f"{value!r:.40} is not a mapping of losses and tokens by document")
    losses, tokens = [_number(item) for item in value["losses"]], [_count(item) for item in value["tokens"]]
    if len(losses) != len(tokens) or not all(tokens) or not all(map(math.isfinite, losses)):
        raise ValueError("losses and tokens by document do not match")
    return {"unit": _words(value.get("unit")), "losses": losses, "tokens": tokens}


_PLAN_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model.name", "model.family", "memory.moment", "time.basis"), _words),
    **dict.fromkeys(("memory.needed", "memory.outside", "memory.available"), _count),
    **dict.fromkeys(("model.parameters", "data.windows", "data.tokens", "data.steps"), _count),
    **dict.fromkeys(("disk.checkpoint_bytes", "disk.total_bytes"), _count),
    **dict.fromkeys(("data.fill", "time.seconds", "time.floor_seconds"), _number),
}
"""Fields of plan.json that the reports use; each may be absent or null."""

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
    },  # `first_step_seconds` is optional
    "checkpoint": {"step": _count},
    "event": {"step": _count, "message": _words},
}
"""Required fields of each kind of record; a record without them counts as damaged."""

_OPTIONAL_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "eval": {"units": _unit_losses},
    "probe": {"items": _counts_by_kind, "right": _results_by_kind, "digest": _words},
    "answers": {"right": _item_results, "digest": _words},
}
"""Optional fields: results by item, which metrics of older versions do not contain."""


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
    ):  # truncated, nested too deep, incomplete, not an object
        return None
