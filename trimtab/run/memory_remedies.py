"""Remedies for running out of memory: changes of the recipe, each with its own plan, or of the command's options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab.facts.phases import STEP_PHASES, RunPhase
from trimtab.facts.units import format_bytes
from trimtab.plan.fit import Remedy, remedies
from trimtab.plan.make import Plan
from trimtab.recipe.resume import CHANGEABLE_ON_RESUME
from trimtab.run.memory_report import MemoryReport

_SETTING = re.compile(r"(\w+): (\{[^}]*\}|[^\s,]+)")

_BATCH = "per_device_train_batch_size"

COMMAND_REMEDIES = {
    RunPhase.LOAD: "use a smaller dtype (--dtype bf16), another --device, or end other programs that use memory",
    RunPhase.EVALUATION: "use a smaller --batch-size or --max-seq-length",
    RunPhase.PROBE: "leave the probe out (--no-probe)",
    RunPhase.GENERATION: "use a smaller --batch-size or --max-new-tokens, or a shorter prompt",
    RunPhase.MERGE: "merging needs the model in fp32 in host memory: end other programs, or merge on a machine with "
    "more memory",
    RunPhase.EXPORT: "exporting needs the model in fp32 in host memory: end other programs, or export on a machine "
    "with more memory",
}
"""Remedies for commands other than training."""


@dataclass(frozen=True)
class MemoryRemedy:
    """A change that saves memory, described in recipe keys and as overrides for the command line."""

    change: str
    overrides: tuple[str, ...]
    saving: int | None = None
    """Saved bytes, from the plan of the changed recipe; None where that is not planned."""
    enough: bool = True
    """Whether the run would have fit, judged by the measured memory."""

    def describe(self) -> str:
        """The change and the memory that it saves."""
        if self.saving is None:
            return self.change
        short = "" if self.enough else ", which alone may not be enough"
        return f"{self.change} (saves {format_bytes(self.saving)}{short})"


def command_remedy(command: RunPhase, failed: RunPhase) -> str:
    """The remedy for a command other than training, by the command and the phase that failed.

    Example:
        >>> command_remedy(RunPhase.EVALUATION, RunPhase.EVALUATION)
        'use a smaller --batch-size or --max-seq-length'
    """
    if command is RunPhase.EVALUATION and failed is RunPhase.GENERATION:
        return "generate answers to fewer problems (--answers), or to none"
    phase = command if failed is RunPhase.LOAD else failed
    return COMMAND_REMEDIES.get(phase, "end other programs that use memory")


def overrides_of(change: str) -> tuple[str, ...]:
    """The settings in a remedy's text as overrides for the command line.

    Example:
        >>> overrides_of("per_device_train_batch_size: 2 with gradient_accumulation_steps: 8")
        ('per_device_train_batch_size=2', 'gradient_accumulation_steps=8')
    """
    return tuple(f"{key}={value}" for key, value in _SETTING.findall(change))


def training_suggestions(report: MemoryReport, plan: Plan, *, began: bool) -> list[MemoryRemedy]:
    """Changes to a training run that save memory, the cheapest that suffices first.

    Args:
        report: the report of the failed allocation.
        plan: the run's plan.
        began: whether steps were trained, after which only some keys may change.
    """
    phase, recipe = report.phase, plan.recipe
    if phase is RunPhase.GENERATION:
        found = [MemoryRemedy("answers: 0 and prompts: []", ("answers=0", "prompts=[]"))]
    elif phase is RunPhase.CHECKPOINT and (recipe.save_steps is not None or recipe.eval_steps is not None):
        change = "save_steps: null and eval_steps: null, so that only the end of the run is saved"
        found = [MemoryRemedy(change, ("save_steps=null", "eval_steps=null"))]
    elif phase is RunPhase.DATA:
        found = [MemoryRemedy("data.num_proc: 1", ("data.num_proc=1",))]
    elif phase is RunPhase.PROBE:
        found = [MemoryRemedy("probe: false", ("probe=false",))]
    elif phase is RunPhase.EVALUATION:  # its batches are those of training
        found = [_suggestion(remedy) for remedy in remedies(plan) if _BATCH in remedy.change]
    elif phase in (*STEP_PHASES, RunPhase.LOAD):
        found = _sufficient_first(report, plan)
    else:
        found = []
    return [suggestion for suggestion in found if not began or _may_change(suggestion)]


def resume_command(folder: Path, suggestion: MemoryRemedy | None) -> str:
    """The command that resumes a run with a suggested change."""
    command = ["trimtab", "train", "--resume", str(folder), *(suggestion.overrides if suggestion else ())]
    return shlex.join(command)


def _suggestion(remedy: Remedy, *, enough: bool = True) -> MemoryRemedy:
    return MemoryRemedy(remedy.change, overrides_of(remedy.change), remedy.saving, enough)


def _may_change(suggestion: MemoryRemedy) -> bool:
    return all(word.partition("=")[0] in CHANGEABLE_ON_RESUME for word in suggestion.overrides)


def _sufficient_first(report: MemoryReport, plan: Plan) -> list[MemoryRemedy]:
    """Changes that suffice in the planner's order, then the others by the memory that they save."""
    fits, found = would_fit(report, plan), remedies(plan)
    insufficient = sorted((remedy for remedy in found if not fits(remedy)), key=lambda remedy: -remedy.saving)
    return [
        *(_suggestion(remedy) for remedy in found if fits(remedy)),
        *(_suggestion(remedy, enough=False) for remedy in insufficient),
    ]


def would_fit(report: MemoryReport, plan: Plan) -> Callable[[Remedy], bool]:
    """Returns a predicate: whether the run would have fit with a remedy, judged by the measured memory.

    The excess of measured over predicted memory is added to the prediction of each remedy.
    """
    state, predicted = report.state, report.predicted
    used = state.allocated if state.on_gpu else state.process
    if used is None or state.free is None or state.requested is None or predicted is None:
        wanted = state.requested or 0
        return lambda remedy: remedy.saving >= wanted
    expected = predicted.process if not state.on_gpu else (predicted.phase_allocated or predicted.allocated)
    excess = max(0, used + state.requested - expected)
    available = used + state.free
    process_bytes = plan.memory.process_bytes if state.on_gpu else 0
    return lambda remedy: remedy.needed - process_bytes + excess <= available
