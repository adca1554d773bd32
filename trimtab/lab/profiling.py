"""Measures a recipe's step, built as `trimtab train` builds it: time, kernels, operations, memory; suggests changes.

Tokens are random, so that no training data is needed; the model's weights are used if they are on this machine. Whole
steps are timed as the recipe runs them. Measurements by operation run without torch.compile and CUDA graphs, which hide
their operations.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab.data import Batch
from trimtab.facts.errors import ResourceError
from trimtab.facts.phases import During, RunPhase, no_phase
from trimtab.lab.memory_blocks import AttributedTimeline
from trimtab.lab.memory_recorder import record_memory
from trimtab.lab.memory_snapshot import write_torch_snapshot
from trimtab.lab.memory_summary import summarize
from trimtab.lab.nvtx import nvtx_ranges
from trimtab.lab.operation_times import BACKWARD, FORWARD, RECOMPUTE, OperationTimes, measure_operations
from trimtab.lab.profile_options import ProfileOptions, check_options
from trimtab.lab.profile_plan import (
    ceiling_of,
    model_flops,
    operation_rows,
    predicted_peak,
    predicted_step,
    profiled_job,
)
from trimtab.lab.profile_result import Details, ProfileResult
from trimtab.lab.profile_target import ProfileTarget, find_target
from trimtab.lab.profiles import profile_run, write_trace
from trimtab.lab.step_times import StepTimes
from trimtab.lab.step_timing import time_steps
from trimtab.lab.study import NotSupported
from trimtab.lab.suggestions import suggest
from trimtab.lab.timing import ceilings
from trimtab.lab.training_step import TrainingStep, build_step, random_batch
from trimtab.plan import check_fits
from trimtab.recipe import Recipe, build
from trimtab.run.device import current_gpu
from trimtab.run.memory_remedies import training_suggestions
from trimtab.run.memory_text import summary_lines
from trimtab.run.out_of_memory import ExplainedOutOfMemory, MemoryExplainer
from trimtab.run.prepare import Prepared
from trimtab.run.target import named_recipe
from trimtab.run.torch_setup import free_cached_memory, restore_torch_settings
from trimtab.trainer.graphs import WARM_UP as GRAPH_WARM_UP

RECORDED_MICROBATCHES = 2
"""Microbatches of a recorded step with gradient accumulation: the second one adds to existing gradients."""
OPERATION_ROUNDS = 3
KERNEL_ROUNDS = 2
"""Rounds of which the fastest counts."""
SLOW = 5.0
"""Seconds of a step above which there is only one round."""
TIMING_SECONDS = 120.0
"""No further step is timed after this time."""
UPDATES = 3
TRACE, BLOCKS = "trace.json.gz", "memory.json"

Progress = Callable[[str], None]


def profile_recipe(
    recipe: Recipe | str | Path | dict[str, Any],
    *,
    options: ProfileOptions | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> ProfileResult:
    """Builds the model of a recipe on its device and measures its step.

    Args:
        recipe: a recipe, a YAML file, the name of a recipe that ships with trimtab or of a model, or a dict.
        options: steps, warm-up and files.
        progress: called with the name of each phase.
        keys: recipe keys, which replace those of the recipe.

    Raises:
        ResourceError: it does not fit, runs out of memory, or needs something that the device does not support.

    Example:
        >>> result = trimtab.profile_recipe("recipe.yaml", max_seq_length=512)       # doctest: +SKIP
        >>> result.tokens_per_second, result.suggestions[0].lines                    # doctest: +SKIP
        (1834.2, ('recompute: none',))
    """
    options, progress_callback = options or ProfileOptions(), progress or (lambda text: None)
    target = find_target(_recipe(recipe, keys))
    check_options(options, target.prepared)
    check_fits(target.prepared.plan, target.prepared.device)
    explainer = MemoryExplainer(target.prepared.plan)
    with current_gpu(target.prepared.recipe.device), restore_torch_settings(), _explained(explainer, target):
        return _Profiling(target, options, explainer, progress_callback).result()


def _recipe(given: Recipe | str | Path | dict[str, Any], keys: dict[str, Any]) -> Recipe:
    if isinstance(given, str | Path):
        words = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()
        ]
        return named_recipe(str(given), words)
    plain = given.model_dump(mode="json", exclude_unset=True) if isinstance(given, Recipe) else given
    return build({**plain, **keys})


@contextmanager
def _explained(explainer: MemoryExplainer, target: ProfileTarget) -> Iterator[None]:
    """Turns running out of memory in any phase into an error with the largest tensors and a change that fits."""
    try:
        with explainer.during(RunPhase.OTHER):
            yield
    except ExplainedOutOfMemory as error:
        report = error.report
        changes = training_suggestions(report, target.prepared.plan, began=False)
        remedy = f"set {changes[0].describe()}" if changes else "use a device with more memory"
        raise ExplainedOutOfMemory(report, remedy, tuple(summary_lines(report))) from error.__cause__


class _Phases:
    """Context manager for the phases of a step: explains running out of memory, and calls the recorder."""

    def __init__(self, explainer: MemoryExplainer) -> None:
        self.explainer = explainer
        self.listener: During = no_phase

    @contextmanager
    def __call__(self, phase: RunPhase) -> Iterator[None]:
        with self.explainer.during(phase), self.listener(phase):
            yield


class _Profiling:
    """One profile, measured part by part."""

    def __init__(
        self, target: ProfileTarget, options: ProfileOptions, explainer: MemoryExplainer, tell: Progress
    ) -> None:
        self.found, self.options, self.explainer, self.tell = target, options, explainer, tell
        self.prepared = target.prepared
        self.device = self.prepared.device.kind
        self.phases = _Phases(explainer)
        self.notes = list(target.notes)
        self.is_slow = False
        self.step = self._built(self.prepared)

    def result(self) -> ProfileResult:
        plan, prepared = self.prepared.plan, self.prepared
        times, peak = self._timed()
        update = self._timed_update()
        if not self.found.is_eager:
            self._rebuild_eagerly()
        details = None if self.options.nvtx else self._details()
        if peak is None:  # a CPU's allocator has no statistics: the recorded peak is the measurement
            peak = 0 if details is None else details.memory.peak_bytes
        self.tell("measuring the device's peak rate")
        measured = None if prepared.device.ceiling(plan.job.dtype) else ceilings(self.device, plan.job.dtype)
        self.tell("planning suggestions")
        return ProfileResult(
            job=profiled_job(plan),
            times=times,
            update=update,
            model_flops=model_flops(plan),
            ceiling=ceiling_of(plan, measured),
            predicted_step=predicted_step(plan),
            time_basis=plan.time.basis,
            peak_bytes=peak,
            predicted_peak=predicted_peak(plan),
            details=details,
            suggestions=suggest(plan, self.found.plan_for),
            notes=tuple(self.notes),
        )

    @property
    def microbatches(self) -> int:
        """Microbatches per optimizer step."""
        return self.prepared.plan.job.accumulation

    def _built(self, prepared: Prepared) -> TrainingStep:
        self.tell(f"building {prepared.recipe.model.name}")
        with self.explainer.during(RunPhase.LOAD):
            step = build_step(prepared, self.found.weights, self._batch(), during=self.phases)
        self.explainer.watch(step.decoder, step.optimizer)
        return step

    def _batch(self) -> Batch:
        recipe, shape = self.prepared.recipe, self.prepared.shape
        document = self.options.document if recipe.packing else None
        return random_batch(
            shape.vocab_size, recipe.per_device_train_batch_size, recipe.max_seq_length, document=document
        )

    def _rebuild_eagerly(self) -> None:
        peak = ", and so is their peak" if self.device == "cuda" else ""
        self.notes.append(
            "torch.compile and CUDA graphs are off while kernels, operations and memory over time are measured; whole "
            f"steps are timed as the recipe runs them{peak}"
        )
        del self.step
        self.explainer.unwatch()
        gc.collect()
        free_cached_memory()  # a graph's workspaces too
        self.step = self._built(self.found.eager())

    def _whole(self, microbatches: int) -> None:
        for _ in range(microbatches):
            self.step.microbatch()
        self.step.update()

    def _one_step(self) -> None:
        self._whole(self.microbatches)

    def _timed(self) -> tuple[StepTimes, int | None]:
        """Times of whole steps; on a GPU the peak of the tensors too."""
        options = self.options
        self.tell(f"timing {options.steps} steps after {options.warm_up} of warm-up")
        graphs = self.prepared.resolved.graphs.enabled
        for _ in range(max(options.warm_up, GRAPH_WARM_UP + 1) if graphs else options.warm_up):
            self._one_step()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with self._ranges():
            times = time_steps(
                lambda: self._one_step,
                device=self.device,
                steps=options.steps,
                warm_up=0,
                budget_s=TIMING_SECONDS,
            )
        self.is_slow = times.host.median_ms > 1e3 * SLOW
        return times, torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    @contextmanager
    def _ranges(self) -> Iterator[None]:
        if not self.options.nvtx:
            yield
            return
        self.notes.append(
            "NVTX ranges were emitted around every module in the timed steps, which costs time on the host; run the "
            "command without --nvtx for step times, kernels and memory"
        )
        with nvtx_ranges(self.step.decoder):
            yield

    def _timed_update(self) -> StepTimes | None:
        if self.prepared.recipe.optim_in_backward:
            return None
        self.tell("timing the optimizer")

        def prepare() -> Callable[[], Any]:
            self.step.microbatch()
            return self.step.update

        return time_steps(
            prepare, device=self.device, steps=UPDATES, warm_up=0 if self.is_slow else 1, budget_s=SLOW
        )

    def _details(self) -> Details:
        options, device = self.options, self.device
        try:
            self.tell("profiling kernels")
            kernels = profile_run(self._one_step, device, rounds=1 if self.is_slow else KERNEL_ROUNDS)
        except NotSupported as error:
            raise ResourceError(
                str(error), "use --nvtx for NVIDIA's own tools, or run `trimtab doctor`"
            ) from None
        self.tell("timing operations")
        times = measure_operations(
            self.step.decoder, self._lone_microbatch, device, rounds=1 if self.is_slow else OPERATION_ROUNDS
        )
        self.step.update()
        self.tell("recording memory")
        microbatches = min(self.microbatches, RECORDED_MICROBATCHES)
        timeline = self._recorded(microbatches)
        if options.folder is not None:
            timeline.write(options.folder / BLOCKS)
            if options.trace:
                self.tell("writing a trace")
                write_trace(self._one_step, device, options.folder / TRACE)
        if options.snapshot is not None:
            write_torch_snapshot(self._one_step, options.snapshot)
        rows = operation_rows(_seconds(times), self.prepared.plan)
        return Details(kernels, rows, times.attributed, summarize(timeline), microbatches)

    def _lone_microbatch(self) -> None:
        """Forward and backward; gradients accumulate only if the recipe accumulates them."""
        self.step.microbatch()
        if self.microbatches == 1:
            for parameter in self.step.decoder.parameters():
                parameter.grad = None

    def _recorded(self, microbatches: int) -> AttributedTimeline:
        def run(during: During) -> None:
            self.phases.listener = during
            try:
                self._whole(microbatches)
            finally:
                self.phases.listener = no_phase

        return record_memory(run, self.device, self.step.decoder, self.step.optimizer)


def _seconds(times: OperationTimes) -> dict[str, tuple[float, float, float]]:
    """Forward, recomputation and backward of each operation."""
    names = dict.fromkeys(row.operation for row in times.rows)
    return {
        name: (times.seconds(name, FORWARD), times.seconds(name, RECOMPUTE), times.seconds(name, BACKWARD))
        for name in names
    }
