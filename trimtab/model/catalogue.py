"""Models known by their hub ids, with their shapes, for planning before a download. Does not import torch.

The data is `trimtab/facts/catalogue/models.json`. Each entry has the keys of the model's config.json that determine
its shape, the number of parameters that its publisher states, and the sources of both. A test per entry compares the
shape's number of parameters with the publisher's.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families import FAMILIES, shape_for_planning

DATA = "catalogue/models.json"
VERSION = 1
_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
_ROUNDED = re.compile(r"(\d+(?:\.(\d+))?)([MBT])")

SUFFIXES = frozenset(
    "instruct it chat base hf gguf awq gptq mlx bnb 2bit 3bit 4bit 6bit 8bit int4 int8 fp8 bf16 unsloth".split()  # noqa: SIM905
)
"""Last words of repository names that leave a model's shape as it is."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A model known by its hub id.

    Example:
        >>> entry = find_model("Qwen/Qwen3-8B")
        >>> entry.trainable, entry.shape.num_layers, entry.parameters
        (True, 36, 8190735360)
    """

    name: str
    """The hub id."""
    aliases: tuple[str, ...]
    """Hub ids of models with the same tensors, such as instruct variants."""
    config: Mapping[str, Any]
    """The keys of its config.json that determine its shape."""
    parameters: int | str
    """Number of parameters as published: an exact count, or a rounded one such as "671B"."""
    shape_source: str
    """Source of the shape."""
    parameters_source: str
    """Source of the number of parameters."""
    context_lengths: Mapping[str, int] = field(default_factory=dict)
    """`max_position_embeddings` of variants that differ in it."""

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model, computed on access."""
        return shape_for_planning(self.config, f"the catalogue's {self.name}")

    @property
    def trainable(self) -> bool:
        """Whether trimtab can train it; all entries can be planned."""
        return self.config["model_type"] in FAMILIES

    @property
    def source(self) -> str:
        """Sources of shape and number of parameters."""
        return "; ".join(dict.fromkeys((self.shape_source, self.parameters_source)))

    def has_parameters(self, count: int) -> bool:
        """Whether a count matches the published one: equal if that is exact, within its rounding otherwise.

        Example:
            >>> entry = find_model("deepseek-ai/DeepSeek-V3")
            >>> entry.parameters, entry.has_parameters(671_026_404_352), entry.has_parameters(670 * 10**9)
            ('671B', True, False)
        """
        if isinstance(self.parameters, int):
            return count == self.parameters
        value, decimals, unit = _rounded(self.parameters, self.name)
        return abs(count / _UNITS[unit] - value) <= 0.5 * 10.0**-decimals


def find_model(name: str) -> CatalogueEntry | None:
    """Finds a model by its hub id, or by the name after the organization if that is unambiguous.

    Args:
        name: a hub id or the id of a variant with the same shape, in any case.

    Returns:
        The entry, with the variant's context length; None for an unknown model.

    Example:
        >>> find_model("meta-llama/llama-3.1-8b-instruct").name
        'meta-llama/Llama-3.1-8B'
        >>> find_model("qwen3-8b").name, find_model("unknown/model")
        ('Qwen/Qwen3-8B', None)
    """
    return _by_name().get(name.strip().lower())


def known_models() -> tuple[str, ...]:
    """Returns the hub ids of all known models, without variants of the same shape.

    Example:
        >>> "Qwen/Qwen3-8B" in known_models()
        True
    """
    return tuple(entry.name for entry in _entries())


def catalogue_entries() -> tuple[CatalogueEntry, ...]:
    """Returns all entries, ordered by family and name.

    Example:
        >>> all(entry.source for entry in catalogue_entries())
        True
    """
    return _entries()


def suggest_models(name: str, count: int = 3) -> tuple[str, ...]:
    """Returns the known hub ids closest to a name, for errors about unknown models.

    Example:
        >>> suggest_models("Qwen/Qwen3-8")[0], suggest_models("unsloth/Qwen3-8B-bnb-4bit")[0]
        ('Qwen/Qwen3-8B', 'Qwen/Qwen3-8B')
    """
    names = {key: entry.name for key, entry in _by_name().items()}
    ids = {alias.lower(): alias for entry in _entries() for alias in (entry.name, *entry.aliases)}
    lowercase = name.strip().lower()
    base = _without_suffixes(lowercase)
    same = [key for key in names if _without_suffixes(key) == base]
    near = difflib.get_close_matches(lowercase, names, n=4 * count, cutoff=0.6)
    return tuple(dict.fromkeys(ids.get(key, names[key]) for key in [*same, *near]))[:count]


