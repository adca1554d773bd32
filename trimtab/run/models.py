"""Opens a model by any name that users may give: hub id, folder, GGUF file, run folder, `starter`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trimtab import text
from trimtab.adapt import active_adapters, load_adapter, trained_parameters, use_adapters
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.adapt.saved_modules import store_modules
from trimtab.adapt.spec import DEFAULT, LoraSettings, trainable_parameters
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.tokens import load_with_new_tokens
from trimtab.checkpoint import SavedCheckpoint, Store, read_manifest
from trimtab.checkpoint.layout import step_folders
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import CheckpointError, ModelError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.model import (
    Decoder,
    Provenance,
    check_weights,
    init_weights,
    load_weights,
    read_generation_config,
    read_shape,
    read_token_ids,
)
from trimtab.model.families import config_from_shape
from trimtab.parallel import Mesh
from trimtab.run.adapter_tokens import adapter_tokenizer, with_adapter_tokens
from trimtab.run.base_weights import check_adapter_base, check_base
from trimtab.run.build import build_model
from trimtab.run.choices import read_model_choices
from trimtab.run.folder import RunFolder, write_json
from trimtab.run.locate import STARTER, initial_model, model_folder
from trimtab.run.metrics_summary import has_published
from trimtab.run.prepare import model_notes
from trimtab.run.quantizing import quantization_for_device
from trimtab.run.resolve import resolve_inference
from trimtab.text import Tokenizer

GGUF_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""Dtype names of GGUF → of trimtab; GGUF's quantized types keep their names."""


@dataclass
class OpenedModel:
    """A model and its tokenizer, ready for use."""

    decoder: Decoder
    tokenizer: Tokenizer
    name: str
    folder: Path
    """The folder with config and tokenizer."""
    step: int | None = None
    """The checkpoint's step, for a run folder."""
    formats: tuple[str, ...] = ()
    """Dtypes of the stored weights: fp32, bf16, …, or GGUF's quantized types (Q4_1)."""
    base: BaseWeights | None = None
    """For a run with adapters: source, revision and checksums of its base weights."""
    own_tokenizer: bool = False
    """Whether the tokenizer differs from the base's: added tokens, another chat template."""
    adapters_with_tokenizer: set[str] = field(default_factory=set)
    """Names of the loaded adapters that are exported with this tokenizer."""
    commit: str | None = None
    """The loaded commit of a hub id."""


def load_tokenizer(folder: Path, shape: ModelShape) -> Tokenizer:
    """The tokenizer of a folder or GGUF file, checked against the size of the embeddings."""
    tokenizer = text.load(folder)
    text.check_vocabulary(tokenizer, shape.vocab_size)
    return tokenizer


def open_model(
    name: str,
    *,
    revision: str | None = None,
    checkpoint: str | int = "latest",
    adapter: str | Path | None = None,
    device: torch.device,
    capability: tuple[int, int] | None = None,
    dtype: str = "fp32",
    on_event: Callable[[str], None],
) -> OpenedModel:
    """Loads a model for evaluation, generation or export.

    Args:
        name: a hub id, a folder, a GGUF file, a run folder, or `starter`.
        revision: branch, tag or commit of a hub id.
        checkpoint: for a run folder `latest`, `best` or a step number.
        adapter: a folder with a peft adapter to load into the model.
        device: the device of the model.
        capability: a CUDA device's compute capability.
        dtype: of the weights.
        on_event: called with one-line messages, such as skipped checkpoints.
    """
    run = RunFolder(Path(name))
    is_run = RunFolder.is_run(run.path)
    _check_versions(name, is_run, revision, checkpoint)
    folder, commit = (run.model, None) if is_run else model_folder(name, revision=revision)
    stored = shape = read_shape(folder)
    tokenizer_folder = folder
    if adapter is not None and not is_run:
        shape, tokenizer_folder = with_adapter_tokens(shape, folder, Path(adapter))
    resolved = resolve_inference(shape, str(device), dtype=dtype, capability=capability)
    tokenizer = load_tokenizer(tokenizer_folder, shape)

    def new_decoder(
        settings: LoraSettings | None = None,
        quantization: Quantization | None = None,
        weights: Path | None = None,
    ) -> Decoder:
        adapted = dataclasses.replace(
            resolved, lora=settings, quantization=quantization_for_device(quantization, device)
        )
        return build_model(shape, adapted, Mesh.single(), weights=weights).eval()

    if is_run:
        opened = _open_run(run, str(checkpoint), shape, new_decoder, tokenizer, on_event)
    else:
        opened = _open_source(name, folder, stored, new_decoder, tokenizer, on_event)
        opened.own_tokenizer, opened.commit = tokenizer_folder != folder, commit
    if adapter is not None:
        if active_adapters(opened.decoder):
            raise RecipeError(
                f"{name} is a run that trained an adapter itself", "give its base model and the adapter"
            )
        load_adapter_into(opened, Path(adapter), on_event)
    return opened


