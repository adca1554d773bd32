"""Reads the plan's predictions and the step times from a run folder. No torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

TERMS = ("weights", "gradients", "optimizer", "activations", "other")


def without_folders(found: Any) -> Any:
    """Text without the folders of absolute paths: records are published, the machine's folders are not.

    Example:
        >>> without_folders({"failed": "no /home/me/models/a/config.json", "log": ["in /tmp/x.py:3"], "s": 1.5})
        {'failed': 'no config.json', 'log': ['in x.py:3'], 's': 1.5}
    """
    if isinstance(found, str):
        return re.sub(r"(?<![\w./])/(?:[\w.+-]+/)+", "", found)
    if isinstance(found, list):
        return [without_folders(one) for one in found]
    if isinstance(found, dict):
        return {key: without_folders(one) for key, one in found.items()}
    return found


def predicted(plan: dict[str, Any]) -> dict[str, Any]:
    """The predictions in plan.json that are also measured; None for those that are missing.

    Example:
        >>> predicted({"memory": {"peak": {"total": 8}, "needed": 10}, "time": {}})["process"]
        10
    """
    memory, time = plan.get("memory") or {}, plan.get("time") or {}
    peak, step = memory.get("peak") or {}, time.get("step") or {}
    reserved = memory.get("reserved")
    by_holder = reserved if isinstance(reserved, dict) else {"reserved": reserved}
    return {
        "allocated": peak.get("total"),
        "buckets": {term: peak.get(term) for term in TERMS},
        "reserved": by_holder.get("reserved"),
        "process": by_holder.get("process") or memory.get("needed"),
        "step_seconds": step.get("seconds"),
        "low_seconds": step.get("low_seconds"),
        "high_seconds": step.get("high_seconds"),
        "by_kind": step.get("by_kind"),
        "by_phase": step.get("by_phase"),
        "host_seconds": step.get("host_seconds"),
        "exposed_copies": step.get("exposed_copies"),
        "basis": step.get("basis") or time.get("basis"),
        "moment": memory.get("moment"),
    }


def step_times(
    rows: Sequence[dict[str, Any]], together: int, warm_up: int = 1, waited: float = 0.0
) -> dict[str, Any]:
    """Seconds per optimizer step from the records of metrics.jsonl; the first groups of steps are warm-up.

    A group's seconds are its tokens divided by its logged rate, which has six digits; the logged seconds are rounded to
    milliseconds. The first timed group includes `waited` seconds in which the process was paused.

    Example:
        >>> rows = [{"kind": "train", "step": n, "tokens": 100 * n, "tokens_per_second": r}
        ...         for n, r in ((1, 50.0), (2, 50.0), (3, 400.0), (4, 400.0))]
        >>> step_times(rows, 2)["step_seconds"]
        0.25
    """
    train = [row for row in rows if row["kind"] == "train"]
    groups = []
    for last in range(together, len(train) + 1, together):
        before = train[last - together - 1]["tokens"] if last > together else 0
        tokens = train[last - 1]["tokens"] - before
        pause = waited if len(groups) == warm_up else 0.0
        groups.append((tokens / train[last - 1]["tokens_per_second"] - pause) / together)
    timed = groups[warm_up:] or groups
    return {
        "step_seconds": statistics.median(timed) if timed else None,
        "spread": (max(timed) - min(timed)) / statistics.median(timed) if timed else None,
        "first_seconds": groups[0] if groups else None,
        "steps": together * len(timed),
    }
