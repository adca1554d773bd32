"""Explains out-of-memory errors: the phase, the live tensors, the prediction, and other processes on the GPU.

Every phase of every command runs inside `MemoryExplainer.during` or `explaining_memory`. They cost nothing until an
allocation fails. The report is made immediately, while the exception's frames still reference the live tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import torch

from trimtab.facts.errors import CheckpointError, OutOfMemory, ResourceError, is_out_of_memory, release_frames
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.plan.make import Plan
from trimtab.run.folder import RunFolder, read_json, write_json, write_text
from trimtab.run.live_tensors import (
    LiveTensor,
    Origins,
    States,
    failure_origin,
    frames_of,
    live_tensors,
)
from trimtab.run.memory_remedies import MemoryRemedy, command_remedy
from trimtab.run.memory_report import MemoryReport, PredictedMemory, describe_failure
from trimtab.run.memory_state import MemoryState, memory_state
from trimtab.run.memory_text import full_text, summary_lines

LISTED = 100
"""Number of tensors that oom.json lists, the largest first."""

LOSS_KERNELS = "trimtab.kernels.linear_cross_entropy"


class ExplainedOutOfMemory(OutOfMemory):
    """An out-of-memory error with its report; `details` are more lines for the terminal."""

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
        plan: the plan of a training run; None for other commands.
        origins: where tensors were allocated, if that is recorded (`run.allocations`).

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
        """Use this model and optimizer to name tensors; `step` returns the number of finished steps."""
        self._model, self._optimizer, self._step = model, optimizer, step

    def unwatch(self) -> None:
        """Release the model and the optimizer, so that their memory can be freed."""
        self._model = self._optimizer = self._step = None

    @contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """Explains out-of-memory errors of a phase; of nested phases the innermost is reported."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            report = self.report(phase, error)
            release_frames(error)  # saving a checkpoint after this needs memory
            raise ExplainedOutOfMemory(report) from error

    def report(self, phase: RunPhase, error: BaseException) -> MemoryReport:
        """Collects the report; must be called before the exception's frames are released."""
        phase = _refine_phase(phase, error)
        state = memory_state(error)
        report = MemoryReport(
            phase,
            state,
            (str(error).strip() or type(error).__name__).splitlines()[0][:400],
            step=self._step() + 1 if self._step is not None else None,
            recorded=self.origins is not None,
            predicted=predicted_memory(self.plan, phase) if self.plan is not None else None,
        )
        # Listing tensors needs host memory itself, which may be exhausted.
        with suppress(MemoryError):
            requested_at = (
                failure_origin(error, self._model) if self.origins is None else self.origins.last_origin
            )
            report = replace(report, requested_at=requested_at)
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
    """Like `MemoryExplainer.during`, for commands other than training; adds the remedy for the command.

    Args:
        phase: what the command does; a nested phase is reported under its own name.
        model: its parameters name tensors in the report.
        run: the run folder of the model; the report is written there.
        predict: returns the predicted memory of the phase; called only after memory ran out.

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
    yield from summary_lines(report)
    if run is not None and RunFolder.is_run(run.path) and write_report(report, run):
        yield f"full report   {run.oom_text}"


def write_report(report: MemoryReport, folder: RunFolder, remedies: Sequence[MemoryRemedy] = ()) -> bool:
    """Writes oom.json and oom.txt into a run folder; returns whether that succeeded."""
    try:
        write_json(folder.oom, {**report.to_dict(), "remedies": [asdict(remedy) for remedy in remedies]})
        write_text(folder.oom_text, full_text(report, [remedy.describe() for remedy in remedies]))
    except ResourceError:  # a full or read-only disk must not hide the out-of-memory error
        return False
    return True


def predicted_memory(plan: Plan, phase: RunPhase) -> PredictedMemory:
    """Returns the plan's prediction for a phase."""
    peak, planned = plan.memory.peak, plan.phases.of(phase)
    buckets = (peak if planned is None else planned.buckets).to_dict()
    return PredictedMemory(
        allocated=peak.total,
        moment=plan.memory.moment.describe(),
        process=plan.memory.needed if planned is None else max(plan.memory.needed, planned.needed),
        phase_allocated=None if planned is None else buckets["total"],
        host=None if planned is None else planned.host,
        buckets={name: amount for name, amount in buckets.items() if name != "total"},
    )


def planned_command(run: RunFolder | None, command: RunPhase) -> PredictedMemory | None:
    """Returns plan.json's prediction for merging or exporting a run's model; None for other commands and models."""
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
                    phase_allocated=int(entry["total"]),
                    host=int(entry["host"]),
                )
    return None


def _refine_phase(phase: RunPhase, error: BaseException) -> RunPhase:
    """Returns `LOSS` for a forward pass whose traceback goes through a loss kernel, otherwise the phase."""
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