def _check_versions(name: str, is_run: bool, revision: str | None, checkpoint: str | int) -> None:
    """Raises RecipeError for a revision of a local model, or a checkpoint of anything but a run."""
    if revision is not None and (is_run or name == STARTER or Path(name).expanduser().exists()):
        raise RecipeError(
            f"revision {revision!r} is set, and {name} is not a hub id",
            "leave the revision out" + ("; a run's checkpoint is selected with checkpoint" if is_run else ""),
        )
    if not is_run and str(checkpoint) != "latest":
        raise RecipeError(
            f"checkpoint {checkpoint!r} is set, and {name} is not a run folder",
            "leave the checkpoint out; a hub model's commit is selected with revision",
        )


def _open_source(
    name: str,
    folder: Path,
    stored: ModelShape,
    new_decoder: Callable[..., Decoder],
    tokenizer: Tokenizer,
    on_event: Callable[[str], None],
) -> OpenedModel:
    """Opens a model that is not a run, from its folder or GGUF file with the shape `stored`."""
    for note in model_notes(folder):
        on_event(note)
    check_weights(stored, folder)  # before tensors with the sizes in the config are allocated
    decoder = new_decoder()
    read: list[Provenance] = []
    load_with_new_tokens(decoder, stored, lambda: read.append(load_weights(decoder, folder)))
    formats = tuple(GGUF_DTYPES.get(name, name) for name in read[0].formats)
    return OpenedModel(decoder, tokenizer, name, folder, None, formats)


def _open_run(
    run: RunFolder,
    checkpoint: str,
    shape: ModelShape,
    new_decoder: Callable[..., Decoder],
    tokenizer: Tokenizer,
    on_event: Callable[[str], None],
) -> OpenedModel:
    """Opens a run's model at a checkpoint; if the checkpoint has only adapters, on the base that it names."""
    choices = read_model_choices(run)
    settings = choices.lora
    found = _find_checkpoint(run, checkpoint, choices.save_steps, on_event)
    base = read_manifest(found.path).base
    if settings is None:
        _check_stored(dict(shape.parameters()), shape.num_layers, found)
        decoder = new_decoder()
    else:
        assert base is not None, f"{found.path} contains adapters and names no base"
        wanted = {name: dims for name, dims, _ in trainable_parameters(shape, settings, "fp32")}
        _check_stored(wanted, 0, found)
        weights = None
        if not base.is_random:
            weights, _ = model_folder(initial_model(base.source, run.path), revision=choices.model_commit)
            check_base(base, weights)
        decoder = new_decoder(settings, choices.quantization, weights)
        _load_base(decoder, base, weights)
    formats = _load_checkpoint(decoder, run, found, on_event)
    tokenizer = dataclasses.replace(tokenizer, template_variables=choices.template_variables)
    own = choices.own_tokenizer
    tokens = {DEFAULT} if own and settings is not None else set()
    return OpenedModel(decoder, tokenizer, str(run.path), run.model, found.step, formats, base, own, tokens)


def _load_base(decoder: Decoder, base: BaseWeights, weights: Path | None) -> None:
    """Loads the base weights of a run's adapters; the caller has compared their checksums with the checkpoint's."""
    if weights is None:
        assert base.seed is not None
        init_weights(decoder, base.seed)
        return
    stored = read_shape(weights)
    check_weights(stored, weights)
    load_with_new_tokens(decoder, stored, lambda: load_weights(decoder, weights))


def load_adapter_into(
    opened: OpenedModel, folder: Path, on_event: Callable[[str], None], *, name: str = DEFAULT
) -> None:
    """Loads a peft adapter into an opened model and activates it."""
    found = read_adapter_folder(folder)
    if opened.base is None:
        check_adapter_base(found.base, opened.folder, folder)
    elif found.base is not None and found.base.files != opened.base.files:
        raise ModelError(
            f"the adapter {folder} was trained on other base weights than those of {opened.name}",
            f"it was trained on {found.base.source}; load it into that model",
        )
    load_adapter(opened.decoder, folder, adapter=name)
    opened.decoder.eval()
    if opened.own_tokenizer and adapter_tokenizer(folder) is not None:
        opened.adapters_with_tokenizer.add(name)
    if found.base is None and found.base_name and found.base_name != opened.name:
        on_event(
            f"the adapter's config names {found.base_name} as its base model; the tensor shapes fit {opened.name}"
        )


