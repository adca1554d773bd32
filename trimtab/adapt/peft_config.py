"""Converts peft's adapter_config.json to `LoraSettings` and back. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.adapt import targets
from trimtab.adapt.peft_reading import CONFIG, FACTORS_A, WEIGHTS, read_config, read_header
from trimtab.adapt.spec import LoraSettings, resolve_targets
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import ModelShape


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter folder."""

    folder: Path
    settings: LoraSettings
    saved_modules: tuple[str, ...]
    """Parameters that it fully replaces (`modules_to_save`), by trimtab's names."""
    base_name: str | None
    base: BaseWeights | None
    """Source, revision and checksums of the base model, if trimtab wrote the adapter."""
    ranks: Mapping[str, int]
    """Rank of each module, from the weights."""
    named: str | tuple[str, ...] = ()
    """The config's `target_modules`; empty if other keys exclude some of them."""


def read_adapter_folder(folder: str | Path) -> AdapterFolder:
    """Reads an adapter's settings from its config and the names in its weights; does not read tensors.

    The adapted modules are determined by the tensors in the file, not by the config.

    Example:
        >>> read_adapter_folder("my-adapter").settings.r  # doctest: +SKIP
        16
    """
    folder = Path(folder)
    config, header = read_config(folder), read_header(folder)
    names = list(header.dims)
    ranks = {
        name.removesuffix(end): header.dims[name][0]
        for end in FACTORS_A
        for name in names
        if name.endswith(end)
    }
    modules = tuple(ranks)
    if not modules:
        raise ModelError(f"{folder / WEIGHTS} contains no LoRA weights", "give the folder of a LoRA adapter")
    whole = tuple(plain_name(name) for name in names if ".lora_" not in name and not is_base_copy(name))
    formats = {header.dtypes[name] for name in names if ".lora_" in name}
    settings = LoraSettings(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        target_modules=modules,
        lora_dropout=config["lora_dropout"] or 0.0,
        use_rslora=bool(config["use_rslora"]),
        use_dora=bool(config["use_dora"]),
        rank_pattern=_matching_patterns(config["rank_pattern"], modules),
        alpha_pattern=_matching_patterns(config["alpha_pattern"], modules),
        modules_to_save=tuple(sorted({name.rpartition(".")[0] for name in whole})),
        dtype="bf16" if formats == {"BF16"} else "fp32",
        any_rank=True,
    )
    base_name = config["base_model_name_or_path"]
    return AdapterFolder(folder, settings, whole, base_name, header.base, ranks, _target_modules(config))


def fit_to_model(shape: ModelShape, found: AdapterFolder) -> AdapterFolder:
    """Fits an adapter to a model of this shape; raises ModelError if its modules do not match.

    If the file contains a tied head in addition to its embedding, the head is dropped.
    """
    if shape.tie_embeddings and f"{targets.EMBEDDING}.weight" in found.saved_modules:
        _check_head(found)
        kept = tuple(name for name in found.settings.modules_to_save if name != targets.HEAD)
        settings = dataclasses.replace(found.settings, modules_to_save=kept)
        found = dataclasses.replace(found, settings=settings)
    if shape.tie_embeddings and targets.HEAD in (
        *found.settings.target_modules,
        *found.settings.modules_to_save,
    ):
        raise tied_embedding_error(found, "it trains the head separately from the embedding")
    there = targets.matrices(shape)
    missing = [name for name in found.settings.target_modules if name not in there]
    if missing:
        raise other_base_error(found, f"it has weights for {missing[0]}, and this model has no such module")
    known = targets.modules(shape)
    unknown = [name for name in found.settings.modules_to_save if name not in known]
    if unknown:
        raise other_base_error(found, f"it replaces {unknown[0]}, and this model has no such module")
    try:
        adapted = resolve_targets(shape, found.settings)
    except RecipeError as error:
        raise ModelError(
            f"the adapter {found.folder} does not fit this model: {error.cause}",
            f"load it with its own base model; if this is its base model, train it again: {error.remedy}",
        ) from error
    for target in adapted:
        if found.ranks[target.name] != target.r:
            raise ModelError(
                f"{found.folder}: {CONFIG} sets rank {target.r} for {target.name}, but {WEIGHTS} has rank "
                f"{found.ranks[target.name]}",
                "the two files do not belong together; download the adapter again",
            )
    _check_complete(shape, found)
    return found


