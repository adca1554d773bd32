"""adapter_config.json, peft's description of an adapter, to our settings and back. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.adapt import targets
from trimtab.adapt.peft_reading import CONFIG, FACTORS_A, WEIGHTS, read_config, read_header
from trimtab.adapt.spec import LoraSettings, resolve
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import ModelShape


@dataclass(frozen=True)
class AdapterFolder:
    """What an adapter's folder says of itself."""

    folder: Path
    settings: LoraSettings
    whole: tuple[str, ...]
    """Parameters that it replaces as a whole, by our names."""
    base_name: str | None
    base: BaseWeights | None
    """Source, revision and checksums of the base, where trimtab wrote it."""
    ranks: Mapping[str, int]
    """Of each module, as the weights have it."""
    named: str | tuple[str, ...] = ()
    """The modules as the config names them; nothing where it leaves some of them out in words of its own."""


def read_adapter_folder(folder: str | Path) -> AdapterFolder:
    """An adapter's settings, from its config and the names in its weights; no numbers are read.

    The modules are those that the file has tensors for, whatever words the config uses for them.

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
        raise ModelError(f"{folder / WEIGHTS} holds no LoRA weights", "give the folder of a LoRA adapter")
    whole = tuple(plain_name(name) for name in names if ".lora_" not in name and not is_base_copy(name))
    formats = {header.dtypes[name] for name in names if ".lora_" in name}
    settings = LoraSettings(
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        target_modules=modules,
        lora_dropout=config["lora_dropout"] or 0.0,
        use_rslora=bool(config["use_rslora"]),
        use_dora=bool(config["use_dora"]),
        rank_pattern=_used(config["rank_pattern"], modules),
        alpha_pattern=_used(config["alpha_pattern"], modules),
        modules_to_save=tuple(sorted({name.rpartition(".")[0] for name in whole})),
        dtype="bf16" if formats == {"BF16"} else "fp32",
        any_rank=True,
    )
    base_name = config["base_model_name_or_path"]
    return AdapterFolder(folder, settings, whole, base_name, header.base, ranks, _named(config))


def fitted(shape: ModelShape, found: AdapterFolder) -> AdapterFolder:
    """An adapter as a model of this shape takes it; ModelError if its modules are not the model's.

    A head that is stored beside the embedding it is tied to is left out.
    """
    if shape.tie_embeddings and f"{targets.EMBEDDING}.weight" in found.whole:
        _check_head(found)
        kept = tuple(name for name in found.settings.modules_to_save if name != targets.HEAD)
        settings = dataclasses.replace(found.settings, modules_to_save=kept)
        found = dataclasses.replace(found, settings=settings)
    if shape.tie_embeddings and targets.HEAD in (
        *found.settings.target_modules,
        *found.settings.modules_to_save,
    ):
        raise one_matrix(found, "it trains the head apart from the embedding")
    there = targets.matrices(shape)
    missing = [name for name in found.settings.target_modules if name not in there]
    if missing:
        raise other_base(found, f"it has weights for {missing[0]}, and this model has no such module")
    known = targets.modules(shape)
    strange = [name for name in found.settings.modules_to_save if name not in known]
    if strange:
        raise other_base(found, f"it replaces {strange[0]}, and this model has no such module")
    try:
        adapted = resolve(shape, found.settings)
    except RecipeError as error:
        raise ModelError(
            f"the adapter {found.folder} does not fit this model: {error.cause}",
            f"load it with its own base; if this is it, it has to be trained anew: {error.remedy}",
        ) from error
    for target in adapted:
        if found.ranks[target.name] != target.r:
            raise ModelError(
                f"{found.folder}: {CONFIG} gives {target.name} rank {target.r}, and {WEIGHTS} has it in rank "
                f"{found.ranks[target.name]}",
                "the two files do not belong together; get the adapter again",
            )
    _check_complete(shape, found)
    return found


def _check_complete(shape: ModelShape, found: AdapterFolder) -> None:
    """ModelError where the config names modules of the model that the weights lack: in some layers, or in its last."""
    there = targets.matrices(shape)
    named = targets.meant(there, found.named)
    # Modules that are trained whole have no adapter, whoever names them.
    kept = {*found.ranks, *(name.removesuffix(".weight") for name in found.whole)}
    lacking = [name for name in there if name in named and name not in kept]
    if not lacking:
        return
    layers = {_layer(name) for name in found.ranks} - {None}
    if not {_layer(name) for name in lacking} & {None, *layers}:
        here = shape.num_layers
        raise other_base(found, f"it has weights for {len(layers)} layers, and this model has {here}")
    raise ModelError(
        f"{found.folder / WEIGHTS} lacks {lacking[0]}, which {CONFIG} names", "get the adapter again"
    )


def _layer(name: str) -> str | None:
    """A module's layer by number; None outside of the layers."""
    return name.split(".")[2] if name.startswith("model.layers.") else None


