"""Ends a run that ran out of memory: writes the report into its folder and suggests the command that resumes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trimtab.checkpoint.layout import step_folders
from trimtab.facts.phases import RunPhase
from trimtab.plan.make import Plan
from trimtab.run.folder import RunFolder
from trimtab.run.memory_remedies import MemoryRemedy, resume_command, training_suggestions
from trimtab.run.memory_report import MemoryReport
from trimtab.run.memory_text import RECORDING, summary_lines
from trimtab.run.out_of_memory import ExplainedOutOfMemory, MemoryExplainer, write_report


@contextmanager
def reporting_out_of_memory(explainer: MemoryExplainer, folder: RunFolder, plan: Plan) -> Iterator[None]:
    """Explains out-of-memory errors of a run: writes oom.json and oom.txt and raises an error with a remedy."""
    try:
        with explainer.during(RunPhase.OTHER):
            yield
    except ExplainedOutOfMemory as error:
        raise with_remedy(_first(error), folder, plan) from error.__cause__


def with_remedy(error: ExplainedOutOfMemory, folder: RunFolder, plan: Plan) -> ExplainedOutOfMemory:
    """Writes the report; returns the error with remedy and details."""
    report, began = error.report, folder.began()
    suggestions = training_suggestions(report, plan, began=began)
    best = suggestions[0] if suggestions else None
    details = summary_lines(report)
    details.append(_saved(folder))
    if write_report(report, folder, suggestions):
        lines = "" if report.recorded else f"; add {RECORDING} to record the lines that allocate the tensors"
        details.append(f"full report   {folder.oom_text}{lines}")
    return ExplainedOutOfMemory(report, _remedy(report, folder, best), tuple(details))


def _remedy(report: MemoryReport, folder: RunFolder, best: MemoryRemedy | None) -> str:
    command = f"`{resume_command(folder.path, best)}`"
    if best is not None:
        return f"set {best.describe()}: {command}"
    if report.phase is RunPhase.CHECKPOINT:
        return f"a checkpoint is copied to host memory first: free some host memory, then {command}"
    others = report.state.others
    if others:
        return f"end the other processes on the GPU (pid {others[0].pid}), or use a larger GPU: {command}"
    return (
        f"no change that a resume allows is known to suffice: use a device with more memory, then {command}"
    )


def _saved(folder: RunFolder) -> str:
    steps = [int(path.name.removeprefix("step-")) for path in step_folders(folder.checkpoints)]
    if steps:
        return f"saved         step {max(steps)}, from which the command above resumes"
    if folder.began():
        return "saved         no checkpoint: the command above starts again at step 0"
    return "saved         nothing was trained yet: the command above starts the run, and any key may change"


def _first(error: ExplainedOutOfMemory) -> ExplainedOutOfMemory:
    """Returns the first out-of-memory error of a chain: saving the state after it may have failed as well."""
    first, context = error, error.__context__
    while context is not None:
        if isinstance(context, ExplainedOutOfMemory):
            first = context
        context = context.__context__
    return first
