"""A recipe and its choices become a run: model, data, optimizer, loop, in one visible order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch

from trimtab import optim
from trimtab.adapt import Regions, trained_parameters
from trimtab.adapt.held import Held
from trimtab.adapt.lora import set_masks
from trimtab.checkpoint import Found, Store
from trimtab.checkpoint.folder import step_name
from trimtab.facts.errors import TrimtabError
from trimtab.facts.shapes import ModelShape
from trimtab.model import Decoder
from trimtab.parallel import Mesh
from trimtab.recipe import Recipe
from trimtab.run.choices import Choices
from trimtab.run.corpora import Corpora
from trimtab.run.decoders import load_decoder, unpack
from trimtab.run.evaluation import ANSWERS_SEED, Evaluation
from trimtab.run.folder import RunFolder
from trimtab.run.lengths import Length, check_length, extend, learning_rate
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.precision import autocast_of
from trimtab.run.restoring import SAVED, cut_log, find_checkpoint
from trimtab.run.torch_setup import set_up_torch
from trimtab.run.updates import make_in_backward, make_optimizer
from trimtab.starter import FIELDS, math_problems, probe_items
from trimtab.text import Tokenizer
from trimtab.trainer import Cadence, Job, MetricsLog, NoLog, Outcome, TrainState, train
from trimtab.trainer.callbacks import Callbacks, Control
from trimtab.trainer.early_stopping import EarlyStopping
from trimtab.trainer.graphs import Graphs
from trimtab.trainer.job import Observer
from trimtab.trainer.scaling import LossScaler

FIRST_LOSS_SCALE = 65536.0
"""fp16 begins here, as torch's own scaler does; overflows halve it."""


@dataclass
class Run:
    """A run that is ready to go: `run.train()`."""

    job: Job
    state: TrainState
    scaler: LossScaler | None
    folder: RunFolder
    lengths: tuple[Length, ...]
    """How many steps it has, and had before a resume changed that."""

    def train(self) -> Outcome:
        """From where it stands to its end; then everything it held open is closed."""
        job = self.job
        with closing(job.loader), closing(job.log), closing(job.store):
            return train(job, self.state, self.scaler)


def assemble(
    recipe: Recipe,
    choices: Choices,
    shape: ModelShape,
    *,
    weights: Any,
    tokenizer: Tokenizer,
    corpora: Corpora,
    folder: RunFolder,
    observers: Sequence[Observer] = (),
    on_event: Callable[[str], None] = print,
    resume: bool = False,
    base: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    lengths: Sequence[Length] = (),
) -> Run:
    """Puts a run together.

    Args:
        recipe: what was asked for.
        choices: what `auto` was decided to be.
        shape: the model's shape.
        weights: the folder or GGUF file with the pretrained weights.
        tokenizer: the model's.
        corpora: the opened data.
        folder: the run folder; with `resume` its last good checkpoint is loaded.
        observers: who is told about metrics.
        on_event: told one-line messages.
        resume: continue instead of starting.
        base: where the frozen weights come from, for a run that trains adapters (`adapters.name_base`).
        callbacks: the user's own (`trainer.callbacks`).
        lengths: how many steps the run was planned for so far; none for a new run.
    """
    device = torch.device(choices.device)
    set_up_torch(choices)

    def published(step: int) -> None:
        with suppress(TrimtabError):  # a log that cannot be written is met, and said, by the loop
            log.append({"kind": SAVED, "step": step})

    store = Store(
        folder.checkpoints,
        keep_last=recipe.save_total_limit,
        on_event=on_event,
        on_published=published,
        base=base,
    )
    found = find_checkpoint(store, folder, recipe) if resume else None
    if found is not None:
        check_length(recipe, found.step, corpora.total_steps(Mesh.world()))
    decoder = load_decoder(recipe, choices, shape, weights, fresh=found is None)
    unpack(decoder, choices)
    parameters = trained_parameters(decoder)
    mesh = Mesh.world()
    log = MetricsLog(folder.metrics) if mesh.is_main else NoLog()
    optimizer = make_optimizer(recipe, choices, parameters)
    total_steps = corpora.total_steps(mesh)
    now = extend(lengths, found.step if found else 0, total_steps)
    autocast = autocast_of(choices)
    loss = MicrobatchLoss(
        decoder,
        device,
        autocast,
        packing=recipe.packing,
        label_smoothing=choices.loss.get("label_smoothing", 0.0),
        z_loss=choices.loss.get("z_loss", 0.0),
    )
    evaluation = _evaluation(recipe, decoder, tokenizer, corpora, total_steps, autocast)
    job = Job(
        model=decoder,
        parameters=parameters,
        loss=loss,
        optimizer=optimizer,
        in_backward=make_in_backward(recipe, choices, optimizer, mesh),
        learning_rate=learning_rate(recipe, now),
        global_norm=optim.global_norm,
        clip_factor=lambda norm: optim.clip_factor(norm, recipe.max_grad_norm),
        loader=corpora.loader(mesh),
        store=store,
        log=log,
        mesh=mesh,
        cadence=Cadence(
            total_steps,
            recipe.logging_steps,
            recipe.eval_steps or 0,
            recipe.save_steps or 0,
            recipe.eval_on_start,
        ),
        device=device,
        evaluate=evaluation,
        best_of=next(iter(evaluation.sets), None),
        evaluate_end=evaluation.at_end,
        early_stopping=_early_stopping(recipe),
        loss_scale=FIRST_LOSS_SCALE if choices.dtype == "fp16" else None,
        observers=observers,
        compiled=Regions(decoder) if decoder.regions is not None else None,
        graphs=recorded(choices, loss, parameters, on_event),
        before_microbatch=_masks(recipe, decoder, device, mesh),
        callbacks=_callbacks(callbacks, folder, total_steps),
    )
    run = Run(job, TrainState(), None, folder, now)
    if resume:
        _restore(run, store, found, on_event)
    return run


