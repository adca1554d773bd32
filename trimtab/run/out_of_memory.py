"""Running out of memory, explained: in which phase, what is in memory, what was predicted, who else is there.

Every phase of every command runs inside `MemoryExplainer.during` or `explaining_memory`. They cost nothing until an
allocation fails; then the report is made at once, while the frames of the exception still hold what filled the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import torch

from trimtab.facts.errors import CheckpointError, OutOfMemory, ResourceError, release_frames
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.plan.make import Plan
from trimtab.run.folder import RunFolder, read_json, write_json, write_text
from trimtab.run.live_tensors import (
    LiveTensor,
    Origins,
    States,
    failed_at,
    frames_of,
    live_tensors,
)
from trimtab.run.memory_remedies import Suggestion, command_remedy
from trimtab.run.memory_report import MemoryReport, PredictedMemory, describe_failure
from trimtab.run.memory_state import MemoryState, is_out_of_memory, memory_state
from trimtab.run.memory_text import essentials, full_text

LISTED = 100
"""Tensors that oom.json lists, the largest first."""

LOSS_KERNELS = "trimtab.kernels.linear_cross_entropy"


class ExplainedOutOfMemory(OutOfMemory):
    """Out of memory with a report; `details` are further lines for the terminal."""

    def __init__(
        self,
        report: MemoryReport,
        remedy: str | None = None,
        details: tuple[str, ...] = (),
        *,
        cause: str | None = None,
    ) -> None:
        super().__init__(cause or describe_failure(report), remedy)
        self.report, self.details = report, details

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  {line}" for line in self.details)])


class MemoryExplainer:
    """Turns an out-of-memory error in any phase into an `ExplainedOutOfMemory`.

    Args:
        plan: of a run that is trained; None for other commands.
        origins: where tensors were made, if that is recorded (`run.allocations`).

    Example:
        >>> explainer = MemoryExplainer()
        >>> try:
        ...     with explainer.during(RunPhase.EXPORT):
        ...         raise MemoryError
        ... except OutOfMemory as error:
        ...     error.cause
        'out of memory while exporting the model, on the host'
    """

    def __init__(self, plan: Plan | None = None, origins: Origins | None = None) -> None:
        self.plan, self.origins = plan, origins
        self._model: torch.nn.Module | None = None
        self._optimizer: States | None = None
        self._step: Callable[[], int] | None = None

    def watch(
        self,
        model: torch.nn.Module,
        optimizer: States | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        """Name tensors by this model and this optimizer; `step` returns the number of finished steps."""
        self._model, self._optimizer, self._step = model, optimizer, step

    @contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """A phase of the command; the innermost one that an error leaves is the one that is reported."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            report = self.report(phase, error)
            release_frames(error)  # whatever is saved now must not meet a full memory
            raise ExplainedOutOfMemory(report) from error

    def report(self, phase: RunPhase, error: BaseException) -> MemoryReport:
        """What is known, as long as the exception's frames are there."""
        phase = _refined(phase, error)
        state = memory_state(error)
        report = MemoryReport(
            phase,
            state,
            (str(error).strip() or type(error).__name__).splitlines()[0][:400],
            step=self._step() + 1 if self._step is not None else None,
            recorded=self.origins is not None,
            predicted=predicted_memory(self.plan, phase) if self.plan is not None else None,
        )
        # Listing needs some memory itself, and the host may have none.
        with suppress(MemoryError):
            asked = failed_at(error, self._model) if self.origins is None else self.origins.last
            report = replace(report, asked=asked)
            found = live_tensors(error, model=self._model, optimizer=self._optimizer, origins=self.origins)
            found = _on_device(found, state)
            report = replace(report, buckets=_buckets(found), tensors=tuple(found[:LISTED]))
        return report


