"""A run that trains adapters: which base it stands on, proved by checksums, and how its tensors are found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.adapt.spec import LoraSettings
from trimtab.checkpoint.manifest import digests
from trimtab.facts.errors import CheckpointError, ModelError
from trimtab.model.source import source_kind
from trimtab.recipe import Recipe
from trimtab.run.choices import Choices


def settings_of(choices: Choices | Mapping[str, Any]) -> LoraSettings | None:
    """The adapters' settings of a run, or None where every weight is trained."""
    plain = choices.lora if isinstance(choices, Choices) else choices.get("lora")
    return None if plain is None else LoraSettings.from_dict(plain)


def weight_paths(place: Path) -> list[Path]:
    """The files that a model's weights lie in."""
    if source_kind(place) == "gguf":
        return [place]
    from trimtab.model.weights_safetensors import weight_files

    return [place / name for name in weight_files(place)]


def name_base(recipe: Recipe, place: Path, commit: str | None) -> dict[str, Any]:
    """The frozen weights of a run in plain data: source, revision, size and sha256 of each file.

    Reads every file once, several at a time: a second or so for two GB. Fresh weights are named by their seed.
    """
    base: dict[str, Any] = {"source": recipe.model.name, "revision": commit, "files": {}}
    if recipe.model.init == "random":
        return {**base, "init": "random", "seed": recipe.seed}
    found = digests(weight_paths(place))
    base["files"] = {name: {"size": file.size, "sha256": file.sha256} for name, file in found.items()}
    return base


def check_base(base: Mapping[str, Any], place: Path, what: str) -> None:
    """CheckpointError unless the weights at a place are, byte for byte, those that a checkpoint was trained on."""
    if base.get("init") == "random":
        return
    paths = {path.name: path for path in weight_paths(place)}
    wanted = base["files"]
    remedy = f"it was trained on {base['source']}" + (
        f" at revision {base['revision']}" if base.get("revision") else ""
    )
    remedy += "; put those weights back, or name the place where they are"
    if set(paths) != set(wanted):
        raise CheckpointError(f"{what} is for another base than {place}: its files have other names", remedy)
    for name, path in paths.items():
        if path.stat().st_size != wanted[name]["size"]:
            raise CheckpointError(f"{what} is for another base than {place}: {name} has another size", remedy)
    for name, file in digests(paths.values()).items():
        if file.sha256 != wanted[name]["sha256"]:
            raise CheckpointError(
                f"{what} is for another base than {place}: {name} has other content", remedy
            )


def check_adapter_base(base: Mapping[str, Any] | None, place: Path, folder: Path) -> None:
    """ModelError for an adapter that trimtab wrote for other weights than those at a place."""
    if base is None:
        return
    try:
        check_base(base, place, f"the adapter {folder}")
    except CheckpointError as error:
        raise ModelError(error.cause, error.remedy) from error
