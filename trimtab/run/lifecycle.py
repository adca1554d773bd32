"""Runs a recipe from start to end: prepare, plan, validate, build, train; and resumes a run folder."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab import text
from trimtab.checkpoint import SavedCheckpoint, Store
from trimtab.data.in_memory import PassedRows
from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.phases import RunPhase
from trimtab.model import read_shape
from trimtab.parallel import Mesh
from trimtab.plan import Plan, check_disk, check_fits, total_steps
from trimtab.recipe import Recipe, check_resume, dump, load, loads, to_dict
from trimtab.run import build as building
from trimtab.run import corpora, models
from trimtab.run.allocations import AllocationRecorder, recording
from trimtab.run.choices import Choices, DataPins, PlannedSteps, read_choices, read_recipe, write_choices
from trimtab.run.device import current_gpu, require_trackers
from trimtab.run.environment import environment
from trimtab.run.folder import RunFolder, read_json, write_json, write_text
from trimtab.run.initial_weights import InitialWeights, find_initial_weights
from trimtab.run.locate import (
    START_FOLDER,
    absolute,
    tokenizer_of,
)
from trimtab.run.memory_record import reporting_out_of_memory
from trimtab.run.models import OpenedModel
from trimtab.run.out_of_memory import MemoryExplainer, explaining_memory
from trimtab.run.plan_receipt import PlanReceipt
from trimtab.run.planned_steps import check_planned_steps, describe_change
from trimtab.run.prepare import Prepared, StoredConfig, note_untrained_head, prepare
from trimtab.run.resume import (
    DEVICE_KEYS,
    MEMORY_KEYS,
    describe_device_change,
    find_checkpoint,
    first_losses,
    report_threads,
    requests_device,
    resolve_for_device,
    resume_device,
    with_changes,
)
from trimtab.run.starting import check_start, start_from
from trimtab.run.torch_setup import requires_determinism, restore_torch_settings
from trimtab.text import Tokenizer


class View(Protocol):
    """Receives the plan, messages and records of a run: `report.LiveView`, or a test."""

    total_steps: int
    logging_steps: int
    first_losses: dict[str, float]

    def plan(self, plan: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunInputs:
    """Arguments of a run that are not in its recipe."""

    rows: Mapping[str, PassedRows] = field(default_factory=dict)
    """Rows in memory, by the names of their sources (`data.in_memory`)."""
    callbacks: Sequence[Any] = ()
    """The user's callbacks (`trainer.callbacks`)."""
    model: OpenedModel | None = None
    """A loaded model to start from."""
    explain_memory: bool = False
    """Record where tensors are allocated, for the report if memory runs out; steps are slower."""


@dataclass(frozen=True)
class FinishedRun:
    """The result of a run: its folder and how it ended."""

    folder: Path
    status: str
    step: int
    signal: int | None = None
    reason: str | None = None
    """Why it ended before its last step (early stopping, or a callback's reason); None if there is no reason."""


def train(
    recipe: Recipe,
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    inputs: RunInputs | None = None,
) -> FinishedRun:
    """Train a recipe in a new run folder, from the plan to the last checkpoint.

    Example:
        >>> train(load("recipe.yaml"), LiveView())  # doctest: +SKIP
        FinishedRun(folder=PosixPath('runs/train'), status='finished', step=100, signal=None)
    """
    recipe = absolute(recipe)
    if requires_determinism():
        recipe = recipe.model_copy(update={"deterministic": True})  # the calling process requires it
    folder = RunFolder(Path(recipe.output_dir))
    folder.check_new()
    inputs = inputs or RunInputs()
    if inputs.model is not None:
        return _train_loaded(recipe, folder, view, inputs, inputs.model, after_step=after_step)
    prepared = _prepare_new(recipe)
    with folder.create(dump(prepared.recipe)), current_gpu(recipe.device), restore_torch_settings():
        return _execute(prepared, folder, view, saved=None, after_step=after_step, inputs=inputs)


def _train_loaded(
    recipe: Recipe,
    folder: RunFolder,
    view: View,
    inputs: RunInputs,
    opened: OpenedModel,
    *,
    after_step: Callable[[int], None] | None,
) -> FinishedRun:
    """Train a recipe from a loaded model."""
    require_trackers(recipe.report_to)
    check_start(recipe, opened)
    # Until the weights are written, recipe.yaml must not name the original model: a resume would train that one.
    start_model = recipe.model.model_copy(
        update={"name": str(folder.path.absolute() / START_FOLDER), "revision": None}
    )
    recipe_before_weights = recipe.model_copy(update={"model": start_model})
    with folder.create(dump(recipe_before_weights)), current_gpu(recipe.device), restore_torch_settings():
        with explaining_memory(RunPhase.CHECKPOINT, opened.decoder):
            recipe = absolute(start_from(recipe, opened, folder.path, view.message))
        prepared = _prepare_new(recipe)
        write_text(folder.recipe, dump(prepared.recipe))
        return _execute(prepared, folder, view, saved=None, after_step=after_step, inputs=inputs)


