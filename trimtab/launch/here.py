"""A run in this process: prepare, plan, refuse or go, and continue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab import text
from trimtab.data.memory import Passed
from trimtab.facts.errors import CheckpointError
from trimtab.launch.device import current_gpu, need_trackers
from trimtab.launch.preparing import Frozen, Prepared, prepare, unwritten_tokens
from trimtab.plan import check_disk, check_fits, make_plan
from trimtab.plan.disk import Disk
from trimtab.recipe import Recipe, build, check_resume, dump, load, to_dict
from trimtab.run import adapters, assembling, corpora, sources
from trimtab.run.choices import Choices
from trimtab.run.environment import environment
from trimtab.run.folder import RunFolder, read_json, write_json, write_text
from trimtab.run.places import absolute, model_folder, shape_of, tokenizer_of
from trimtab.run.sources import OpenedModel
from trimtab.run.starting import check_start, start_from
from trimtab.run.torch_setup import torch_put_back
from trimtab.text import Tokenizer

VERSION = 1
"""Of choices.json; readers of old versions stay."""
MEMORY_KEYS = ("memory_limit", "recompute", "gradient_checkpointing", "unpacked_layers")
"""A resume that changes one of these chooses anew what layers keep."""


class View(Protocol):
    """Whoever watches a run: `report.LiveView`, or a test."""

    total_steps: int
    logging_steps: int

    def plan(self, plan: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def working(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Given:
    """What only a Python program can give a run."""

    rows: Mapping[str, Passed] = field(default_factory=dict)
    """Rows in memory, by the names of their sources (`data.memory`)."""
    callbacks: Sequence[Any] = ()
    """The user's own (`trainer.callbacks`)."""
    model: OpenedModel | None = None
    """A loaded model to begin from."""


@dataclass(frozen=True)
class Finished:
    """How a run ended and where it lies."""

    folder: Path
    status: str
    step: int
    signal: int | None = None
    reason: str | None = None
    """Why it finished before its last step (early stopping); None if it did not."""


def train(
    recipe: Recipe,
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    given: Given | None = None,
) -> Finished:
    """A new run of a recipe, from plan to the last checkpoint.

    Example:
        >>> train(load("recipe.yaml"), LiveView())  # doctest: +SKIP
        Finished(folder=PosixPath('runs/train'), status='finished', step=100, signal=None)
    """
    recipe = absolute(recipe)
    if _wants_equal_bits():
        recipe = recipe.model_copy(update={"deterministic": True})  # as whoever called us wants it
    folder = RunFolder(Path(recipe.output_dir))
    folder.check_new()
    need_trackers(recipe.report_to)
    if given is not None and given.model is not None:
        check_start(recipe, given.model)
        with folder.create(), current_gpu(recipe.device), torch_put_back():
            recipe = absolute(start_from(recipe, given.model, folder.path, view.message))
            prepared = prepare(recipe)
            check_fits(prepared.plan, prepared.device)
            return _go(prepared, folder, view, kept=None, after_step=after_step, given=given)
    prepared = prepare(recipe)
    check_fits(prepared.plan, prepared.device)
    with folder.create(), current_gpu(recipe.device), torch_put_back():
        return _go(prepared, folder, view, kept=None, after_step=after_step, given=given or Given())


def _wants_equal_bits() -> bool:
    """Whether this process has asked torch for that, and not for warnings only."""
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warned


def resume(
    path: Path,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
    given: Given | None = None,
) -> Finished:
    """Continues a run folder from its last good checkpoint, with the choices it began with."""
    folder = RunFolder(path)
    folder.open()
    with folder.lock(), ExitStack() as around:
        kept = _kept(folder)
        recipe = load(folder.recipe, overrides)
        before = build(kept["recipe"])
        check_resume(before, recipe, device=kept["device"])
        around.enter_context(current_gpu(recipe.device))
        around.enter_context(torch_put_back())
        need_trackers(recipe.report_to)
        _tell_threads(kept["threads"], recipe, view)
        if kept["deterministic"] is False and kept["device"] == "cuda":
            view.message(
                "deterministic is off: on a GPU losses may differ in the last bits from an unstopped run"
            )
        changed = any(getattr(before, key) != getattr(recipe, key) for key in MEMORY_KEYS)
        frozen = Frozen(Choices.from_dict(kept), folder.model, kept["model_commit"], changed)
        prepared = prepare(recipe, frozen)
        if changed:
            check_fits(prepared.plan, prepared.device, resumed=True)
        return _go(prepared, folder, view, kept=kept, after_step=after_step, given=given or Given())


def _tell_threads(began: int, recipe: Recipe, view: View) -> None:
    """What a resumed run's number of CPU threads means for its bits and its speed."""
    if recipe.num_threads not in (None, began):
        view.message(
            f"the run began with {began} CPU thread{'s' if began != 1 else ''} and continues with "
            f"num_threads: {recipe.num_threads}: sums may be added up in another order, so losses may differ in the "
            "last bits from an uninterrupted run"
        )
    elif began > (os.cpu_count() or 1):
        view.message(
            f"the run began with {began} threads and this machine has {os.cpu_count()} cores: "
            "sums are added in the same order all the same, only slower"
        )


