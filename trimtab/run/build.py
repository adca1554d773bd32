"""Builds a run from its recipe and resolved configuration, in one visible order.

The model is built on the meta device; no step changes a parameter's name:

    shape → quantized layers → adapters → recompute → compile

Then memory is allocated and weights are loaded (or come from a checkpoint); optimizer, data and loop follow. Training,
evaluation, generation, export and benchmarks build models with `build_model`, and microbatches with `build_microstep`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab import optim
from trimtab.adapt import (
    Regions,
    add_adapters,
    compile_regions,
    init_adapters,
    recompute,
    set_dequantized_copies,
    trained_parameters,
    workspace,
)
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.adapt.peft_files import copy_adapter_tensors
from trimtab.adapt.step_resources import StepResources
from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.adapt.tokens import load_with_new_tokens
from trimtab.checkpoint import SavedCheckpoint, Store
from trimtab.checkpoint.layout import step_name
from trimtab.data import Batch
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import RecipeError, TrimtabError
from trimtab.facts.phases import During, no_phase
from trimtab.facts.shapes import ModelShape
from trimtab.model import Decoder, build, check_weights, init_weights, load_weights, read_shape
from trimtab.model.building import torch_dtype
from trimtab.model.parts import LayerKernels
from trimtab.parallel import Mesh
from trimtab.plan.resolved import Resolved
from trimtab.recipe import Recipe
from trimtab.run.base_weights import check_adapter_base
from trimtab.run.choices import PlannedSteps
from trimtab.run.corpora import Corpora
from trimtab.run.evaluation import build_evaluation
from trimtab.run.folder import RunFolder
from trimtab.run.metrics_summary import CHECKPOINT_KIND
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.planned_steps import extend, learning_rate
from trimtab.run.quantizing import quantize_linear_layers
from trimtab.run.resume import truncate_log
from trimtab.run.torch_setup import set_up_torch
from trimtab.text import Tokenizer
from trimtab.trainer import Cadence, MetricsLog, NoLog, Outcome, TrainingSetup, TrainState, train
from trimtab.trainer.callbacks import Callbacks, Control
from trimtab.trainer.early_stopping import EarlyStopping
from trimtab.trainer.gpu_memory import GpuMemory
from trimtab.trainer.graphs import Graphs
from trimtab.trainer.microstep import MicroStep
from trimtab.trainer.scaling import LossScaler
from trimtab.trainer.setup import Observer

FIRST_LOSS_SCALE = 65536.0
"""Initial loss scale for fp16, as in torch's GradScaler; overflows halve it."""


@dataclass
class Run:
    """A run that is ready to train: `run.train()`."""

    setup: TrainingSetup
    state: TrainState
    scaler: LossScaler | None
    folder: RunFolder
    planned_steps: tuple[PlannedSteps, ...]
    """The planned numbers of steps, one entry per resume that changed it."""

    def train(self) -> Outcome:
        """Train from the current state to the end; then close the loader, log and store."""
        setup = self.setup
        with closing(setup.loader), closing(setup.log), closing(setup.store):
            return train(setup, self.state, self.scaler)


@dataclass(frozen=True)
class ResumedState:
    """The state that a run resumes from, in addition to its resolved configuration."""

    checkpoint: SavedCheckpoint | None
    """The checkpoint to resume from (`resume.find_checkpoint`); None restarts at step 0."""
    planned_steps: tuple[PlannedSteps, ...]
    """The planned numbers of steps so far."""
    dropout_by_sequence: bool = True
    """`Choices.dropout_by_sequence`."""


def build_model(
    shape: ModelShape,
    resolved: Resolved,
    mesh: Mesh,
    *,
    layers: range | None = None,
    weights: Path | None = None,
) -> Decoder:
    """Build a model on its device, with uninitialized parameters.

    Args:
        shape: the model's shape.
        resolved: dtypes, backends, quantization, adapters, memory plan.
        mesh: the processes that the run is planned for; each has the complete model.
        layers: build only these layers, between the same embeddings and head; all if None.
        weights: the folder or file that weights will be loaded from; quantized files must match the configuration.

    Example:
        >>> build_model(shape, resolved, Mesh.single(), layers=range(1)).shape.num_layers  # doctest: +SKIP
        1
    """
    assert mesh.size == resolved.parallel.data, "the mesh is not the one that the run was resolved for"
    if layers is not None:
        shape, resolved = shape.of_layers(layers), resolved.of_layers(layers)
    memory, pointwise = resolved.memory, resolved.pointwise.impl
    decoder = build(
        shape,
        dtype=resolved.precision.weights_dtype,
        device="meta",
        kernels=[LayerKernels(a.packed, a.unpacked, pointwise) for a in resolved.attention.layers],
        loss_impl=resolved.loss.impl,
        loss_memory=resolved.loss.memory_bytes if memory is None else memory.loss_memory,
    )
    quantize_linear_layers(decoder, resolved.quantization, weights, resolved.device)
    if resolved.lora is not None:
        add_adapters(decoder, resolved.lora)
    if memory is not None:
        recompute.apply(decoder, memory.recompute, mlp_tiles=memory.mlp_tiles)
    if resolved.compile.enabled:
        compile_regions(decoder, dynamic=resolved.compile.dynamic)
    return decoder.to_empty(device=resolved.device)