def _check_head(found: AdapterFolder) -> None:
    """ModelError for an adapter that replaces a tied embedding only: peft keeps the base's matrix as the head."""
    if f"{targets.HEAD}.weight" not in found.whole:
        raise one_matrix(found, "it trains the embedding apart from the head")


def _named(config: dict[str, Any]) -> str | tuple[str, ...]:
    """What `target_modules` says, unless another key takes some of it back."""
    if any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "layers_pattern")):
        return ()
    words = config["target_modules"] or ()
    if not isinstance(words, str):
        return tuple(words)
    return words if targets.is_pattern(words) else ()  # the weights say which modules there are


def other_base(found: AdapterFolder, cause: str) -> ModelError:
    """The answer to an adapter on a model that it was not made for."""
    made_for = f"; it was made for {found.base_name}" if found.base_name else ""
    return ModelError(
        f"the adapter {found.folder} does not fit this model: {cause}{made_for}", "load it with its own base"
    )


def one_matrix(found: AdapterFolder, cause: str) -> ModelError:
    """The answer to an adapter that takes a tied embedding and its head for two."""
    return ModelError(
        f"the adapter {found.folder} does not fit this model: {cause}, and this model's are one matrix",
        "train it again with peft's ensure_weight_tying=True, or with trimtab",
    )


def plain_name(key: str) -> str:
    """Our name of a tensor of the model's own: peft's words for its wrappers taken out."""
    return key.replace(".modules_to_save", "").replace(".base_layer", "")


def is_base_copy(key: str) -> bool:
    """Whether a tensor is the base's own, which peft writes along where embeddings or head are adapted."""
    return ".base_layer." in key


def _used(patterns: Mapping[str, Any] | None, modules: tuple[str, ...]) -> dict[str, Any]:
    """Of a config's patterns those that are the first to mean a module of the file: others are harmless in peft."""
    keys = list(patterns or {})
    first = {next((key for key in keys if targets.matching(key, name)), None) for name in modules}
    return {key: value for key, value in (patterns or {}).items() if key in first}


def config_of(
    shape: ModelShape, settings: LoraSettings, *, base_name: str, revision: str | None, tied_head: bool
) -> dict[str, Any]:
    """The content of adapter_config.json for peft.

    `tied_head`: the head is stored beside the embedding it is tied to, so that any version of peft replaces both.
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
    """Short names where they mean exactly these modules, whole ones otherwise."""
    names = [target.name for target in resolve(shape, settings)]
    short = targets.short_names(names)
    return short if [m.name for m in targets.select(shape, short)] == names else names


def _written_modules(shape: ModelShape, settings: LoraSettings) -> list[str]:
    """Short names where peft, which compares the ends of names letter by letter, takes them as we do."""
    meant = {name.rpartition(".")[0] for name in targets.select_modules(shape, settings.modules_to_save)}
    short = targets.short_names(sorted(meant))
    taken = {name for name in targets.modules(shape) if name.endswith(tuple(short))}
    return short if taken == meant else sorted(meant)
