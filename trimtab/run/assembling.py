"""A recipe and its choices become a run: model, data, optimizer, loop, in one visible order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from trimtab import optim
from trimtab.adapt import (
    Regions,
    add_adapters,
    compile_regions,
    init_adapters,
    keep_unpacked,
    recompute,
    trained_parameters,
)
from trimtab.adapt.held import Held
from trimtab.adapt.lora import set_masks
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.adapt.peft_files import fill_adapter
from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.adapt.tokens import fill_grown
from trimtab.checkpoint import Found, Store
from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.model import Decoder, build, check_weights, init_weights, load_weights, read_shape
from trimtab.model.building import torch_dtype
from trimtab.parallel import Mesh
from trimtab.recipe import Recipe
from trimtab.run.adapters import check_adapter_base, settings_of
from trimtab.run.choices import Choices
from trimtab.run.corpora import Corpora
from trimtab.run.evaluation import ANSWERS_SEED, Evaluation
from trimtab.run.folder import RunFolder
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.precision import autocast_of, set_gradient_format
from trimtab.run.quantizing import lay_out
from trimtab.starter import FIELDS, math_problems, probe_items
from trimtab.text import Tokenizer
from trimtab.trainer import Cadence, Job, MetricsLog, NoLog, Outcome, TrainState, train
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
    """
    device = torch.device(choices.device)
    _set_up_torch(choices)
    store = Store(folder.checkpoints, keep_last=recipe.save_total_limit, on_event=on_event, base=base)
    found = _checkpoint(store, folder) if resume else None
    decoder = _model(recipe, choices, shape, weights, fresh=found is None)
    _unpack(decoder, choices)
    parameters = trained_parameters(decoder)
    mesh = Mesh.world()
    optimizer = _optimizer(recipe, choices, parameters)
    total_steps = corpora.total_steps(mesh)
    autocast = autocast_of(choices)
    loss = MicrobatchLoss(decoder, device, autocast, packing=recipe.packing)
    evaluation = _evaluation(recipe, decoder, tokenizer, corpora, total_steps, autocast)
    job = Job(
        model=decoder,
        parameters=parameters,
        loss=loss,
        optimizer=optimizer,
        in_backward=_in_backward(recipe, choices, optimizer, mesh),
        learning_rate=_learning_rate(recipe, total_steps),
        global_norm=optim.global_norm,
        clip_factor=lambda norm: optim.clip_factor(norm, recipe.max_grad_norm),
        loader=corpora.loader(mesh),
        store=store,
        log=MetricsLog(folder.metrics) if mesh.is_main else NoLog(),
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
        loss_scale=FIRST_LOSS_SCALE if choices.dtype == "fp16" else None,
        observers=observers,
        compiled=Regions(decoder) if decoder.regions is not None else None,
        graphs=recorded(choices, loss, parameters, on_event),
        before_microbatch=_masks(recipe, decoder, device, mesh),
    )
    run = Run(job, TrainState(), None, folder)
    if resume:
        _restore(run, store, found, on_event)
    return run


def _model(recipe: Recipe, choices: Choices, shape: ModelShape, weights: Any, *, fresh: bool) -> Decoder:
    """On the meta device shape, quantized layout, adapters, recompute, compile; then weights and gradients' format.

    No step changes a parameter's name. A checkpoint (not `fresh`) brings what is trained; frozen weights are always
    read from where they come from.
    """
    settings = settings_of(choices)
    read_weights = fresh or settings is not None
    stored = shape
    if read_weights and recipe.model.init != "random":
        stored = read_shape(weights)  # of fewer tokens, where some were added
        check_weights(stored, weights)
    decoder = build(
        shape,
        dtype=choices.weights_dtype,
        device="meta",
        attention=choices.attention["impl"],
        whole=choices.attention.get("whole"),
        loss_impl=choices.loss.get("impl", "chunked"),
        loss_memory=choices.memory["loss_memory"],
        pointwise=choices.pointwise.get("impl", "reference"),
    )
    lay_out(
        decoder,
        choices.quantization,
        None if recipe.model.init == "random" else weights,
        choices.device,
    )
    if settings is not None:
        add_adapters(decoder, settings)
    recompute.apply(decoder, choices.memory["recompute"], mlp_tiles=choices.memory["mlp_tiles"])
    if choices.compile.get("on"):
        compile_regions(decoder, dynamic=choices.compile["dynamic"])
    decoder.to_empty(device=choices.device)
    if read_weights and recipe.model.init == "random":
        init_weights(decoder, recipe.seed)
    elif read_weights:
        fill_grown(decoder, stored, lambda: load_weights(decoder, weights))
    if settings is not None and fresh:
        _fill_adapters(recipe, decoder, weights)
    set_gradient_format(decoder, choices)
    return decoder