def _check_complete(shape: ModelShape, found: AdapterFolder) -> None:
    """Raises ModelError if the config names modules that have no weights, in some layers or in the last ones."""
    there = targets.matrices(shape)
    named = targets.matching_names(there, found.named)
    # Fully trained modules have no adapter, even if target_modules names them.
    kept = {*found.ranks, *(name.removesuffix(".weight") for name in found.saved_modules)}
    missing = [name for name in there if name in named and name not in kept]
    if not missing:
        return
    layers = {_layer(name) for name in found.ranks} - {None}
    if not {_layer(name) for name in missing} & {None, *layers}:
        num_layers = shape.num_layers
        raise other_base_error(
            found, f"it has weights for {len(layers)} layers, and this model has {num_layers}"
        )
    raise ModelError(
        f"{found.folder / WEIGHTS} has no {missing[0]}, which {CONFIG} names", "download the adapter again"
    )


def _layer(name: str) -> str | None:
    """A module's layer index; None outside the layers."""
    return name.split(".")[2] if name.startswith("model.layers.") else None


def _check_head(found: AdapterFolder) -> None:
    """Raises ModelError for an adapter that replaces only a tied embedding: peft keeps the base's head."""
    if f"{targets.HEAD}.weight" not in found.saved_modules:
        raise tied_embedding_error(found, "it trains the embedding separately from the head")


def _target_modules(config: dict[str, Any]) -> str | tuple[str, ...]:
    """The value of `target_modules`; empty if another key excludes some of them."""
    if any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "layers_pattern")):
        return ()
    words = config["target_modules"] or ()
    if not isinstance(words, str):
        return tuple(words)
    return words if targets.is_pattern(words) else ()  # the weights determine the modules


def other_base_error(found: AdapterFolder, cause: str) -> ModelError:
    """The error for an adapter of another base model."""
    made_for = f"; it was made for {found.base_name}" if found.base_name else ""
    return ModelError(
        f"the adapter {found.folder} does not fit this model: {cause}{made_for}",
        "load it with its own base model",
    )


def tied_embedding_error(found: AdapterFolder, cause: str) -> ModelError:
    """The error for an adapter that treats a tied embedding and its head as two matrices."""
    return ModelError(
        f"the adapter {found.folder} does not fit this model: {cause}, and in this model they are one matrix (tied "
        "embeddings)",
        "train it again with peft's ensure_weight_tying=True, or with trimtab",
    )


def plain_name(key: str) -> str:
    """trimtab's name of a base tensor: without peft's wrapper names."""
    return key.replace(".modules_to_save", "").replace(".base_layer", "")


def is_base_copy(key: str) -> bool:
    """Whether a tensor is a copy of a base weight, which peft also saves if embeddings or head are adapted."""
    return ".base_layer." in key


def _matching_patterns(patterns: Mapping[str, Any] | None, modules: tuple[str, ...]) -> dict[str, Any]:
    """The config's patterns that are the first match of some module in the file; peft ignores the others."""
    keys = list(patterns or {})
    first = {next((key for key in keys if targets.matching(key, name)), None) for name in modules}
    return {key: value for key, value in (patterns or {}).items() if key in first}


def to_peft_config(
    shape: ModelShape, settings: LoraSettings, *, base_name: str, revision: str | None, tied_head: bool
) -> dict[str, Any]:
    """Creates the content of adapter_config.json for peft.

    `tied_head`: the head is stored in addition to its tied embedding, so that every peft version replaces both.
    """
    saved = _written_modules(shape, settings) + ([targets.HEAD] if tied_head else [])
    alpha = settings.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": revision,
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": _written_targets(shape, settings),
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": dict(settings.alpha_pattern),
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _written_targets(shape: ModelShape, settings: LoraSettings) -> list[str]:
    """Short names if they match exactly these modules, full names otherwise."""
    names = [target.name for target in resolve_targets(shape, settings)]
    short = targets.short_names(names)
    return short if [m.name for m in targets.select(shape, short)] == names else names


def _written_modules(shape: ModelShape, settings: LoraSettings) -> list[str]:
    """Short names if peft, which matches name suffixes, selects the same modules by them; full names otherwise."""
    matching_names = {
        name.rpartition(".")[0] for name in targets.select_modules(shape, settings.modules_to_save)
    }
    short = targets.short_names(sorted(matching_names))
    taken = {name for name in targets.modules(shape) if name.endswith(tuple(short))}
    return short if taken == matching_names else sorted(matching_names)
