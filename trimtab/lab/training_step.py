"""One optimizer step of a recipe over given batches, built by the functions that `trimtab train` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.adapt import trained_parameters
from trimtab.adapt.lora import create_dropout_masks
from trimtab.data import Batch
from trimtab.facts.phases import During, RunPhase, no_phase
from trimtab.model.decoder import Decoder
from trimtab.parallel import Mesh
from trimtab.run.build import (
    build_in_backward_optimizer,
    build_microstep,
    build_optimizer,
    build_training_model,
    make_dequantized_copies,
)
from trimtab.run.prepare import Prepared
from trimtab.run.torch_setup import set_up_torch

IGNORED = -100


@dataclass(frozen=True)
class TrainingStep:
    """A model that is ready to train, and its step."""

    decoder: Decoder
    optimizer: Any
    microbatch: Callable[[], torch.Tensor]
    """Runs forward and backward of the batch; returns the mean loss. Gradients accumulate in the parameters."""
    update: Callable[[], None]
    """Runs the optimizer step and frees the gradients."""
    load_peak_bytes: int | None
    """Peak of the GPU's allocator while loading the weights."""
    backward: Callable[[Batch], torch.Tensor]
    """Runs forward and backward of any batch; returns the mean loss. Gradients accumulate in the parameters."""

    def __call__(self) -> torch.Tensor:
        """One step with a single microbatch."""
        loss = self.microbatch()
        self.update()
        return loss


def build_step(prepared: Prepared, weights: Path, batch: Batch, *, during: During = no_phase) -> TrainingStep:
    """Builds the model of a prepared recipe and its step over one batch.

    Args:
        prepared: from `trimtab.run.prepare`.
        weights: the folder of the weights, or of the config with `model.init: random`.
        batch: the microbatch of every step.
        during: entered with each phase of a step.

    Example:
        >>> step = build_step(prepare(recipe), folder, random_batch(512, 2, 128))     # doctest: +SKIP
        >>> float(step())                                                            # doctest: +SKIP
        6.24
    """
    set_up_torch(prepared.resolved)
    decoder = build_training_model(prepared.recipe, prepared.resolved, prepared.shape, Mesh.single(), weights)
    load_peak = torch.cuda.max_memory_allocated() if prepared.resolved.device.startswith("cuda") else None
    make_dequantized_copies(decoder, prepared.resolved)
    return build_step_of(decoder, prepared, batch, during=during, load_peak_bytes=load_peak)


def build_step_of(
    decoder: Decoder,
    prepared: Prepared,
    batch: Batch,
    *,
    during: During = no_phase,
    load_peak_bytes: int | None = None,
) -> TrainingStep:
    """Builds the step of a loaded model over one batch, with a new optimizer."""
    recipe, resolved = prepared.recipe, prepared.resolved
    device, mesh = torch.device(resolved.device), Mesh.single()
    parameters = trained_parameters(decoder)
    optimizer = build_optimizer(recipe, resolved, parameters)
    microstep = build_microstep(decoder, parameters, resolved, mesh, packing=recipe.packing, during=during)
    in_backward = build_in_backward_optimizer(recipe, resolved, optimizer, mesh)
    lr, grad_scale, skip = (
        recipe.learning_rate,
        torch.ones((), device=device),
        torch.zeros((), device=device).bool(),
    )
    masks = create_dropout_masks(decoder, device)  # of adapters with dropout
    decoder.train()

    def backward(batch: Batch) -> torch.Tensor:
        if masks is not None:
            masks.set(recipe.seed, 0, 0, batch.input_ids_BT.shape[1])
        if in_backward is not None:
            in_backward.begin(lr=lr, skip=skip)
        return microstep.backward(batch, 1 / batch.num_targets) / batch.num_targets

    def update() -> None:
        if in_backward is not None:
            return
        with during(RunPhase.OPTIMIZER_STEP):
            optimizer.step(lr=lr, grad_scale=grad_scale, skip=skip)
            for parameter in parameters.values():
                parameter.grad = None

    return TrainingStep(decoder, optimizer, lambda: backward(batch), update, load_peak_bytes, backward)


def random_batch(vocab_size: int, rows: int, tokens: int, *, document: int | None = None) -> Batch:
    """A batch of random tokens, the same in every call: one document per row, or documents of equal length.

    Example:
        >>> batch = random_batch(100, 2, 8, document=4)
        >>> batch.num_targets, batch.positions_BT[0].tolist()
        (12, [0, 1, 2, 3, 0, 1, 2, 3])
    """
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(2, vocab_size, (rows, tokens), generator=generator)
    place_T = torch.arange(tokens)
    documents_BT = (place_T // (document or tokens)).expand(rows, tokens).to(torch.int32).contiguous()
    positions_BT = (place_T % (document or tokens)).expand(rows, tokens).contiguous()
    labels_BT = torch.full_like(ids_BT, IGNORED)
    labels_BT[:, :-1] = torch.where(positions_BT[:, 1:] == 0, IGNORED, ids_BT[:, 1:])
    targets = int((labels_BT != IGNORED).sum())
    return Batch(ids_BT, labels_BT, positions_BT, documents_BT, targets, [["random"]] * rows)
