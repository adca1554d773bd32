"""Validation rules of an adapter's settings, from Python, a recipe or peft's config. Does not import torch."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trimtab.facts.errors import RecipeError

_MOST_RANK = (1 << 31) - 1


class Rule(NamedTuple):
    """A predicate that is true for valid values, and a description of valid values for messages."""

    fits: Callable[[Any], bool]
    expected: str


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_RANK


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


RANK = Rule(_is_rank, f"an integer from 1 to {_MOST_RANK}")
ANY_ALPHA = Rule(lambda value: _is_number(value) and value != 0, "a finite number other than 0")
POSITIVE_ALPHA = Rule(lambda value: _is_number(value) and value > 0, "a finite number above 0")
PROBABILITY = Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number from 0 to below 1")
BOOLEAN = Rule(lambda value: isinstance(value, bool), "true or false")
NAMES = Rule(_is_name_list, "a list or tuple of module names")
TARGETS = Rule(
    lambda value: bool(value) and (isinstance(value, str) or _is_name_list(value)),
    "all-linear, a regular expression, or a list or tuple of module names",
)
DTYPE = Rule(lambda value: value in ("fp32", "bf16"), "fp32 or bf16")

_RULES = {
    "r": RANK,
    "target_modules": TARGETS,
    "lora_dropout": PROBABILITY,
    "use_rslora": BOOLEAN,
    "use_dora": BOOLEAN,
    "modules_to_save": NAMES,
    "dtype": DTYPE,
    "any_rank": BOOLEAN,
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises RecipeError for an invalid value of `LoraSettings`; patterns are validated against the model elsewhere.

    Example:
        >>> check_settings({"r": 8, "lora_dropout": 0.1})
    """
    alpha = ANY_ALPHA if settings.get("any_rank") is True else POSITIVE_ALPHA
    rules = {**_RULES, "lora_alpha": alpha}
    for key, value in settings.items():
        if key in rules:
            _check_value(f"lora.{key}", value, rules[key])
    _check_pattern("lora.rank_pattern", settings.get("rank_pattern", {}), RANK)
    _check_pattern("lora.alpha_pattern", settings.get("alpha_pattern", {}), alpha)


def _check_value(key: str, value: Any, rule: Rule) -> None:
    if not rule.fits(value):
        raise RecipeError(f"{key} is {reprlib.repr(value)}", f"it must be {rule.expected}")


def _check_pattern(key: str, value: Any, rule: Rule) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RecipeError(f"{key} is {reprlib.repr(value)}", "give a mapping of module names to numbers")
    for name, number in value.items():
        _check_value(f"{key}: {name}", number, rule)
