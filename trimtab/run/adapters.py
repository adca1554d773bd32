"""A run that trains adapters: which base it stands on, proved by checksums, and how its tensors are found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.adapt.spec import LoraSettings
from trimtab.checkpoint.manifest import digest
from trimtab.facts.errors import CheckpointError, ModelError
from trimtab.model.source import source_kind
from trimtab.recipe import Recipe
from trimtab.run.checksums import remembered
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

    Reads every file that is not known yet, several at a time: a second or so for two GB. Fresh weights are named by
    their seed.
    """
    base: dict[str, Any] = {"source": recipe.model.name, "revision": commit, "files": {}}
    if recipe.model.init == "random":
        return {**base, "init": "random", "seed": recipe.seed}
    found = remembered(weight_paths(place))
    base["files"] = {name: {"size": file.size, "sha256": file.sha256} for name, file in found.items()}
    return base


def check_base(base: Mapping[str, Any], place: Path) -> None:
    """CheckpointError unless the weights at a place are, byte for byte, those that a checkpoint was trained on."""
    different = _difference(base, place)
    if different is not None:
        raise CheckpointError(
            f"the run is for another base than {place}: {different}",
            f"it was trained on {_named(base)}; put those weights back to that place",
        )


def _named(base: Mapping[str, Any]) -> str:
    at = f" at revision {base['revision']}" if base.get("revision") else ""
    return f"{base['source']}{at}"


def _difference(base: Mapping[str, Any], place: Path) -> str | None:
    """In what the weights at a place are others than a base's, or None; the cheap comparisons first."""
    if base.get("init") == "random":
        return None
    paths = {path.name: path for path in weight_paths(place)}
    wanted = base["files"]
    if set(paths) != set(wanted):
        return "its files have other names"
    for name, path in paths.items():
        if path.stat().st_size != wanted[name]["size"]:
            return f"{name} has another size"
    for name, file in remembered(paths.values()).items():
        checksum = wanted[name]["sha256"]
        if file.sha256 != checksum and digest(paths[name]).sha256 != checksum:  # a note alone refuses nothing
            return f"{name} has other content"
    return None


def check_adapter_base(base: Mapping[str, Any] | None, place: Path, folder: Path) -> None:
    """ModelError for an adapter that trimtab wrote for other weights than those at a place."""
    if base is None:
        return
    different = _difference(base, place)
    if different is not None:
        raise ModelError(
            f"the adapter {folder} is for another base than {place}: {different}",
            f"it was trained on {_named(base)}; give that model",
        )
