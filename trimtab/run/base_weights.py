"""The frozen base weights of adapters: identifies them by checksums, and compares later files with them."""

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
    """The files with a model's weights."""
    if source_kind(place) == "gguf":
        return [place]
    from trimtab.model.weights_safetensors import weight_files

    return [place / name for name in weight_files(place)]


def identify_base(recipe: Recipe, place: Path, commit: str | None) -> BaseWeights:
    """Identifies the frozen weights of a run by source, revision, and size and sha256 of each file.

    Files without a cached checksum are read, several in parallel: about a second for 2 GB. Random weights are
    identified by their seed.
    """
    if recipe.model.init == "random":
        return BaseWeights(recipe.model.name, commit, seed=recipe.seed)
    return BaseWeights(recipe.model.name, commit, cached_digests(weight_paths(place)))


def unloadable_by_peft(base: BaseWeights, place: Path) -> str | None:
    """Explains why peft cannot load an adapter's base by its name, with a remedy; None if it can.

    Args:
        base: the frozen weights; without files if only their name is known.
        place: the path that the model was opened from.
    """
    source = base.source
    if base.is_random:
        return (
            f"peft cannot load the base: its weights were initialized from seed {base.seed}; "
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
    """The name by which peft can load the base: a hub id unchanged, a folder as an absolute path.

    Raises:
        RecipeError: it is a local path that is not a Hugging Face folder.
        ModelError: the folder contains another model.
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
            f"--base {name} is not a Hugging Face folder, which peft needs",
            f"make one: `trimtab export hf {name} FOLDER`, then `--base FOLDER`",
        )
    # The vocabulary may differ: an adapter may add tokens.
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
    """Raises CheckpointError unless the weights at a path are byte for byte those that a checkpoint was trained on."""
    different = _describe_difference(base, place)
    if different is not None:
        raise CheckpointError(
            f"the run was trained on other base weights than those in {place}: {different}",
            f"it was trained on {_describe(base)}; restore those weights at that path",
        )


def _describe(base: BaseWeights) -> str:
    at = f" at revision {base.revision}" if base.revision else ""
    return f"{base.source}{at}"


def _describe_difference(base: BaseWeights, place: Path) -> str | None:
    """Describes how the weights at a path differ from a base, or None; cheap comparisons first."""
    if base.is_random:
        return None
    paths = {path.name: path for path in weight_paths(place)}
    wanted = base.files
    if set(paths) != set(wanted):
        return "its files have different names"
    for name, path in paths.items():
        if path.stat().st_size != wanted[name].size:
            return f"{name} has a different size"
    for name, file in cached_digests(paths.values()).items():
        checksum = wanted[name].sha256
        if (
            file.sha256 != checksum and digest(paths[name]).sha256 != checksum
        ):  # a cached checksum alone is not trusted
            return f"{name} has different content"
    return None


def check_adapter_base(base: BaseWeights | None, place: Path, folder: Path) -> None:
    """Raises ModelError if trimtab wrote an adapter for weights other than those at a path."""
    if base is None:
        return
    different = _describe_difference(base, place)
    if different is not None:
        raise ModelError(
            f"the adapter {folder} was trained on other base weights than those in {place}: {different}",
            f"it was trained on {_describe(base)}; pass that model",
        )


MIN_CACHED_BYTES = 1 << 26
"""Checksums are cached only for files of at least this many bytes; smaller files are read each time."""


def cached_digests(paths: Iterable[Path], folder: Path | None = None) -> dict[str, FileDigest]:
    """Size and sha256 of files by their names; files without a valid cached checksum are read.

    Args:
        paths: the files, with distinct names.
        folder: folder of cached checksums; by default in the user's cache. If it cannot be used, the files are read.

    Example:
        >>> cached_digests([Path("model.safetensors")])["model.safetensors"].size  # doctest: +SKIP
        269060552
    """
    ordered, cache = sorted(paths), folder or _cache()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda path: _file(path, cache), ordered)
        return dict(zip((path.name for path in ordered), found, strict=True))


def _file(path: Path, cache: Path | None) -> FileDigest:
    stat = fingerprints.stat_of(path)
    if stat[0] < MIN_CACHED_BYTES:
        return digest(path)
    checksum = fingerprints.cached_digest(path, stat, cache, lambda path: digest(path).sha256)
    return FileDigest(stat[0], checksum)


def _cache() -> Path | None:
    """The user's cache folder; None without a home directory."""
    try:
        return Path.home() / ".cache" / "trimtab" / "checksums"
    except RuntimeError:
        return None