def _without_suffixes(name: str) -> str:
    """Returns a repository's name without its owner and without suffixes of tuning and file format."""
    words = name.rpartition("/")[2].split("-")
    while len(words) > 1 and words[-1] in SUFFIXES:
        words.pop()
    return "-".join(words)


@functools.cache
def _entries() -> tuple[CatalogueEntry, ...]:
    text = resources.files("trimtab.facts").joinpath(DATA).read_text(encoding="utf-8")
    return parse_catalogue(text)


def parse_catalogue(text: str) -> tuple[CatalogueEntry, ...]:
    """Parses and validates the entries of a catalogue file.

    Raises:
        ModelError: the file is damaged: not JSON of this version, an entry with a missing key, a duplicate name.
    """
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']} instead of {VERSION}")
        entries = tuple(_entry(model) for model in data["models"])
    except (ValueError, KeyError, TypeError) as err:
        raise ModelError(
            f"the catalogue of models ({DATA}) is damaged ({type(err).__name__}: {err})",
            "install trimtab again",
        ) from err
    names = [name.lower() for entry in entries for name in (entry.name, *entry.aliases)]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ModelError(
            f"the catalogue of models ({DATA}) names {duplicates[0]} twice", "install trimtab again"
        )
    return entries


def _entry(data: Mapping[str, Any]) -> CatalogueEntry:
    """Parses one entry; raises ValueError, KeyError or TypeError if it is incomplete."""
    entry = CatalogueEntry(
        name=data["name"],
        aliases=tuple(data["aliases"]),
        config=dict(data["config"]),
        parameters=data["parameters"],
        shape_source=data["source"]["shape"],
        parameters_source=data["source"]["parameters"],
        context_lengths=dict(data["context_lengths"]),
    )
    if not all(isinstance(name, str) and name.count("/") == 1 for name in (entry.name, *entry.aliases)):
        raise ValueError(f"{entry.name} or an alias of it is not a hub id")
    if not entry.context_lengths.keys() <= set(entry.aliases):
        raise ValueError(f"{entry.name} has a context length for a model that is not a variant of it")
    if not isinstance(entry.config["model_type"], str):
        raise ValueError(f"{entry.name} has no model_type")
    if isinstance(entry.parameters, str):
        _rounded(entry.parameters, entry.name)
    elif isinstance(entry.parameters, bool) or not isinstance(entry.parameters, int):
        raise ValueError(f"{entry.name} has {entry.parameters!r} parameters")
    if not all("https://" in source for source in (entry.shape_source, entry.parameters_source)):
        raise ValueError(f"{entry.name} has no source")
    return entry


def _variant(entry: CatalogueEntry, name: str) -> CatalogueEntry:
    """The entry for one of its names, with that variant's context length."""
    if name not in entry.context_lengths:
        return entry
    config = {**entry.config, "max_position_embeddings": entry.context_lengths[name]}
    return dataclasses.replace(entry, config=config)


def _rounded(text: str, name: str) -> tuple[float, int, str]:
    """(value, decimals, unit) of a rounded number of parameters."""
    match = _ROUNDED.fullmatch(text)
    if match is None:
        raise ValueError(f"{name} has {text!r} parameters")
    return float(match[1]), len(match[2] or ""), match[3]


@functools.cache
def _by_name() -> dict[str, CatalogueEntry]:
    """Entries by every lower-case name, and by the part after the organization if that is unique."""
    found = {
        name.lower(): _variant(entry, name) for entry in _entries() for name in (entry.name, *entry.aliases)
    }
    short: dict[str, dict[str, CatalogueEntry]] = {}
    for name, entry in found.items():
        short.setdefault(name.partition("/")[2], {}).setdefault(entry.name, entry)
    return found | {part: next(iter(same.values())) for part, same in short.items() if len(same) == 1}