def build_training_model(
    recipe: Recipe, resolved: Resolved, shape: ModelShape, mesh: Mesh, weights: Path, *, fresh: bool = True
) -> Decoder:
    """Build the model that a run trains and load its weights.

    Trainable parameters come from a checkpoint unless `fresh`; frozen weights are always loaded from their source.
    """
    random = recipe.model.init == "random"
    read_weights = fresh or resolved.lora is not None
    stored = shape
    if read_weights and not random:
        stored = read_shape(weights)  # with a smaller vocabulary, if the recipe adds tokens
        check_weights(stored, weights)
    decoder = build_model(shape, resolved, mesh, weights=None if random else weights)
    if read_weights and random:
        init_weights(decoder, recipe.seed)
    elif read_weights:
        load_with_new_tokens(decoder, stored, lambda: load_weights(decoder, weights))
    if resolved.lora is not None and fresh:
        _init_adapters(recipe, decoder, weights)
    set_gradient_dtype(decoder, resolved)
    return decoder


def _init_adapters(recipe: Recipe, decoder: Decoder, weights: Path) -> None:
    """Initialize the adapters, or load the adapter that the recipe names."""
    assert recipe.lora is not None
    if recipe.lora.adapter is None:
        init_adapters(decoder, recipe.seed)
        return
    found = read_adapter_folder(recipe.lora.adapter)
    if recipe.model.init != "random":
        check_adapter_base(found.base, weights, found.folder)
    copy_adapter_tensors(decoder, found, switchable=False)


def make_dequantized_copies(decoder: Decoder, resolved: Resolved) -> None:
    """Make the memory plan's dequantized copies; after loading, because they would raise its peak memory."""
    layers = resolved.memory_plan.dequantized_layers
    set_dequantized_copies(decoder, layers, dtype=torch_dtype(resolved.precision.dtype))


def set_gradient_dtype(model: torch.nn.Module, resolved: Resolved) -> None:
    """Accumulate gradients of bf16 weights in fp32, unless `gradient_dtype` is bf16."""
    precision = resolved.precision
    if precision.weights_dtype == "bf16" and precision.gradient_dtype == "fp32":
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32


def autocast_of(resolved: Resolved) -> Callable[[], Any]:
    """Returns a factory of autocast contexts for the run's dtype, or of null contexts if the weights have that dtype.

    Without autocast's weight cache: it would keep the casts of all layers, also of recomputed ones, until the pass
    ends. Only a tiled feed-forward uses a weight more than once.
    """
    precision = resolved.precision
    if precision.dtype == precision.weights_dtype:
        return contextlib.nullcontext
    dtype = torch_dtype(precision.dtype)
    return lambda: torch.autocast(resolved.device, dtype=dtype, cache_enabled=False)


def build_microstep(
    decoder: Decoder,
    parameters: dict[str, torch.nn.Parameter],
    resolved: Resolved,
    mesh: Mesh,
    *,
    packing: bool,
    on_event: Callable[[str], None] = print,
    on_failed_capture: Callable[[str], None] | None = None,
    during: During = no_phase,
) -> MicroStep:
    """Build forward and backward of a microbatch, captured as CUDA graphs if that was resolved.

    Args:
        decoder: the model.
        parameters: the trainable parameters, by name.
        resolved: precision, objective, CUDA graphs.
        mesh: the processes of the run; with several, graphs are not captured.
        packing: whether a sequence may contain several documents.
        on_event: called with one-line messages.
        on_failed_capture: called instead with the message that a capture failed, while steps run.
        during: entered with the current phase (`TrainingSetup.during`).
    """
    loss = MicrobatchLoss(
        decoder,
        torch.device(resolved.device),
        autocast_of(resolved),
        packing=packing,
        label_smoothing=resolved.loss.label_smoothing,
        z_loss=resolved.loss.z_loss,
    )
    graphs = None
    if resolved.graphs.enabled and mesh.size > 1:
        on_event("CUDA graphs are not captured: the run has several processes")
    elif resolved.graphs.enabled:
        graphs = Graphs(
            loss,
            parameters,
            loss.device,
            resources=StepResources(decoder),
            on_event=on_failed_capture or on_event,
            during=during,
        )
    limited = resolved.memory is not None and resolved.memory.allocator_bytes is not None
    return MicroStep(loss, graphs, prepare=GpuMemory(loss.device, limited=limited), during=during)