def _prepare_new(recipe: Recipe) -> Prepared:
    """Prepare a new run; every check that can fail before its folder is created is here."""
    require_trackers(recipe.report_to)
    prepared = prepare(recipe)
    check_fits(prepared.plan, prepared.device)
    return prepared


def resume(
    path: Path,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    inputs: RunInputs | None = None,
) -> FinishedRun:
    """Resume a run folder from its last good checkpoint, with the configuration in choices.json.

    A folder whose first start was killed before choices.json was written is started from the recipe in it.
    """
    folder = RunFolder(path)
    folder.open()
    with folder.lock(), ExitStack() as around:
        folder.open()  # it may have changed before the lock was acquired
        if not folder.choices.is_file():
            return _restart(folder, overrides, view, after_step=after_step, inputs=inputs or RunInputs())
        before, recipe = read_recipe(folder), recipe_of(folder, overrides)
        device_requested = requests_device(before, recipe, overrides)
        check_resume(before, recipe, run=str(path), overrides=overrides)
        shape = read_shape(folder.model)
        saved = read_choices(folder, shape.num_layers)
        resolved = saved.resolved
        device = resume_device(resolved, recipe, path, asked=device_requested)
        moved = device.kind != resolved.device
        around.enter_context(current_gpu(recipe.device))
        around.enter_context(restore_torch_settings())
        require_trackers(recipe.report_to)
        report_threads(resolved.threads, recipe, view.message)
        if not resolved.deterministic and device.kind == "cuda" and not moved:
            view.message(
                "deterministic: false: on a GPU, losses may differ in the last bits from those of an uninterrupted run"
            )
        changed = any(getattr(before, key) != getattr(recipe, key) for key in MEMORY_KEYS)
        if moved:
            resolved = resolve_for_device(resolved, recipe, shape, device)
        stored = StoredConfig(resolved, folder.model, saved.model_commit, device, changed, moved=moved)
        prepared = prepare(recipe, stored)
        graphs_required = recipe.cuda_graphs is True and before.cuda_graphs is not True
        if changed or moved or graphs_required:
            check_fits(prepared.plan, prepared.device, resumed=True)
        keys = [*(DEVICE_KEYS if device_requested else ()), *(MEMORY_KEYS if changed else ())]
        saved = dataclasses.replace(saved, recipe=with_changes(saved.recipe, recipe, keys))
        return _execute(
            prepared, folder, view, saved=saved, after_step=after_step, inputs=inputs or RunInputs()
        )


def _restart(
    folder: RunFolder,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None,
    inputs: RunInputs,
) -> FinishedRun:
    """Start the run of a folder whose first start was killed before choices.json was written; requires the lock."""
    recipe = load(folder.recipe, overrides)  # any key may change: nothing was trained yet
    start = folder.path.absolute() / START_FOLDER
    if recipe.model.name == str(start) and not start.is_dir():
        raise CheckpointError(
            f"the run in {folder.path} was stopped before its initial weights were written",
            f"pass the model again: trimtab.train(…, model=model, output_dir={str(folder.path)!r})",
        )
    view.message(f"the run in {folder.path} was stopped before it began: starting its recipe at step 0")
    prepared = _prepare_new(recipe)
    with folder.restart(), current_gpu(recipe.device), restore_torch_settings():
        return _execute(prepared, folder, view, saved=None, after_step=after_step, inputs=inputs)