def _unpack(decoder: Decoder, choices: Choices) -> None:
    """Copies of packed weights, once all is loaded and before a step could be the one that takes the memory."""
    layers = choices.memory.get("unpacked_layers", 0)  # none in runs made before there was a choice
    keep_unpacked(decoder, layers, dtype=torch_dtype(choices.dtype))


def _fill_adapters(recipe: Recipe, decoder: Decoder, weights: Any) -> None:
    """The numbers that adapters start from: fresh ones, or those of the adapter that the recipe names."""
    assert recipe.lora is not None
    if recipe.lora.adapter is None:
        init_adapters(decoder, recipe.seed)
        return
    found = read_adapter_folder(recipe.lora.adapter)
    if recipe.model.init != "random":
        check_adapter_base(found.base, weights, found.folder)
    fill_adapter(decoder, found, switchable=False)


def _masks(
    recipe: Recipe, decoder: Decoder, device: torch.device, mesh: Mesh
) -> Callable[[int, int], None] | None:
    """Writes the keys of the adapters' dropout masks before each microbatch; None where nothing is dropped."""
    masks = set_masks(decoder, device)
    if masks is None:
        return None
    return lambda step, microbatch: masks.set(recipe.seed, step, microbatch, mesh.rank)


def _in_backward(recipe: Recipe, choices: Choices, optimizer: Any, mesh: Mesh) -> Any:
    if not recipe.optim_in_backward:
        return None
    if mesh.size > 1 or choices.dtype == "fp16":
        raise RecipeError(
            "optim_in_backward: true works in one process and without loss scaling: every process's gradients have "
            "to be added up before they are used",
            "set optim_in_backward: false",
        )
    return optim.InBackward(optimizer)


def _optimizer(recipe: Recipe, choices: Choices, parameters: dict[str, torch.nn.Parameter]) -> Any:
    return optim.build(
        recipe.optim,
        parameters.items(),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
        decay_all=recipe.decay_all,
        seed=recipe.seed,
        impl=choices.optimizer.get("impl", "reference"),
        lr_scales=_rates(recipe, parameters),
    )


def _rates(recipe: Recipe, parameters: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    """Embeddings and head, where the recipe gives them a learning rate of their own, as shares of the others'."""
    own = recipe.embedding_learning_rate
    if own is None:
        return {}
    return {
        name: own / recipe.learning_rate
        for name in parameters
        if name.startswith((f"{EMBEDDING}.", f"{HEAD}."))
    }


def _learning_rate(recipe: Recipe, total_steps: int) -> Callable[[int], float]:
    warmup = recipe.warmup_steps or round(recipe.warmup_ratio * total_steps)

    def learning_rate(step: int) -> float:
        return optim.learning_rate(
            recipe.lr_scheduler_type,
            step,
            base=recipe.learning_rate,
            total_steps=total_steps,
            warmup_steps=warmup,
            min_ratio=recipe.min_lr_ratio,
        )

    return learning_rate


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


def _set_up_torch(choices: Choices) -> None:
    torch.set_num_threads(choices.threads)
    if choices.device == "cuda" and choices.deterministic:
        # cuBLAS repeats its sums only with workspaces of a fixed size, and reads them when it first runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A debugging aid that costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # Never switched off here: it may be the wish of whoever called us.
        torch.use_deterministic_algorithms(True)
    if choices.device == "cuda" and sys.platform == "linux" and not _own_allocator_settings():
        # Without it, memory in pieces between tensors is lost to the step: tenths of a GiB of a few.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    cap = choices.memory["allocator_bytes"]
    if choices.device == "cuda" and cap is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(max(cap / total, 0.0), 1.0))


def _own_allocator_settings() -> bool:
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


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


def _checkpoint(store: Store, folder: RunFolder) -> Found | None:
    """The last good checkpoint; None where none was ever published, so that the run begins again at its start."""
    found = store.latest()
    if found is None and any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(
            f"every checkpoint in {folder.checkpoints} is damaged",
            "restore one from a copy, or start the recipe anew",
        )
    return found


def _restore(run: Run, store: Store, found: Found | None, on_event: Callable[[str], None]) -> None:
    """Fills a run from a checkpoint and cuts its log back to it."""
    job = run.job
    assert isinstance(job.log, MetricsLog | NoLog)
    if found is None:
        job.log.cut_back(-1)
        on_event("no checkpoint was saved yet: beginning again at step 0")
        return
    scalars = store.load(found, job.tensors())
    run.state = TrainState(**scalars["state"])
    run.scaler = LossScaler(**scalars["scaler"]) if scalars["scaler"] else None
    job.optimizer.restore_scalars(scalars["optimizer"])
    job.loader.restore(scalars["loader"])
    job.log.cut_back(found.step)
    if job.mesh.is_main and run.folder.metrics.stat().st_size == 0:
        on_event(
            f"{run.folder.metrics} is missing or empty: of the steps up to {found.step} nothing will be in the report"
        )
    on_event(f"continuing from step {found.step}")