def _find_checkpoint(
    run: RunFolder, which: str, save_steps: int | None, on_event: Callable[[str], None]
) -> SavedCheckpoint:
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
        cause = f"{run.path} has no valid checkpoint {which}"
        steps = [str(step) for step in store.steps() if str(step) != which]
    if steps and which != "latest":
        listed = "step" if len(steps) == 1 else "one of the steps"
        raise CheckpointError(cause, f"use latest or {listed} {', '.join(steps)}")
    if step_folders(run.checkpoints):
        raise CheckpointError(cause, "all are damaged: restore one from a copy, or train the run again")
    if has_published(run, save_steps):  # resuming raises too: there is no checkpoint to resume from
        raise CheckpointError(
            cause, f"restore a checkpoint from a copy, or train the recipe again: {run.retrain_command()}"
        )
    raise CheckpointError(cause, f"resume it until it has saved one: {run.resume_command()}")


def _check_stored(wanted: dict[str, tuple[int, ...]], num_layers: int, found: SavedCheckpoint) -> None:
    """Raises unless the checkpoint has the tensors that the run folder's config and choices describe."""
    stored = read_manifest(found.path).tensors
    remedy = (
        "the checkpoint or the run folder's model/config.json is from another model; restore the right one"
    )
    if num_layers > len(stored):
        raise CheckpointError(f"{found.path} does not contain {num_layers} layers", remedy)
    for name, dims in wanted.items():
        entry = stored.get(f"parameters.{name}")
        if entry is None:
            raise CheckpointError(f"{found.path} does not contain {name}", remedy)
        if entry.shape != dims:
            raise CheckpointError(
                f"{found.path} contains {name} with shape {list(entry.shape)}, and the config requires {list(dims)}",
                remedy,
            )


def _load_checkpoint(
    decoder: Decoder, run: RunFolder, found: SavedCheckpoint, on_event: Callable[[str], None]
) -> tuple[str, ...]:
    """Loads a checkpoint into a decoder; returns the dtypes of the checkpoint."""
    stored = read_manifest(found.path).tensors
    # Tensors are read in the checkpoint's dtype, then converted: a run in bf16 may be opened in fp32.
    parameters = trained_parameters(decoder)
    tensors = {
        name: torch.empty(parameter.shape, dtype=getattr(torch, stored[f"parameters.{name}"].dtype))
        for name, parameter in parameters.items()
    }
    with Store(run.checkpoints, on_event=on_event) as store:
        store.load(found, {f"parameters.{name}": tensor for name, tensor in tensors.items()}, partial=True)
    adapted = bool(active_adapters(decoder))
    whole = {name: tensors[name] for name in tensors if adapted and ".lora_" not in name}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in whole:
                parameter.copy_(tensors[name])
    if whole:  # the base's modules are kept too, for use without the adapter
        store_modules(decoder, DEFAULT, whole)
        use_adapters(decoder, DEFAULT)
    ours = {theirs: name for name, theirs in TORCH_NAMES.items()}
    return tuple(sorted({ours[stored[f"parameters.{name}"].dtype] for name in tensors}))


def save_config_and_tokenizer(
    weights: Path, shape: ModelShape, tokenizer: Tokenizer, folder: Path, dtype: str
) -> None:
    """Writes config.json and tokenizer into a run folder; together with a checkpoint they are a complete model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        config_from_shape(shape, dtype=TORCH_NAMES[dtype], extra=read_token_ids(weights)),
    )
    generation = read_generation_config(weights)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)


def add_stop_tokens(folder: Path, tokenizer: Tokenizer, ends: Iterable[int]) -> Tokenizer:
    """Adds stop tokens to a run folder's tokenizer, also in generation_config.json; returns the tokenizer."""
    stops = tokenizer.stop_ids | set(ends)
    if stops == tokenizer.stop_ids:
        return tokenizer
    others = sorted(stops - {tokenizer.eos_id})
    named = others if tokenizer.eos_id is None else [tokenizer.eos_id, *others]
    write_json(
        folder / "generation_config.json", {**(read_generation_config(folder) or {}), "eos_token_id": named}
    )
    return dataclasses.replace(tokenizer, stop_ids=frozenset(stops))
