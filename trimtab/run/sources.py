"""A model that can be used, from anything a person may name: hub id, folder, GGUF file, run folder, `starter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab import text
from trimtab.checkpoint import Found, Store, read_manifest
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.shapes_hf import config_from_shape
from trimtab.kernels.attention.choice import choose
from trimtab.model import (
    Decoder,
    build,
    check_weights,
    load_weights,
    read_generation_config,
    read_shape,
    read_token_ids,
)
from trimtab.run.folder import RunFolder, write_json
from trimtab.run.places import STARTER, model_folder
from trimtab.text import Tokenizer

GGUF_FLOATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""GGUF's names of number formats to ours; its quantizations keep their names."""


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
    formats: tuple[str, ...] = ()
    """Number formats that the weights are stored in: fp32, bf16, …, or GGUF's own names (Q4_1)."""


def load_tokenizer(folder: Path, shape: ModelShape, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a folder or GGUF file, checked against the size of the embeddings.

    `chat_template` is a Jinja file, or a template itself, to be used instead of its own.
    """
    tokenizer = text.load(folder)
    text.check_fits(tokenizer, shape.vocab_size)
    if chat_template is None:
        return tokenizer
    return dataclasses.replace(tokenizer, chat_template=text.read_template(chat_template))


def open_model(
    name: str,
    *,
    revision: str | None = None,
    checkpoint: str | int = "latest",
    device: torch.device,
    capability: tuple[int, int] | None = None,
    dtype: str = "fp32",
    attention: str = "auto",
    on_event: Callable[[str], None],
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
    if revision is not None and (is_run or name == STARTER or Path(name).expanduser().exists()):
        raise RecipeError(
            f"revision {revision!r} is given and {name} is not on the hub",
            "leave the revision out" + ("; a run's states are chosen with checkpoint" if is_run else ""),
        )
    folder = run.model if is_run else model_folder(name, revision=revision)[0]
    shape = read_shape(folder)
    # Before anything is made in the sizes that the config claims.
    found = None
    if is_run:
        found = _find_checkpoint(run, str(checkpoint), on_event)
        _check_stored(shape, found)
    else:
        check_weights(shape, folder)
    choice = choose(
        device=device.type,
        capability=capability,
        dtype=dtype,
        head_dim=shape.head_dim,
        packed=True,
        window=shape.sliding_window,
        training=False,
        requested=attention,
        tokens=1,  # generation asks for one token after another
    )
    tokenizer = load_tokenizer(folder, shape)
    decoder = build(shape, dtype=dtype, device=device, attention=choice.impl)
    if found is not None:
        formats = _load_checkpoint(decoder, run, found, on_event)
    else:
        formats = tuple(GGUF_FLOATS.get(name, name) for name in load_weights(decoder, folder).formats)
    step = None if found is None else found.step
    return OpenedModel(decoder.eval(), tokenizer, name, folder, step, formats)


def _find_checkpoint(run: RunFolder, which: str, on_event: Callable[[str], None]) -> Found:
    with Store(run.checkpoints, on_event=on_event) as store:
        if which == "latest":
            found = store.latest()
        elif which == "best":
            found = store.best()
        elif which.isdecimal():
            found = store.at(int(which))
        else:
            raise RecipeError(f"checkpoint {which!r} is not known", "use latest, best or a step number")
        if found is not None:
            return found
        cause = f"{run.path} has no good checkpoint ({which})"
        steps = ", ".join(str(step) for step in store.steps() if str(step) != which)
    if steps and which != "latest":
        raise CheckpointError(cause, f"there are latest and the steps {steps}")
    if any(run.checkpoints.glob("step-*")):
        raise CheckpointError(cause, "all are damaged: restore one from a copy, or train anew")
    raise CheckpointError(cause, f"train it until it has saved one: `trimtab train --resume {run.path}`")


def _check_stored(shape: ModelShape, found: Found) -> None:
    """The checkpoint's tensors against the shape that the run folder's config describes."""
    stored = read_manifest(found.path).tensors
    remedy = (
        "the checkpoint or the run folder's model/config.json is of another model; put the right one back"
    )
    if shape.num_layers > len(stored):
        raise CheckpointError(f"{found.path} does not hold {shape.num_layers} layers", remedy)
    for name, dims in shape.parameters():
        entry = stored.get(f"parameters.{name}")
        if entry is None:
            raise CheckpointError(f"{found.path} does not hold {name}", remedy)
        if entry.shape != dims:
            raise CheckpointError(
                f"{found.path} holds {name} as {list(entry.shape)} where the config says {list(dims)}", remedy
            )


def _load_checkpoint(
    decoder: Decoder, run: RunFolder, found: Found, on_event: Callable[[str], None]
) -> tuple[str, ...]:
    """Fills a decoder; returns the number formats that the checkpoint holds it in."""
    stored = read_manifest(found.path).tensors
    # The checkpoint's own format is read, then converted: a run in bf16 may be used in fp32.
    tensors = {
        name: torch.empty(parameter.shape, dtype=getattr(torch, stored[f"parameters.{name}"].dtype))
        for name, parameter in decoder.named_parameters()
    }
    with Store(run.checkpoints, on_event=on_event) as store:
        store.load(found, {f"parameters.{name}": tensor for name, tensor in tensors.items()}, partial=True)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(tensors[name])
    ours = {theirs: name for name, theirs in TORCH_NAMES.items()}
    return tuple(sorted({ours[stored[f"parameters.{name}"].dtype] for name in tensors}))


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
