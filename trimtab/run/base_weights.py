"""The frozen weights below adapters: named by checksums, found again, and compared byte by byte."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trimtab.data import fingerprints
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError, ModelError, RecipeError
from trimtab.facts.files import FileDigest, digest
from trimtab.facts.shapes import ModelShape
from trimtab.hub.local_files import looks_local
from trimtab.model.source import read_shape, source_kind
from trimtab.recipe import Recipe
from trimtab.run.locate import STARTER


def weight_paths(place: Path) -> list[Path]:
    """The files that a model's weights lie in."""
    if source_kind(place) == "gguf":
        return [place]
    from trimtab.model.weights_safetensors import weight_files

    return [place / name for name in weight_files(place)]


def name_base(recipe: Recipe, place: Path, commit: str | None) -> BaseWeights:
    """The frozen weights of a run: source, revision, size and sha256 of each file.

    Reads every file that is not known yet, several at a time: a second or so for two GB. Fresh weights are named by
    their seed.
    """
    if recipe.model.init == "random":
        return BaseWeights(recipe.model.name, commit, seed=recipe.seed)
    return BaseWeights(recipe.model.name, commit, cached_digests(weight_paths(place)))


def unloadable_by_peft(base: BaseWeights, place: Path) -> str | None:
    """Why peft cannot load an adapter's base by its name, and what to do; None where it can.

    Args:
        base: the frozen weights; without files where no more than their name is known.
        place: where the model was opened from.
    """
    source = base.source
    if base.is_random:
        return (
            f"peft cannot load the base: its weights were made from seed {base.seed}; "
            "`trimtab merge` writes them with the adapter in one folder"
        )
    if source == STARTER:
        what = "the model that ships with trimtab"
    elif place.suffix == ".gguf" or any(name.endswith(".gguf") for name in base.files):
        what = "a GGUF file"
    else:
        return None
    return (
        f"peft cannot load the base by the name {source}: it is {what}; write it with `trimtab export hf {source} "
        "FOLDER` and export the adapter again with `--base FOLDER --overwrite`"
    )


def check_base_name(name: str, shape: ModelShape) -> str:
    """A name for peft to load the base by: a hub id as it is, a folder from the root.

    Raises:
        RecipeError: it is a local path that is no Hugging Face folder.
        ModelError: the folder holds another model.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if looks_local(name):
            raise RecipeError(
                f"--base {name} does not exist", "write the base there first: `trimtab export hf BASE FOLDER`"
            )
        return name
    if not (path / "config.json").is_file():
        raise RecipeError(
            f"--base {name} is no Hugging Face folder, which peft needs",
            f"make one: `trimtab export hf {name} FOLDER`, then `--base FOLDER`",
        )
    # More tokens than the base's own are an adapter's affair.
    found = dataclasses.replace(read_shape(path), vocab_size=shape.vocab_size)
    for (name_here, ours), theirs in zip(shape.parameters(), dict(found.parameters()).items(), strict=False):
        if (name_here, ours) != theirs:
            raise ModelError(
                f"--base {name} is another model: its {theirs[0]} is {list(theirs[1])}, the adapter's base has "
                f"{name_here} {list(ours)}",
                "name the model that the adapter was trained on",
            )
    return str(path.resolve())


def check_base(base: BaseWeights, place: Path) -> None:
    """CheckpointError unless the weights at a place are, byte for byte, those that a checkpoint was trained on."""
    different = _difference(base, place)
    if different is not None:
        raise CheckpointError(
            f"the run is for another base than {place}: {different}",
            f"it was trained on {_named(base)}; put those weights back to that place",
        )


def _named(base: BaseWeights) -> str:
    at = f" at revision {base.revision}" if base.revision else ""
    return f"{base.source}{at}"


def _difference(base: BaseWeights, place: Path) -> str | None:
    """In what the weights at a place are others than a base's, or None; the cheap comparisons first."""
    if base.is_random:
        return None
    paths = {path.name: path for path in weight_paths(place)}
    wanted = base.files
    if set(paths) != set(wanted):
        return "its files have other names"
    for name, path in paths.items():
        if path.stat().st_size != wanted[name].size:
            return f"{name} has another size"
    for name, file in cached_digests(paths.values()).items():
        checksum = wanted[name].sha256
        if file.sha256 != checksum and digest(paths[name]).sha256 != checksum:  # a note alone refuses nothing
            return f"{name} has other content"
    return None


def check_adapter_base(base: BaseWeights | None, place: Path, folder: Path) -> None:
    """ModelError for an adapter that trimtab wrote for other weights than those at a place."""
    if base is None:
        return
    different = _difference(base, place)
    if different is not None:
        raise ModelError(
            f"the adapter {folder} is for another base than {place}: {different}",
            f"it was trained on {_named(base)}; give that model",
        )


WORTH = 1 << 26
"""Bytes from which on a file is worth a note: less is read in a moment."""


def cached_digests(paths: Iterable[Path], folder: Path | None = None) -> dict[str, FileDigest]:
    """Size and sha256 of files by their names, read where there is no note of them that holds.

    Args:
        paths: the files; no two of one name.
        folder: where notes are kept; by default in the user's cache. If it cannot be used, the files are read.

    Example:
        >>> cached_digests([Path("model.safetensors")])["model.safetensors"].size  # doctest: +SKIP
        269060552
    """
    ordered, memory = sorted(paths), folder or _cache()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda path: _file(path, memory), ordered)
        return dict(zip((path.name for path in ordered), found, strict=True))


def _file(path: Path, memory: Path | None) -> FileDigest:
    stat = fingerprints.stat_of(path)
    if stat[0] < WORTH:
        return digest(path)
    checksum = fingerprints.remembered(path, stat, memory, lambda path: digest(path).sha256)
    return FileDigest(stat[0], checksum)


def _cache() -> Path | None:
    """None for a user without a home."""
    try:
        return Path.home() / ".cache" / "trimtab" / "checksums"
    except RuntimeError:
        return None
