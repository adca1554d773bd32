"""Reads the two files of an adapter folder and validates every key and tensor. Does not import torch."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from trimtab.adapt import targets
from trimtab.adapt.settings_rules import ANY_ALPHA, BOOLEAN, NAMES, PROBABILITY, RANK, Rule
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError
from trimtab.facts.files import read_json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix of every name in peft's files."""
BASE_KEY = "trimtab_base"
"""Key of the base model's source, revision and checksums in the safetensors header; only trimtab writes it."""
FACTORS_A = (".lora_A.weight", ".lora_embedding_A")
"""Name suffixes of the A factors, which have one row per rank."""

_FACTORS = (*FACTORS_A, ".lora_B.weight", ".lora_embedding_B")
_FORMATS = ("F16", "BF16", "F32", "F64")
_REFUSED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, [], {}),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
}
"""Unsupported keys that affect the computation, each with the values that have no effect and are accepted."""
_HARMLESS = frozenset((
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_config",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "task_type",
))  # fmt: skip
"""Keys about an adapter's origin, initialization or modules, which are irrelevant or follow from its weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` that also change the base weights."""


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_name_or_names(value: Any) -> bool:
    return _is_text(value) or NAMES.fits(value)


def _or_null(rule: Rule) -> Rule:
    """The rule for a key that may be null, which is equivalent to absent."""
    return Rule(lambda value: value is None or rule.fits(value), rule.expected)


def _by_module(rule: Rule, expected: str) -> Rule:
    """The rule for mappings from valid patterns to valid values."""

    def all_fit(value: Any) -> bool:
        if not isinstance(value, dict):
            return value is None
        return all(targets.is_suffix_pattern(key) and rule.fits(item) for key, item in value.items())

    return Rule(all_fit, f"{expected} by modules' names or regular expressions")


class _Key(NamedTuple):
    """A config key that is read."""

    missing: Any
    """Default if the key is absent: peft's, except for the rank."""
    rule: Rule


_KEYS = {
    "r": _Key(None, RANK),
    "lora_alpha": _Key(8, ANY_ALPHA),
    "lora_dropout": _Key(None, _or_null(PROBABILITY)),
    "use_rslora": _Key(None, _or_null(BOOLEAN)),
    "use_dora": _Key(None, _or_null(BOOLEAN)),
    "rank_pattern": _Key(None, _by_module(RANK, "integers, 1 or more,")),
    "alpha_pattern": _Key(None, _by_module(ANY_ALPHA, "finite numbers other than 0")),
    "target_modules": _Key(None, Rule(_is_name_or_names, "a text, a list of texts or null")),
    "base_model_name_or_path": _Key(None, Rule(_is_text, "a text or null")),
}


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config's keys; the used ones are validated and always present."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"{folder} is not an adapter folder (no {CONFIG} in it)", "give a folder that peft or "
                         "`trimtab export peft` wrote")  # fmt: skip
    try:
        config = read_json_object(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})", "download the adapter again") from error
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise ModelError(
            f"{path} does not describe a LoRA adapter (peft_type {_short(kind)})",
            "give a LoRA adapter, or merge this one with peft first",
        )
    config = {**{key: known.missing for key, known in _KEYS.items()}, **config}
    for key, (_, rule) in _KEYS.items():
        if not rule.fits(config[key]):
            raise ModelError(f"{path}: {key} is {_short(config[key])}", f"it must be {rule.expected}")
    _check_meaning(path, config)
    return config


def _check_meaning(path: Path, config: dict[str, Any]) -> None:
    """Raises ModelError for a LoRA variant with another computation."""
    for key, harmless in _REFUSED.items():
        if key in config and config[key] not in harmless:
            raise ModelError(
                f"{path}: {key} is {_short(config[key])}, which is not supported", "merge it with peft first"
            )
    for key in config.keys() - _KEYS.keys() - _REFUSED.keys() - _HARMLESS:
        value = config[key]
        if value is True or (isinstance(value, (dict, list)) and value):
            raise ModelError(
                f"{path}: {key} is {_short(value)}, and trimtab does not support this key",
                "merge it with peft first",
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights is {init!r}: it also changed the base weights",
            "convert it with peft (save_pretrained(path_initial_model_for_weight_conversion=…)), or merge it there",
        )


def _short(value: Any) -> str:
    """Abbreviates a config value; true, false and null as in JSON."""
    plain = {True: "true", False: "false", None: "null"}
    return plain[value] if value is None or isinstance(value, bool) else reprlib.repr(value)


class Header(NamedTuple):
    """The tensors in the weights file's header; names without the prefix."""

    dims: dict[str, list[int]]
    dtypes: dict[str, str]
    base: BaseWeights | None
    """Source, revision and checksums of the base model, if trimtab wrote the file."""


def read_header(folder: Path) -> Header:
    """Reads the weights' names, sizes and dtypes."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise ModelError(
            f"{folder} has no {WEIGHTS}"
            + (", only a pickle, and loading one can execute hidden code" if pickled else ""),
            "save the adapter with safe_serialization=True" if pickled else "complete the download",
        )
    try:
        with safe_open(path, framework="numpy") as file:
            keys = list(file.keys())
            dims = {key.removeprefix(PREFIX): file.get_slice(key).get_shape() for key in keys}
            dtypes = {key.removeprefix(PREFIX): file.get_slice(key).get_dtype() for key in keys}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a complete safetensors file ({error})", "download the adapter again"
        ) from error
    for key in dims:
        _check_tensor(path, key, dims[key], dtypes[key])
    return Header(dims, dtypes, _base_record(path, metadata[BASE_KEY]) if BASE_KEY in metadata else None)


def _check_tensor(path: Path, key: str, dims: list[int], dtype: str) -> None:
    if dtype not in _FORMATS:
        raise ModelError(
            f"{path}: {key} has dtype {dtype}",
            f"it must be one of {', '.join(_FORMATS)}; save it again in one of these",
        )
    if key.endswith(_FACTORS) and len(dims) != 2:
        raise ModelError(f"{path}: {key} has shape {dims}", "it must be a matrix; download the adapter again")


def _base_record(path: Path, text: str) -> BaseWeights:
    try:
        return BaseWeights.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: {BASE_KEY} in its header is {_short(text)}",
            "it must be JSON with the base's source, revision and files, each with size and sha256; export the "
            "adapter again",
        ) from error
