"""Former names of recipe keys, which are still accepted."""

from __future__ import annotations

import warnings
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.recipe.yaml_text import Path

RENAMED: dict[tuple[str, ...], str] = {
    ("unpacked_layers",): "dequantized_layers",
    ("data", "eval_windows"): "eval_sequences",
}
"""Maps the path of the former name to the last part of the new one."""
_DEFAULTS: dict[tuple[str, ...], object] = {("unpacked_layers",): "auto", ("data", "eval_windows"): 64}
"""Default values under the former names. Earlier versions wrote them into each run folder's recipe.yaml, so they give
no warning."""


def current_path(path: Path) -> Path:
    """The path with the new name of its key.

    Example:
        >>> current_path(("data", "eval_windows")), current_path(("seed",))
        (('data', 'eval_sequences'), ('seed',))
    """
    new = RENAMED.get(tuple(map(str, path)))
    return path if new is None else (*path[:-1], new)


def current_path_of_override(path: Path) -> Path:
    """`current_path` of an override on the command line, with a FutureWarning for a former name."""
    current = current_path(path)
    if current != path:
        _warn(".".join(map(str, path)), str(current[-1]))
    return current


def _warn(former: str, new: str) -> None:
    message = f"the recipe key {former} is now called {new}; the former name still works"
    warnings.warn(message, FutureWarning, stacklevel=3)


def rename_keys(data: dict[str, Any], where: dict[Path, str]) -> dict[str, Any]:
    """Replaces former names of keys in a copy of the recipe's data, with a FutureWarning for each.

    Args:
        data: the recipe as plain data.
        where: the place of each key in the input, for messages; former names in it are replaced too.

    Raises:
        RecipeError: both names of a key are given.

    Example:
        >>> rename_keys({"unpacked_layers": "auto"}, {})
        {'dequantized_layers': 'auto'}
    """
    for path, new in RENAMED.items():
        section: Any = data
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        old = path[-1]
        if not isinstance(section, dict) or old not in section:
            continue
        dotted = ".".join(path)
        if new in section:
            raise RecipeError(
                f"{dotted} is the former name of {'.'.join(map(str, current_path(path)))}, and both are given",
                f"leave {dotted} out",
            )
        if section[old] != _DEFAULTS[path]:
            _warn(dotted, new)
        renamed = {new if key == old else key: value for key, value in section.items()}
        data = {**data, path[0]: renamed} if len(path) > 1 else renamed
        if path in where:
            where[current_path(path)] = where.pop(path)
    return data
