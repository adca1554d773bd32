"""Which keys and values of the recipe the cases cover, and why the others are left out."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from tools.sameness.sets import DEVICES, base_of, cases_of
from trimtab.recipe.renamed import rename_keys

NOT_COVERED: dict[str, str] = {
    "model.revision": "needs the hub",
    "data.train.split": "of hub datasets",
    "data.train.config": "of hub datasets",
    "data.train.revision": "of hub datasets",
    "data.cache_dir": "every run has a folder of its own; it changes no number",
    "output_dir": "every run has a folder of its own; it changes no number",
    "report_to": "copies metrics elsewhere",
    "report_to=tensorboard": "copies metrics elsewhere",
    "report_to=wandb": "copies metrics elsewhere",
    "model.attn_implementation=sdpa_efficient": "its backward is not deterministic, so that no bits can be compared",
    "model.attn_implementation=sdpa_cudnn": "its backward is not deterministic, so that no bits can be compared",
}
"""Key, or `key=value`, to the reason."""
SAME_KEYS = ("data.replay.sources", "data.eval.domain", "data.eval.general")
"""Lists of sources whose keys are those of `data.train`."""


def wanted(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, and `key=value` for each value of those with a fixed set of them."""
    for name, about in model.model_fields.items():
        key = f"{prefix}{name}"
        sections, values = _parts(about.annotation)
        if key in SAME_KEYS or not sections:
            yield key
        if key not in SAME_KEYS:
            for section in sections:
                yield from wanted(section, f"{key}.")
        yield from (f"{key}={value}" for value in values)


def _parts(annotation: Any) -> tuple[list[type[BaseModel]], list[str]]:
    """(sections, values) that a type allows."""
    if annotation is bool:
        return [], ["True", "False"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], []
    origin = get_origin(annotation)
    if origin is Literal:
        return [], [str(value) for value in get_args(annotation)]
    inside = get_args(annotation) if origin in (Union, types.UnionType, list, dict) else ()
    inside = inside[:1] if origin is dict else inside  # the keys; values are numbers and strings
    if hasattr(annotation, "__metadata__"):
        inside = (annotation.__origin__,)
    found = [_parts(one) for one in inside]
    sections = {section: None for one in found for section in one[0]}
    return list(sections), list(dict.fromkeys(value for one in found for value in one[1]))


def covered() -> set[str]:
    """Every key, and `key=value`, that some case sets."""
    found: set[str] = set()
    for device in DEVICES:
        base = base_of(device)
        for case in cases_of(device):
            _collect(_renamed(case.recipe(base, Path("/"))), "", found)
    return found


def _renamed(recipe: dict[str, Any]) -> dict[str, Any]:
    """A case's recipe under today's names; cases use former ones, which an older parent commit reads as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return rename_keys(recipe, {})


def _collect(value: Any, key: str, found: set[str]) -> None:
    if isinstance(value, dict):
        if key:
            found.update((key, *(f"{key}={name}" for name in value)))
        for name, one in value.items():
            _collect(one, f"{key}.{name}" if key else name, found)
    elif isinstance(value, list):
        found.add(key)
        for one in value:
            _collect(one, key, found)
    else:
        found.update((key, f"{key}={value}"))


def uncovered(recipe: type[BaseModel]) -> list[str]:
    """Keys and values that no case covers and that are not in `NOT_COVERED`."""
    have = covered()
    return [one for one in wanted(recipe) if one not in have and one not in NOT_COVERED]
