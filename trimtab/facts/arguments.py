"""Validates arguments of the Python API: a value of the wrong type is an error that names the argument."""

from __future__ import annotations

import difflib
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import described


def check_int(value: object, name: str, *, least: int | None = None) -> int:
    """Returns an integer, numpy's included, as int; RecipeError for anything else, such as 3.5, "3" or True.

    Args:
        value: what the user passed.
        name: the argument, for the message.
        least: the minimum; None for no minimum.

    Example:
        >>> check_int(3, "max_new_tokens", least=1)
        3
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if least is None or number >= least:
            return number
        raise RecipeError(f"{name} is {number}", f"give at least {least}")
    remedy = "give a whole number" if least is None else f"give a whole number of at least {least}"
    raise RecipeError(f"{name} is {described(value)}", remedy)


def check_float(value: object, name: str, remedy: str) -> float:
    """Returns a real number, numpy's included, as int or float; RecipeError with the remedy for anything else.

    Example:
        >>> check_float(0.7, "temperature", "give 0 or more")
        0.7
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    raise RecipeError(f"{name} is {described(value)}", remedy)


def check_optional_str(value: object, name: str) -> str | None:
    """Returns a str or None unchanged; RecipeError for anything else.

    Example:
        >>> check_optional_str("Answer briefly.", "system")
        'Answer briefly.'
    """
    if value is None or isinstance(value, str):
        return value
    raise RecipeError(f"{name} is {described(value)}", "give a text, or None")


def plain_value(value: object, name: str) -> Any:
    """Converts a recipe's value to JSON types: numpy scalars, paths, dtypes and devices become numbers and strings.

    RecipeError for an object that a recipe cannot contain.

    Example:
        >>> from pathlib import Path
        >>> plain_value({"name": Path("models/a")}, "model")
        {'name': 'models/a'}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    raise RecipeError(
        f"{name} is {described(value)}", "give a value that a recipe can contain: text, number, list, dict"
    )


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises RecipeError for the first unknown name and suggests the nearest known one.

    Example:
        >>> refuse_unknown(["seed"], ["seed", "stop"], "option")
    """
    names = list(known)
    for name in given:
        if name not in names:
            similar = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            raise RecipeError(
                f"there is no {what} {name!r}",
                f"did you mean {similar[0]!r}?" if similar else f"choose one of {', '.join(names)}",
            )
