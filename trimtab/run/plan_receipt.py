"""Compares measured with predicted memory and time: printed once, stored in `receipts/plan.json` for each start."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.plan.data import evaluations
from trimtab.plan.make import Plan
from trimtab.run.environment import environment
from trimtab.run.folder import RunFolder, read_json, write_json
from trimtab.run.gpu_processes import other_processes
from trimtab.trainer.measured import Measured

VERSION = 1


class ReceiptView(Protocol):
    """Shows records and messages."""

    def message(self, text: str) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...


class PlanReceipt:
    """Writes measurements next to the plan's predictions each time it is called, and shows them the first time.

    Args:
        folder: the run folder.
        plan: the plan, for the opened data.
        view: shows the record `receipt`, which is not logged.

    Example:
        >>> receipt = PlanReceipt(folder, plan, view)   # doctest: +SKIP
        >>> receipt(measured)                           # doctest: +SKIP
    """

    def __init__(self, folder: RunFolder, plan: Plan, view: ReceiptView) -> None:
        self._folder, self._plan, self._view = folder, plan, view
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._commit, self._predicted = commit_of_package(), predicted_of(plan)
        self._earlier: list[dict[str, Any]] | None = None
        self._process: int | None = None
        self._shown = False

    def __call__(self, measured: Measured) -> None:
        """Replace this start's entry; show it the first time."""
        if self._earlier is None:
            self._earlier = read_starts(self._folder.measured)
        if self._plan.device.kind == "cuda":
            if self._process is None:  # once: it runs nvidia-smi
                self._process = gpu_process_bytes(torch.cuda.current_device())
            measured = replace(measured, process=self._process)
        entry = self._entry(measured)
        try:
            self._folder.receipts.mkdir(exist_ok=True)
            write_json(self._folder.measured, {"version": VERSION, "starts": [*self._earlier, entry]})
        except (OSError, ResourceError) as error:  # training continues without its receipt
            self._view.message(f"receipts/plan.json could not be written: {error}")
        if not self._shown:
            self._shown = True
            self._view.record({"kind": "receipt", "step": measured.last_step, **entry})

    def _entry(self, measured: Measured) -> dict[str, Any]:
        resolved, device = self._plan.resolved, self._plan.device
        where = environment(torch.device(resolved.device))
        return {
            "started": self._started,
            "first_step": measured.first_step + 1,
            "last_step": measured.last_step,
            "device": {"name": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes},
            "basis": {"memory": "the declared operations of a step", "time": self._plan.time.basis},
            "predicted": self._predicted,
            "measured": _measured_values(measured),
            "versions": {"python": where["python"], **where["versions"]},
            "threads": where["threads"],
            "commit": self._commit,
        }


def predicted_of(plan: Plan) -> dict[str, Any]:
    """The plan's predictions under the names of the measurements; None for values without a prediction."""
    time, steps = plan.time, plan.data.get("steps")
    reserved = plan.reserved
    return {
        "allocated": plan.memory.peak.total,
        "reserved": None if reserved is None else reserved.reserved,
        "process": plan.memory.needed if reserved is None else reserved.process,
        "host": plan.phases.host,
        "step_seconds": time.step_seconds,
        "evaluation_seconds": _each(time.evaluation_seconds, evaluations(plan.recipe, steps)),
        "checkpoint_seconds": _each(time.checkpoint_seconds, plan.disk.saving.saves),
    }


def _each(seconds: float | None, count: int | None) -> float | None:
    return seconds / count if seconds and count else None


def gpu_process_bytes(index: int) -> int | None:
    """GPU memory of this process: used memory less that of other processes; None if theirs is unknown."""
    if shutil.which("nvidia-smi") is None:
        return None
    others = [other.used_bytes for other in other_processes(index)]
    if None in others:
        return None
    free, total = torch.cuda.mem_get_info(index)
    return total - free - sum(used for used in others if used is not None)


def _measured_values(measured: Measured) -> dict[str, Any]:
    times = {
        "step_seconds": measured.step,
        "evaluation_seconds": measured.evaluation,
        "checkpoint_seconds": measured.checkpoint,
        "checkpoint_stall_seconds": measured.checkpoint_stall,
    }
    return {
        "allocated": measured.allocated,
        "highest_allocated": measured.highest,
        "reserved": measured.reserved,
        "process": measured.process,
        "host": measured.host,
        **{name: None if spread is None else asdict(spread) for name, spread in times.items()},
        "warm": measured.warm,
    }


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The entries of earlier starts; none if the file is missing, damaged or of a later version."""
    if not path.is_file():
        return []
    with suppress(CheckpointError):
        data = read_json(path)
        starts = data.get("starts")
        if data.get("version") == VERSION and isinstance(starts, list):
            return [start for start in starts if isinstance(start, dict)]
    return []


def commit_of_package() -> str | None:
    """The git commit of the checkout that this package runs from; None if it is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None