def _kept(folder: RunFolder) -> dict[str, Any]:
    """choices.json, complete."""
    kept = read_json(folder.choices)
    if kept.get("version", 0) > VERSION:
        raise CheckpointError(f"{folder.path} is of a newer trimtab", "continue it with that version")
    fields = ("model_commit", "tokenizer_commit", "data", "recipe", *Choices.needed())
    missing = [name for name in fields if name not in kept]
    if missing:
        raise CheckpointError(
            f"{folder.choices} lacks {', '.join(missing)}", "restore it or start the run anew"
        )
    return kept


def _go(
    prepared: Prepared,
    folder: RunFolder,
    view: View,
    *,
    kept: dict[str, Any] | None,
    after_step: Callable[[int], None] | None,
    given: Given,
) -> Finished:
    recipe, choices, shape = prepared.recipe, prepared.choices, prepared.shape
    tokenizer_commit = None
    if kept is None:
        tokenizer_commit = _begin(prepared, folder)
        unwritten = unwritten_tokens(prepared)
        if unwritten is not None:
            view.message(unwritten)
    tokenizer = sources.load_tokenizer(folder.model, shape)
    opened = corpora.open_corpora(recipe, tokenizer, view, kept=kept and kept["data"], passed=given.rows)
    plan = make_plan(recipe, shape, device=prepared.device, data=opened.facts, choices=choices.to_dict())
    free = shutil.disk_usage(folder.path).free
    if kept is None:
        check_disk(plan.disk, free, str(folder.path))
    else:
        # What it has saved stands there already: room for the next one is enough.
        check_disk(Disk(plan.disk.checkpoint_bytes, plan.disk.checkpoint_bytes), free, str(folder.path))
    view.plan(plan.to_dict())
    for note in (*plan.notes, *opened.notes()):
        view.message(note)
    weights = _weights(prepared, folder)
    base = _base(prepared, weights, kept)
    example = opened.example(tokenizer)
    if example is not None:
        view.record(example)
        tokenizer = _stopping(example, tokenizer, folder, view)
    run = assembling.assemble(
        recipe,
        choices,
        shape,
        weights=weights,
        tokenizer=tokenizer,
        corpora=opened,
        folder=folder,
        observers=[view, *assembling.trackers(recipe, folder, to_dict(recipe))],
        on_event=view.message,
        resume=kept is not None,
        base=base,
        callbacks=given.callbacks,
    )
    write_text(folder.recipe, dump(recipe))
    write_json(folder.plan, plan.to_dict())
    if kept is None:
        write_json(folder.environment, environment(torch.device(choices.device)))
        # Last, when weights and data are known to be good: a folder with choices.json can be continued.
        pins = {
            "version": VERSION,
            "model_commit": prepared.commit,
            "tokenizer_commit": tokenizer_commit,
            "data": opened.pins(),
            "recipe": to_dict(recipe),
            "base": base,
        }
        write_json(folder.choices, {**choices.to_dict(), **pins})
    if example is not None and run.state.step == 0:
        run.job.log.append(example)
    run.job.after_step = after_step
    view.total_steps = run.job.cadence.total_steps
    view.logging_steps = run.job.cadence.logging_steps
    outcome = run.train()
    return Finished(folder.path, outcome.status, outcome.state.step, outcome.signal, outcome.reason)


def _stopping(example: dict[str, Any], tokenizer: Tokenizer, folder: RunFolder, view: View) -> Tokenizer:
    """The tokenizer that stops where trained answers end, and what a person should know of that."""
    if not example["ends"] and example["cut"]:
        view.message(
            "where answers end is not in this example, which is cut: the model's writing stops where its base's does; "
            "raise max_seq_length for examples to be whole"
        )
    elif not example["ends"]:
        view.message(
            f"answers in {example['source']} end with no special token: a model trained on them does not learn to "
            "stop; let the chat template write {{ eos_token }} or the like after them"
        )
    new = [end for end in example["ends"] if end not in tokenizer.stop_ids]
    if new:
        words = " and ".join(str(tokenizer.backend.id_to_token(end)) for end in new)
        view.message(f"answers end with {words}: the model's writing stops there too")
    return sources.keep_stops(folder.model, tokenizer, new)


def _begin(prepared: Prepared, folder: RunFolder) -> str | None:
    """Config and tokenizer into the run folder, from which this start and every later one reads them."""
    tokenizer, commit = tokenizer_of(prepared.recipe, prepared.model, prepared.commit)
    text.check_fits(tokenizer, prepared.shape.vocab_size)
    sources.save_skeleton(
        prepared.model, prepared.shape, tokenizer, folder.model, prepared.choices.weights_dtype
    )
    return commit


def _base(prepared: Prepared, weights: Path, kept: dict[str, Any] | None) -> dict[str, Any] | None:
    """The frozen weights of a run with adapters by name and checksum; a resumed run must find the same ones."""
    if prepared.choices.lora is None:
        return None
    if kept is None:
        return adapters.name_base(prepared.recipe, weights, prepared.commit)
    adapters.check_base(kept["base"], weights)
    return dict(kept["base"])


def _weights(prepared: Prepared, folder: RunFolder) -> Path:
    """Where the pretrained weights lie, fetched now if this start reads them."""
    recipe = prepared.recipe
    saved = prepared.choices.lora is None and any(folder.checkpoints.glob("step-*"))
    if recipe.model.init == "random" or saved:
        return prepared.model
    place, _ = model_folder(recipe.model.name, revision=prepared.commit)
    if shape_of(recipe, place) != prepared.shape:
        raise CheckpointError(
            f"the model at {recipe.model.name} is not the one the run began with",
            "put it back, or start a new run",
        )
    return place
