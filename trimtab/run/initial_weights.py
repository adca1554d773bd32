"""The weights that a run begins with: where they are, and checksums of those that must not change until a resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.checkpoint.layout import step_folders
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError
from trimtab.facts.run_layout import is_checkpoint
from trimtab.run.base_weights import check_base, identify_base
from trimtab.run.choices import Choices
from trimtab.run.folder import RunFolder
from trimtab.run.locate import check_checksums, initial_model, model_folder, shape_of
from trimtab.run.prepare import Prepared


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run begins with."""

    path: Path
    """Their folder or GGUF file; the folder of the config if no weights are read."""
    base: BaseWeights | None
    """The frozen weights of a run that trains adapters."""
    started_from: BaseWeights | None
    """The checkpoint of another run that they are read from; None for other models, and for adapters: it is `base`."""


def find_initial_weights(prepared: Prepared, folder: RunFolder, saved: Choices | None) -> InitialWeights:
    """Locates the weights, downloads them if this start reads them, and compares them with their checksums.

    Raises CheckpointError if a run is resumed (`saved`) and they are no longer those that it began with.
    """
    path = _resolve_path(prepared, folder)
    has_adapters = prepared.resolved.lora is not None
    if saved is None:
        base = identify_base(prepared.recipe, path, prepared.commit) if has_adapters else None
        started_from = None
        if is_checkpoint(path):
            check_checksums(path)
            started_from = None if has_adapters else identify_base(prepared.recipe, path, None)
        return InitialWeights(path, base, started_from)
    if has_adapters:
        assert saved.base is not None, "choices.json of a run with adapters names its base"
        check_base(saved.base, path)
    # A run without a checkpoint of its own reads the other run's again.
    if path != prepared.model and is_checkpoint(path) and saved.started_from is not None:
        check_base(saved.started_from, path)
    return InitialWeights(path, saved.base if has_adapters else None, saved.started_from)


def _resolve_path(prepared: Prepared, folder: RunFolder) -> Path:
    """The location of the pretrained weights, which are downloaded now if this start reads them."""
    recipe = prepared.recipe
    has_full_checkpoint = prepared.resolved.lora is None and bool(step_folders(folder.checkpoints))
    if recipe.model.init == "random" or has_full_checkpoint:
        return prepared.model
    weights, _ = model_folder(initial_model(recipe.model.name, folder.path), revision=prepared.commit)
    if shape_of(recipe, weights) != prepared.shape:
        raise CheckpointError(
            f"the model at {recipe.model.name} is not the one that the run started from",
            "restore that model there, or start a new run",
        )
    return weights