def recipe_of(folder: RunFolder, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run that is resumed, from recipe.yaml, or from choices.json if that is missing.

    Example:
        >>> recipe_of(RunFolder(Path("runs/demo")), ["max_steps=200"]).max_steps  # doctest: +SKIP
        200
    """
    stored = folder.recipe.is_file()
    recipe = load(folder.recipe, overrides) if stored else loads(dump(read_recipe(folder)), overrides)
    return absolute(recipe) if overrides else recipe  # the same path as at the start is no change


def _execute(
    prepared: Prepared,
    folder: RunFolder,
    view: View,
    *,
    saved: Choices | None,
    after_step: Callable[[int], None] | None,
    inputs: RunInputs,
) -> FinishedRun:
    recorder = AllocationRecorder() if inputs.explain_memory else None
    explainer = MemoryExplainer(prepared.plan, recorder)
    with reporting_out_of_memory(explainer, folder, prepared.plan):
        run, plan = _build(prepared, folder, view, explainer, saved=saved, inputs=inputs)
        folder.remove_oom_report()
        run.setup.after_step = after_step
        run.setup.on_measured = PlanReceipt(folder, plan, view)
        _prepare_view(view, run, folder)
        compiled = run.setup.compiled is not None
        with recording(recorder, run.setup.model, view.message, compiled=compiled):
            outcome = run.train()
    return FinishedRun(folder.path, outcome.status, outcome.state.step, outcome.signal, outcome.reason)


def _build(
    prepared: Prepared,
    folder: RunFolder,
    view: View,
    explainer: MemoryExplainer,
    *,
    saved: Choices | None,
    inputs: RunInputs,
) -> tuple[building.Run, Plan]:
    """Build a run that is ready to train, and write its folder; returns it with its plan for the opened data."""
    recipe, resolved, shape = prepared.recipe, prepared.resolved, prepared.shape
    checkpoint, tokenizer_commit = None, None
    if saved is None:
        tokenizer_commit = _write_config_and_tokenizer(prepared, folder, view)
    else:
        checkpoint = _resume_checkpoint(folder, recipe, view)
    tokenizer = models.load_tokenizer(folder.model, shape)
    with explainer.during(RunPhase.DATA):
        opened = corpora.open_corpora(
            recipe, tokenizer, view, pins=saved.data if saved else None, passed=inputs.rows
        )
    plan = _plan_with_data(prepared, opened, folder, view, checkpoint=checkpoint, resumed=saved is not None)
    weights = find_initial_weights(prepared, folder, saved)
    example = opened.example(tokenizer)
    if example is not None:
        view.record(example)
        tokenizer = _add_stop_tokens(example, tokenizer, folder, view)
    resumed = None
    if saved is not None:
        planned = _planned_steps(saved, opened)
        resumed = building.ResumedState(checkpoint, planned, saved.dropout_by_sequence)
    with explainer.during(RunPhase.LOAD):
        run = building.build_run(
            recipe,
            resolved,
            shape,
            Mesh.world(),
            weights=weights.path,
            tokenizer=tokenizer,
            corpora=opened,
            folder=folder,
            observers=[view, *building.build_trackers(recipe, folder, to_dict(recipe))],
            on_event=view.message,
            resumed=resumed,
            base=weights.base,
            callbacks=inputs.callbacks,
            during=explainer.during,
        )
    explainer.watch(run.setup.model, run.setup.optimizer, lambda: run.state.step)
    if saved is None or resumed is None:
        _write_new(prepared, folder, run, plan, weights, opened.pins(), tokenizer_commit)
    else:
        _write_changes(prepared, folder, run, plan, saved, resumed.planned_steps, view)
    if example is not None and run.state.step == 0 and checkpoint is None:
        run.setup.log.append(example)
    return run, plan


def _plan_with_data(
    prepared: Prepared,
    opened: corpora.Corpora,
    folder: RunFolder,
    view: View,
    *,
    checkpoint: SavedCheckpoint | None,
    resumed: bool,
) -> Plan:
    """The plan for the opened data, which the view shows; raises if the disk or the number of steps is too small."""
    plan = prepared.plan.with_data(opened.facts, trained_steps=checkpoint.step if checkpoint else 0)
    free = shutil.disk_usage(folder.path).free + folder.checkpoint_bytes()
    check_disk(plan.disk, free, str(folder.path), resumed=resumed)
    if checkpoint is not None:
        check_planned_steps(prepared.recipe, checkpoint.step, opened.total_steps(Mesh.world()))
    view.plan(plan.to_dict())
    for note in (*plan.notes, *opened.notes()):
        view.message(f"note: {note}")  # as `trimtab plan` prints it
    return plan


def _resume_checkpoint(folder: RunFolder, recipe: Recipe, view: View) -> SavedCheckpoint | None:
    """The checkpoint to resume from; raises before anything else is read or shown if all were lost."""
    with Store(folder.checkpoints, on_event=view.message) as store:
        return find_checkpoint(store, folder, recipe)


def _prepare_view(view: View, run: building.Run, folder: RunFolder) -> None:
    """Give the view the number of steps and the first losses; print how to extend a run that has trained all steps."""
    view.total_steps = total = run.setup.cadence.total_steps
    view.logging_steps = run.setup.cadence.logging_steps
    view.first_losses = first_losses(folder.metrics)
    if run.state.step >= total:
        view.message(
            f"the run has trained all of its {total} steps; extend it with `trimtab train --resume "
            f"{shlex.quote(str(folder.path))} max_steps={2 * total}`"
        )


def _write_new(
    prepared: Prepared,
    folder: RunFolder,
    run: building.Run,
    plan: Plan,
    weights: InitialWeights,
    pins: DataPins,
    tokenizer_commit: str | None,
) -> None:
    """Write the recipe, plan, environment and choices of a new run into its folder."""
    recipe, resolved = prepared.recipe, prepared.resolved
    write_text(folder.recipe, dump(recipe))
    write_json(folder.plan, plan.to_dict())
    write_json(folder.environment, environment(torch.device(resolved.device)))
    choices = Choices(
        resolved,
        recipe,
        prepared.commit,
        tokenizer_commit,
        pins,
        weights.base,
        weights.started_from,
        run.planned_steps,
    )
    # Last, after weights and data were validated: a folder with choices.json can be resumed.
    write_choices(folder, choices)


def _write_changes(
    prepared: Prepared,
    folder: RunFolder,
    run: building.Run,
    plan: Plan,
    saved: Choices,
    planned: Sequence[PlannedSteps],
    view: View,
) -> None:
    """Write the changes of a resume into the run folder, its log and the view."""
    recipe, resolved, messages = prepared.recipe, prepared.resolved, []
    if saved.resolved.device != resolved.device:
        messages.append(describe_device_change(saved.resolved.device, resolved))
    else:  # later starts compare with the number of threads that the run began with
        resolved = dataclasses.replace(resolved, threads=saved.resolved.threads)
    updated = dataclasses.replace(saved, resolved=resolved, planned_steps=run.planned_steps)
    change = describe_change(recipe, planned, run.planned_steps)
    if change is not None:
        _refuse_early_stopped(run)
        messages.append(change)
    write_text(folder.recipe, dump(recipe))
    write_json(folder.plan, plan.to_dict())
    if updated.to_dict() != read_json(folder.choices):
        write_choices(folder, updated)
    for message in messages:
        view.message(message)
        run.setup.log.append({"kind": "event", "step": run.state.step, "message": message})


def _refuse_early_stopped(run: building.Run) -> None:
    """Raise for more steps after early stopping: the run would stop again immediately."""
    stopping, state = run.setup.early_stopping, run.state
    if stopping is not None and stopping.reached(state.stale):
        raise RecipeError(
            f"early_stopping_patience: {stopping.patience} ended the run at step {state.step}, and more steps "
            "would end there too",
            "set early_stopping_patience=null as well, or a larger one",
        )


def _planned_steps(saved: Choices, opened: corpora.Corpora) -> tuple[PlannedSteps, ...]:
    """The planned numbers of steps of a run that is resumed."""
    if saved.planned_steps:
        return saved.planned_steps
    planned = total_steps(saved.recipe, opened.facts, Mesh.world().size)
    assert planned is not None, "a streamed recipe without max_steps does not validate"
    return (PlannedSteps(0, planned),)


def _add_stop_tokens(
    example: dict[str, Any], tokenizer: Tokenizer, folder: RunFolder, view: View
) -> Tokenizer:
    """The tokenizer, with the tokens that end trained answers as stop tokens; tells the user about them."""
    if not example["ends"] and example["cut"]:
        view.message(
            "this example is truncated before its answer ends: generation stops at the base model's stop tokens only; "
            "raise max_seq_length so that examples are not truncated"
        )
    elif not example["ends"]:
        view.message(
            f"answers in {example['source']} end with no special token: a model trained on them does not learn to "
            "stop; let the chat template write {{ eos_token }} or a similar token after them"
        )
    new = [end for end in example["ends"] if end not in tokenizer.stop_ids]
    if new:
        names = " and ".join(str(tokenizer.backend.id_to_token(end)) for end in new)
        view.message(f"answers end with {names}: added to the stop tokens of generation")
    return models.add_stop_tokens(folder.model, tokenizer, new)


def _write_config_and_tokenizer(prepared: Prepared, folder: RunFolder, view: View) -> str | None:
    """Write config and tokenizer into the run folder, which this and every later start reads.

    Returns the commit of the tokenizer.
    """
    tokenizer, commit = tokenizer_of(prepared.recipe, prepared.model, prepared.commit)
    text.check_vocabulary(tokenizer, prepared.shape.vocab_size)
    models.save_config_and_tokenizer(
        prepared.model, prepared.shape, tokenizer, folder.model, prepared.resolved.precision.weights_dtype
    )
    note = note_untrained_head(prepared)
    if note is not None:
        view.message(note)
    return commit
