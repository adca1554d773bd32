"""A model that can be used, from anything a person may name: hub id, folder, GGUF file, run folder, `starter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab import text
from trimtab.checkpoint import Store, read_manifest
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.shapes_hf import config_from_shape
from trimtab.kernels.attention.choice import choose
from trimtab.model import Decoder, build, load_weights, read_generation_config, read_shape, read_token_ids
from trimtab.run.folder import RunFolder, write_json
from trimtab.run.places import model_folder
from trimtab.text import Tokenizer


@dataclass
class OpenedModel:
    """A model and its tokenizer, ready for use."""

    decoder: Decoder
    tokenizer: Tokenizer
    name: str
    folder: Path
    """Where config and tokenizer lie."""
    step: int | None = None
    """The checkpoint's step, for a run folder."""


def load_tokenizer(folder: Path, shape: ModelShape) -> Tokenizer:
    """The tokenizer of a folder or GGUF file, checked against the size of the embeddings."""
    tokenizer = text.load(folder)
    text.check_fits(tokenizer, shape.vocab_size)
    return tokenizer


def open_model(
    name: str,
    *,
    revision: str | None = None,
    checkpoint: str = "latest",
    device: torch.device,
    capability: tuple[int, int] | None = None,
    dtype: str = "fp32",
    attention: str = "auto",
    on_event: Callable[[str], None] = print,
) -> OpenedModel:
    """Loads a model for evaluation, generation or export.

    Args:
        name: a hub id, a folder, a GGUF file, a run folder, or `starter`.
        revision: branch, tag or commit of a hub id.
        checkpoint: for a run folder `latest`, `best` or a step number.
        device: where it goes.
        capability: a CUDA device's compute capability.
        dtype: number format of the weights.
        attention: implementation by name, or `auto`.
        on_event: told about skipped checkpoints.
    """
    run = RunFolder(Path(name))
    is_run = RunFolder.is_run(run.path)
    folder = run.model if is_run else model_folder(name, revision=revision)[0]
    shape = read_shape(folder)
    choice = choose(
        device=device.type,
        capability=capability,
        dtype=dtype,
        head_dim=shape.head_dim,
        packed=True,
        window=shape.sliding_window,
        training=False,
        requested=attention,
    )
    tokenizer = load_tokenizer(folder, shape)
    decoder = build(shape, dtype=dtype, device=device, attention=choice.impl)
    step = None
    if is_run:
        step = _load_checkpoint(decoder, run, checkpoint, on_event)
    else:
        load_weights(decoder, folder)
    return OpenedModel(decoder.eval(), tokenizer, name, folder, step)


def _load_checkpoint(decoder: Decoder, run: RunFolder, which: str, on_event: Callable[[str], None]) -> int:
    with Store(run.checkpoints, on_event=on_event) as store:
        if which == "latest":
            found = store.latest()
        elif which == "best":
            found = store.best()
        elif which.isdigit():
            found = store.at(int(which))
        else:
            raise RecipeError(f"checkpoint {which!r} is not known", "use latest, best or a step number")
        if found is None:
            raise CheckpointError(
                f"{run.path} has no good checkpoint ({which})", "let the run go on until it has saved one"
            )
        stored = read_manifest(found.path).tensors
        # The checkpoint's own format is read, then converted: a run in bf16 may be used in fp32.
        tensors = {
            name: torch.empty(parameter.shape, dtype=getattr(torch, stored[f"parameters.{name}"].dtype))
            for name, parameter in decoder.named_parameters()
            if f"parameters.{name}" in stored
        }
        store.load(found, {f"parameters.{name}": tensor for name, tensor in tensors.items()}, partial=True)
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name not in tensors:
                    raise CheckpointError(f"{found.path} does not hold {name}", "it is of another model")
                parameter.copy_(tensors[name])
        return found.step


def save_skeleton(weights: Path, shape: ModelShape, tokenizer: Tokenizer, folder: Path, dtype: str) -> None:
    """config.json and tokenizer into a run folder: with a checkpoint, all that is needed to use the model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        config_from_shape(shape, dtype=TORCH_NAMES[dtype], extra=read_token_ids(weights)),
    )
    generation = read_generation_config(weights)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)