@contextmanager
def explaining_memory(
    phase: RunPhase,
    model: torch.nn.Module | None = None,
    *,
    run: RunFolder | None = None,
    predict: Callable[[], PredictedMemory] | None = None,
) -> Iterator[None]:
    """A phase of a command that trains nothing, as `MemoryExplainer.during`, with what to do about it.

    Args:
        phase: what the command does; a phase inside it is reported as what it is, with this one's remedy.
        model: names the tensors.
        run: the run folder whose model is used, where the report is written.
        predict: what the phase was expected to hold; called where memory ran out in it.

    Example:
        >>> with explaining_memory(RunPhase.GENERATION):
        ...     total = sum([1, 2])
    """
    explainer = MemoryExplainer()
    if model is not None:
        explainer.watch(model)
    try:
        with explainer.during(phase):
            yield
    except ExplainedOutOfMemory as error:
        report, details = error.report, error.details
        predicted = planned_command(run, phase)
        if predict is not None and report.predicted is None:
            predicted = predict()
        if not details or predicted is not None:
            report = replace(report, predicted=predicted)
            details = tuple(_details(report, run))
        raise ExplainedOutOfMemory(report, command_remedy(phase, report.phase), details) from error.__cause__


def _details(report: MemoryReport, run: RunFolder | None) -> Iterator[str]:
    yield from essentials(report)
    if run is not None and RunFolder.is_run(run.path) and write_report(report, run):
        yield f"full report   {run.oom_text}"


def write_report(report: MemoryReport, folder: RunFolder, remedies: Sequence[Suggestion] = ()) -> bool:
    """oom.json and oom.txt into a run folder; whether that could be done."""
    try:
        write_json(folder.oom, {**report.to_dict(), "remedies": [asdict(one) for one in remedies]})
        write_text(folder.oom_text, full_text(report, [one.describe() for one in remedies]))
    except ResourceError:  # a full or read-only disk is no reason to say less
        return False
    return True


def predicted_memory(plan: Plan, phase: RunPhase) -> PredictedMemory:
    """The plan's numbers for a report."""
    peak, planned = plan.memory.peak, plan.phases.of(phase)
    buckets = (peak if planned is None else planned.buckets).to_dict()
    return PredictedMemory(
        allocated=peak.total,
        moment=plan.memory.moment.describe(),
        process=plan.memory.needed if planned is None else max(plan.memory.needed, planned.needed),
        phase=None if planned is None else buckets["total"],
        host=None if planned is None else planned.host,
        buckets={name: amount for name, amount in buckets.items() if name != "total"},
    )


def planned_command(run: RunFolder | None, command: RunPhase) -> PredictedMemory | None:
    """What a run's plan.json says of merging or exporting its model; None for other commands and other models."""
    if command not in (RunPhase.MERGE, RunPhase.EXPORT) or run is None or not run.plan.is_file():
        return None
    with suppress(
        CheckpointError, KeyError, TypeError, ValueError
    ):  # a plan of an earlier version, or damaged
        for entry in read_json(run.plan)["phases"]["phases"]:
            if entry["phase"] == command.value:
                buckets = {kind.value: int(entry[kind.value]) for kind in TensorKind}
                return PredictedMemory(
                    allocated=int(entry["total"]),
                    moment=str(entry["note"]),
                    process=int(entry["needed"]),
                    buckets=buckets,
                    phase=int(entry["total"]),
                    host=int(entry["host"]),
                )
    return None


def _refined(phase: RunPhase, error: BaseException) -> RunPhase:
    """The loss is part of a forward pass; the frames tell whether that is where memory ran out."""
    if phase is RunPhase.FORWARD:
        names = (str(frame.f_globals.get("__name__", "")) for frame in frames_of(error))
        if any(name.startswith(LOSS_KERNELS) for name in names):
            return RunPhase.LOSS
    return phase


def _on_device(found: list[LiveTensor], state: MemoryState) -> list[LiveTensor]:
    kind = "cuda" if state.on_gpu else "cpu"
    return [tensor for tensor in found if tensor.device.startswith(kind)] or found


def _buckets(found: list[LiveTensor]) -> dict[str, int]:
    return {kind.value: sum(tensor.bytes for tensor in found if tensor.kind is kind) for kind in TensorKind}
