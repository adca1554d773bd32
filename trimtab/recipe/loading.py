"""A recipe from a file and `key=value` overrides, and back to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from trimtab.facts.errors import RecipeError
from trimtab.recipe import problems
from trimtab.recipe.keys import Recipe, Shorthand
from trimtab.recipe.shipped import shipped
from trimtab.recipe.yaml_text import Path, read, write

PAIRS = (
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("recompute", "gradient_checkpointing"),
)
"""Two ways of saying one thing: an override of one replaces what the file says with the other."""


def load(path: str | FilePath, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe file, or one that ships with trimtab, by its bare name (`own-text`).

    Every mistake is named at once, with its line and the nearest key.

    Example:
        >>> recipe = load("recipes/smollm2-135m-math.yaml", ["learning_rate=1e-4"])  # doctest: +SKIP
    """
    file, ours = FilePath(path), shipped()
    if not file.exists() and str(path) in ours:
        file = ours[str(path)]
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(
            f"there is no recipe at {file}",
            f"check the path, or name one that ships with trimtab: {', '.join(ours)}",
        ) from error
    except IsADirectoryError as error:
        raise RecipeError(f"{file} is a folder", "give the recipe file inside it") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not UTF-8 text", "a recipe is a YAML file") from error
    except OSError as error:
        raise RecipeError(f"{file} cannot be read: {error.strerror}") from error
    return loads(text, overrides, name=file.name)


def loads(text: str, overrides: Sequence[str] = (), *, name: str = "recipe.yaml") -> Recipe:
    """`load` from text; `name` stands in messages and gives the default `output_dir`.

    Example:
        >>> loads("model: starter\\ndata: {train: starter:math}", ["max_steps=20"]).max_steps
        20
    """
    data, lines = read(text, name)
    if data is None:
        raise RecipeError(f"{name} is empty", "a recipe has at least `model:` and `data: {train: ...}`")
    if not isinstance(data, dict):
        raise RecipeError(
            f"{name} must be a mapping of keys to values", "start with a line such as `model: ...`"
        )
    where = {path: f"line {line}" for path, line in lines.items()}
    for override in overrides:
        _apply(override, data, where)
    _refuse_both_of_a_pair(overrides)
    if "output_dir" not in data:
        data["output_dir"] = f"runs/{FilePath(name).stem}"
    return build(data, where=where, name=name)


def build(data: dict[str, Any], *, where: dict[Path, str] | None = None, name: str = "the recipe") -> Recipe:
    """A recipe from plain data, with the same checks and messages as from a file.

    Example:
        >>> build({"model": "starter", "data": {"train": ["notes.txt"]}}).model.name
        'starter'
    """
    unwritable = list(problems.unwritable(data, where or {}))
    if unwritable:
        raise problems.combine(unwritable, name)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise problems.as_recipe_error(error, where or {}, name) from None


def dump(recipe: Recipe) -> str:
    """The complete recipe, defaults written out, as YAML that loads to an equal recipe.

    An adapter that a run starts from brings its own rank and modules: defaults beside it would be untrue.
    """
    data = to_dict(recipe)
    if recipe.lora is not None and recipe.lora.adapter is not None:
        data["lora"] = {"adapter": recipe.lora.adapter}
    return write(data)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The complete recipe as plain data, for JSON."""
    return recipe.model_dump(mode="json")


def _apply(override: str, data: dict[str, Any], where: dict[Path, str]) -> None:
    """Set one `a.b.0.c=value` in the data, in place. The value is YAML: `2e-5`, `true`, `[a, b]`, words."""
    keys, equals, text = override.partition("=")
    parts = keys.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(
            f"'{override}' is not an override", "write key=value, for example learning_rate=1e-4"
        )
    path = _path(parts)
    label = f"from '{override}'"
    value: Any = text
    if not problems.expects_text(path) or text in ("null", "~", ""):
        value = read(text, label)[0]
    parent = _descend(path, data, label)
    last = path[-1]
    if isinstance(parent, list):
        parent[_index(last, parent, path, label)] = value
    else:
        parent[str(last)] = value
        for pair in PAIRS:
            if len(path) == 1 and last in pair and value is not None:
                data.pop(pair[1 - pair.index(str(last))], None)
    for old in [key for key in where if key[: len(path)] == path]:
        del where[old]
    where[path] = label


def _path(parts: Sequence[str]) -> Path:
    """The parts of a dotted key; what follows a key of free names (`lora.rank_pattern`) is one name, dots and all."""
    path: Path = tuple(int(part) if part.isdecimal() else part for part in parts)
    for length in range(1, len(path)):
        if problems.values_at(path[:length]) is not None:
            return (*path[:length], ".".join(parts[length:]))
    return path


def _refuse_both_of_a_pair(overrides: Sequence[str]) -> None:
    """An override replaces what the file says the other way; two overrides must not replace each other."""
    given = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if value.strip() not in ("null", "~", ""):
            given[key.strip()] = override
    for first, second in PAIRS:
        if first in given and second in given:
            raise RecipeError(
                f"'{given[first]}' and '{given[second]}' say the same thing in two ways", "give one of them"
            )


def _descend(path: Path, data: dict[str, Any], label: str) -> Any:
    """The mapping or list that holds the last part of the path, made where it is missing."""
    current: Any = data
    for depth, part in enumerate(path[:-1], start=1):
        key = _index(part, current, path[:depth], label) if isinstance(current, list) else str(part)
        if isinstance(current, dict) and key not in current:
            parent = problems.section_at(path[: depth - 1])
            if parent is None or key not in parent.model_fields:
                raise RecipeError(*problems.unknown_key(path[:depth], f" ({label})"))
            current[str(key)] = None
        child = current[key]
        if not isinstance(child, dict | list):
            child = current[key] = _expanded(path[:depth], child, label)
        if isinstance(path[depth], int) and isinstance(child, dict) and child:
            child = current[key] = [child]
        current = child
    return current


def _expanded(path: Path, value: Any, label: str) -> dict[str, Any] | list[Any]:
    """`model: NAME` opened to `model: {name: NAME}` so that a key inside it can be set."""
    section = problems.section_at(path)
    if section is None and problems.values_at(path) is None:
        raise RecipeError(f"{problems.dotted(path)} has no keys inside it ({label})")
    if value is None:
        return {}
    if isinstance(value, str) and section is not None and issubclass(section, Shorthand):
        return {section.main_key(): value}
    raise RecipeError(f"{problems.dotted(path)} is not a mapping ({label})")


def _index(part: str | int, items: list[Any], path: Path, label: str) -> int:
    if isinstance(part, int) and part < len(items):
        return part
    raise RecipeError(
        f"{problems.dotted(path[:-1])} is a list of {len(items)} and has no item '{part}' ({label})",
        f"count from 0 to {len(items) - 1}" if items else "give the whole list",
    )