def _early_stopping(recipe: Recipe) -> EarlyStopping | None:
    if recipe.early_stopping_patience is None:
        return None
    return EarlyStopping(recipe.early_stopping_patience, recipe.early_stopping_threshold)


def _callbacks(callbacks: Sequence[Any], folder: RunFolder, total_steps: int) -> Callbacks | None:
    if not callbacks:
        return None
    control = Control(folder.path, total_steps)
    return Callbacks(callbacks, control, lambda step: folder.checkpoints / step_name(step))


def _masks(
    recipe: Recipe, decoder: Decoder, device: torch.device, mesh: Mesh
) -> Callable[[int, int], None] | None:
    """Writes the keys of the adapters' dropout masks before each microbatch; None where nothing is dropped."""
    masks = set_masks(decoder, device)
    if masks is None:
        return None
    return lambda step, microbatch: masks.set(recipe.seed, step, microbatch, mesh.rank)


def _evaluation(
    recipe: Recipe,
    decoder: Decoder,
    tokenizer: Tokenizer,
    corpora: Corpora,
    total_steps: int,
    autocast: Callable[[], Any],
) -> Evaluation:
    problems = (
        math_problems(ANSWERS_SEED, recipe.answers, FIELDS[recipe.answers_field]) if recipe.answers else ()
    )
    return Evaluation(
        decoder,
        tokenizer,
        total_steps,
        sets=corpora.eval_batches(),
        probe_items=probe_items() if recipe.probe else (),
        problems=problems,
        prompts=recipe.prompts,
        autocast=autocast,
    )


def trackers(recipe: Recipe, folder: RunFolder, config: dict[str, Any]) -> list[Observer]:
    """The tools that `report_to` names, ready to be told metrics."""
    from trimtab.trainer.tracking import TensorBoardSink, WandbSink

    found: list[Observer] = []
    if "tensorboard" in recipe.report_to:
        found.append(TensorBoardSink(folder.path / "tensorboard"))
    if "wandb" in recipe.report_to:
        found.append(WandbSink(folder.path, folder.path.name, config))
    return found


def recorded(
    choices: Choices,
    loss: MicrobatchLoss,
    parameters: dict[str, torch.nn.Parameter],
    on_event: Callable[[str], None] = print,
) -> Graphs | None:
    """Forward and backward as CUDA graphs where that was chosen, in one process; None elsewhere."""
    if not choices.graphs.get("on"):
        return None
    if Mesh.world().size > 1:
        on_event("steps are not recorded as CUDA graphs: there are several processes")
        return None
    return Graphs(loss, parameters, loss.device, held=Held(loss.decoder), on_event=on_event)


def _restore(run: Run, store: Store, found: Found | None, on_event: Callable[[str], None]) -> None:
    """Fills a run from a checkpoint and cuts its log back to it."""
    job = run.job
    assert isinstance(job.log, MetricsLog | NoLog)
    if found is None:
        job.log.cut_back(-1)
        on_event("no checkpoint was saved yet: beginning again at step 0")
        return
    scalars = store.load(found, job.tensors())
    run.state = TrainState(**{"measured": found.step, **scalars["state"]})  # older checkpoints do not say
    run.scaler = LossScaler(**scalars["scaler"]) if scalars["scaler"] else None
    job.optimizer.restore_scalars(scalars["optimizer"])
    job.loader.restore(scalars["loader"])
    cut_log(job.log, found, run.folder, on_event)
    on_event(f"continuing from step {found.step}")