def build_optimizer(recipe: Recipe, resolved: Resolved, parameters: dict[str, torch.nn.Parameter]) -> Any:
    """Build the optimizer of the trainable parameters."""
    return optim.build(
        resolved.optimizer.name,
        parameters.items(),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
        decay_all=recipe.decay_all,
        seed=recipe.seed,
        impl=resolved.optimizer.impl,
        lr_scales=_learning_rate_scales(recipe, parameters),
    )


def _learning_rate_scales(recipe: Recipe, parameters: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    """`embedding_learning_rate` as a factor of `learning_rate`, by parameter."""
    own = recipe.embedding_learning_rate
    if own is None:
        return {}
    own_rate = (f"{EMBEDDING}.", f"{HEAD}.")
    return {name: own / recipe.learning_rate for name in parameters if name.startswith(own_rate)}


def build_in_backward_optimizer(recipe: Recipe, resolved: Resolved, optimizer: Any, mesh: Mesh) -> Any:
    """Build the optimizer that updates inside the backward pass, if the recipe requests it; otherwise None."""
    if not recipe.optim_in_backward:
        return None
    if mesh.size > 1 or resolved.precision.dtype == "fp16":
        raise RecipeError(
            "optim_in_backward: true requires one process and no loss scaling (fp16): parameters are updated before "
            "gradients can be summed over processes or checked for overflow",
            "set optim_in_backward: false",
        )
    return optim.OptimizerInBackward(optimizer)


def build_run(
    recipe: Recipe,
    resolved: Resolved,
    shape: ModelShape,
    mesh: Mesh,
    *,
    weights: Path,
    tokenizer: Tokenizer,
    corpora: Corpora,
    folder: RunFolder,
    observers: Sequence[Observer] = (),
    on_event: Callable[[str], None] = print,
    resumed: ResumedState | None = None,
    base: BaseWeights | None = None,
    callbacks: Sequence[Any] = (),
    during: During = no_phase,
) -> Run:
    """Build a run that is ready to train.

    Args:
        recipe: the recipe.
        resolved: the resolved configuration.
        shape: the model's shape.
        mesh: the processes of the run.
        weights: the folder or GGUF file with the pretrained weights.
        tokenizer: the model's tokenizer.
        corpora: the opened data.
        folder: the run folder.
        observers: called with each metrics record.
        on_event: called with one-line messages.
        resumed: the state that the run resumes from; None for a new run.
        base: source of the frozen weights of a run that trains adapters (`base_weights.identify_base`).
        callbacks: the user's callbacks (`trainer.callbacks`).
        during: called with each phase; the context manager that it returns explains out-of-memory errors raised inside.
    """
    device = torch.device(resolved.device)
    set_up_torch(resolved)
    workspace.release()  # that of an earlier run in this process
    fresh = resumed is None or resumed.checkpoint is None
    by_sequence = resumed is None or resumed.dropout_by_sequence
    decoder = build_training_model(recipe, resolved, shape, mesh, weights, fresh=fresh)
    make_dequantized_copies(decoder, resolved)
    parameters = trained_parameters(decoder)
    log = MetricsLog(folder.metrics) if mesh.is_main else NoLog()
    store = _store(recipe, folder, log, base, on_event)
    optimizer = build_optimizer(recipe, resolved, parameters)
    total_steps = corpora.total_steps(mesh)
    planned_steps = _planned_steps(resumed, total_steps)

    def report_failed_capture(message: str) -> None:
        on_event(message)
        log.append({"kind": "event", "step": run.state.step, "message": message})

    microstep = build_microstep(
        decoder,
        parameters,
        resolved,
        mesh,
        packing=recipe.packing,
        on_event=on_event,
        on_failed_capture=report_failed_capture,
        during=during,
    )
    evaluation = build_evaluation(
        recipe,
        decoder,
        tokenizer,
        total_steps,
        sets=corpora.eval_batches(),
        autocast=autocast_of(resolved),
        during=during,
    )
    setup = TrainingSetup(
        model=decoder,
        parameters=parameters,
        microstep=microstep,
        optimizer=optimizer,
        in_backward=build_in_backward_optimizer(recipe, resolved, optimizer, mesh),
        learning_rate=learning_rate(recipe, planned_steps),
        global_norm=optim.global_norm,
        clip_factor=lambda norm: optim.clip_factor(norm, recipe.max_grad_norm),
        loader=corpora.loader(mesh),
        store=store,
        log=log,
        mesh=mesh,
        cadence=_cadence(recipe, total_steps),
        device=device,
        evaluate=evaluation,
        best_of=next(iter(evaluation.sets), None),
        evaluate_end=evaluation.at_end,
        early_stopping=_early_stopping(recipe),
        loss_scale=FIRST_LOSS_SCALE if resolved.precision.dtype == "fp16" else None,
        observers=observers,
        compiled=Regions(decoder) if decoder.regions is not None else None,
        before_microbatch=_dropout_masks(recipe, decoder, device, mesh, by_sequence=by_sequence),
        callbacks=_callbacks(callbacks, folder, total_steps),
        workspace_bytes=partial(workspace.allocated_bytes, device),
        during=during,
    )
    run = Run(setup, TrainState(), None, folder, planned_steps)
    if resumed is not None:
        _restore(run, store, resumed.checkpoint, on_event)
    return run


def _store(
    recipe: Recipe,
    folder: RunFolder,
    log: MetricsLog | NoLog,
    base: BaseWeights | None,
    on_event: Callable[[str], None],
) -> Store:
    """The checkpoints of a run, each of which is also recorded in its log."""

    def published(step: int) -> None:
        with suppress(TrimtabError):  # if the log cannot be written, the training loop raises that
            log.append({"kind": CHECKPOINT_KIND, "step": step})

    return Store(
        folder.checkpoints,
        keep_last=recipe.save_total_limit,
        on_event=on_event,
        on_published=published,
        base=base,
    )


def _planned_steps(resumed: ResumedState | None, total: int) -> tuple[PlannedSteps, ...]:
    """The planned numbers of steps so far, and `total` if that is another number."""
    if resumed is None:
        return extend((), 0, total)
    return extend(resumed.planned_steps, resumed.checkpoint.step if resumed.checkpoint else 0, total)


def _cadence(recipe: Recipe, total_steps: int) -> Cadence:
    return Cadence(
        total_steps,
        recipe.logging_steps,
        recipe.eval_steps or 0,
        recipe.save_steps or 0,
        recipe.eval_on_start,
    )


def _early_stopping(recipe: Recipe) -> EarlyStopping | None:
    if recipe.early_stopping_patience is None:
        return None
    return EarlyStopping(recipe.early_stopping_patience, recipe.early_stopping_threshold)


def _callbacks(callbacks: Sequence[Any], folder: RunFolder, total_steps: int) -> Callbacks | None:
    if not callbacks:
        return None
    control = Control(folder.path, total_steps)
    return Callbacks(callbacks, control, lambda step: folder.checkpoints / step_name(step))


def _dropout_masks(
    recipe: Recipe, decoder: Decoder, device: torch.device, mesh: Mesh, *, by_sequence: bool
) -> Callable[[int, int, Batch], None] | None:
    """Returns a function that sets the adapters' dropout mask keys before each microbatch; None without dropout."""
    masks = create_dropout_masks(decoder, device)
    if masks is None:
        return None
    if not by_sequence:
        return lambda step, index, batch: masks.set_by_microbatch(recipe.seed, step, index, mesh.rank)
    return lambda step, index, batch: masks.set(
        recipe.seed, step, batch.first_sequence, batch.input_ids_BT.shape[1]
    )


def build_trackers(recipe: Recipe, folder: RunFolder, config: dict[str, Any]) -> list[Observer]:
    """Observers for the tracking tools that `report_to` names."""
    from trimtab.trainer.tracking import TensorBoardSink, WandbSink

    found: list[Observer] = []
    if "tensorboard" in recipe.report_to:
        found.append(TensorBoardSink(folder.path / "tensorboard"))
    if "wandb" in recipe.report_to:
        found.append(WandbSink(folder.path, folder.path.name, config))
    return found


def _restore(
    run: Run, store: Store, checkpoint: SavedCheckpoint | None, on_event: Callable[[str], None]
) -> None:
    """Load a checkpoint into a run and truncate its log to the checkpoint's step."""
    setup = run.setup
    assert isinstance(setup.log, MetricsLog | NoLog)
    if checkpoint is None:
        setup.log.truncate_after(-1)
        on_event("no checkpoint was saved yet: restarting at step 0")
        return
    scalars = store.load(checkpoint, setup.tensors())
    store.prune(checkpoint)  # a lower save_total_limit frees its space before the next checkpoint is written
    run.state = TrainState(
        **{"measured": checkpoint.step, **scalars["state"]}
    )  # older checkpoints lack `measured`
    run.scaler = LossScaler(**scalars["scaler"]) if scalars["scaler"] else None
    setup.optimizer.restore_scalars(scalars["optimizer"])
    setup.loader.restore(scalars["loader"])
    truncate_log(setup.log, checkpoint, run.folder, on_event)
    on_event(f"continuing from step {checkpoint.step}")
