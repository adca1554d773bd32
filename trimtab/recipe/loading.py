"""Loads recipes from files and `key=value` overrides, and dumps them as YAML."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import path_of, shortened
from trimtab.facts.run_layout import CHECKPOINTS
from trimtab.recipe import problems
from trimtab.recipe.keys import Recipe, Shorthand
from trimtab.recipe.renamed import current_path, current_path_of_override, rename_keys
from trimtab.recipe.shipped import shipped_recipes
from trimtab.recipe.yaml_text import Path, read, write

PAIRS = {
    ("max_steps", "num_train_epochs"): "both set the length of the run",
    ("warmup_steps", "warmup_ratio"): "both set the warm-up",
    ("recompute", "gradient_checkpointing"): "both set the recompute policy",
}
"""Pairs of mutually exclusive keys, and what both set. Overriding one removes the other from the file's recipe."""
NULLS = ("null", "~")
"""Values with which an override removes a key from the recipe."""


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Reads and validates a recipe file, or a recipe that ships with trimtab, given by name (`own-text`).

    The error lists all mistakes, each with its line and the nearest key.

    Example:
        >>> recipe = load("recipes/smollm2-135m-math.yaml", ["learning_rate=1e-4"])  # doctest: +SKIP
    """
    file, ours = path_of(path, "the recipe"), shipped_recipes()
    if not file.exists() and str(path) in ours:
        file = ours[str(path)]
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = difflib.get_close_matches(file.stem, ours, n=1, cutoff=0.7) if file.name == str(path) else []
        raise RecipeError(
            f"there is no recipe at {file}",
            f"did you mean {near[0]}, which ships with trimtab? For a file check the path"
            if near
            else f"check the path, or name a recipe that ships with trimtab: {', '.join(ours)}",
        ) from error
    except IsADirectoryError as error:
        if (file / CHECKPOINTS).is_dir():
            raise RecipeError(
                f"{file} is a run folder", f"continue that run with `trimtab train --resume {file}`"
            ) from error
        raise RecipeError(f"{file} is a folder", "give the recipe file inside it") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not UTF-8 text", "give a YAML file in UTF-8") from error
    except OSError as error:
        raise RecipeError(f"{file} cannot be read: {error.strerror}", "check its permissions") from error
    return loads(text, overrides, name=file.name if file in ours.values() else str(file))


def loads(text: str, overrides: Sequence[str] = (), *, name: str = "recipe.yaml") -> Recipe:
    """Like `load`, from text. `name` is used in messages and for the default `output_dir`.

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
    _check_conflicts(overrides)
    for override in overrides:
        _apply_override(override, data, where)
    if "output_dir" not in data:
        data["output_dir"] = f"runs/{FilePath(name).stem}"
    return build(data, where=where, name=name)


def build(data: dict[str, Any], *, where: dict[Path, str] | None = None, name: str = "the recipe") -> Recipe:
    """Builds a recipe from plain data, with the same checks and messages as for a file.

    Example:
        >>> build({"model": "starter", "data": {"train": ["notes.txt"]}}).model.name
        'starter'
    """
    data = rename_keys(_plain(data), where if where is not None else {})
    unencodable = list(problems.unencodable(data, where or {}))
    if unencodable:
        raise problems.combine(unencodable, name)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise problems.as_recipe_error(error, where or {}, name) from None


def _plain(value: Any) -> Any:
    """Converts Python values to YAML types: paths to strings, tuples to lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fsdecode(value) if isinstance(value, os.PathLike) else value


def dump(recipe: Recipe) -> str:
    """Dumps the complete recipe, including defaults, as YAML that loads to an equal recipe.

    With `lora.adapter`, rank and modules come from that adapter, so their defaults are omitted.
    """
    data = to_dict(recipe)
    if recipe.lora is not None and recipe.lora.adapter is not None:
        data["lora"] = {"adapter": recipe.lora.adapter}
    return write(data)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Returns the complete recipe as plain data, for JSON."""
    return recipe.model_dump(mode="json")


def _apply_override(override: str, data: dict[str, Any], where: dict[Path, str]) -> None:
    """Applies one override `a.b.0.c=value` to the data, in place. The value is YAML: `2e-5`, `true`, `[a, b]`, strings.

    `null` removes the key, so that its default applies, except for `save_steps`, where null is a valid value.
    """
    path, text = _parse(override)
    path = current_path_of_override(path)
    label = f"from '{_quoted(override)}'"
    if text.strip() in NULLS and problems.is_default_null(path):
        _remove_key(path, data)
        return
    value: Any = text
    if not problems.expects_text(path) or text in (*NULLS, ""):
        value = _read_value(text, f"'{_quoted(override)}'")
    parent = _descend(path, data, label)
    last = path[-1]
    if isinstance(parent, list):
        parent[_index(last, parent, path, label)] = value
    else:
        parent[str(last)] = value
        for pair in PAIRS if value is not None else ():
            if len(path) == 1 and last in pair:
                data.pop(pair[1 - pair.index(str(last))], None)
    for old in [key for key in where if key[: len(path)] == path]:
        del where[old]
    where[path] = label


def _read_value(text: str, name: str) -> Any:
    """Reads the value of an override as YAML. A value that begins with `*` is a glob, not an alias of YAML."""
    return text if text.startswith("*") else read(text, name)[0]


def _quoted(override: str) -> str:
    """Returns an override as messages quote it, shortened if it is long."""
    return override if len(override) <= 100 else shortened(override, 100)


def _remove_key(path: Path, data: dict[str, Any]) -> None:
    """Removes a key from the data if it is present."""
    current: Any = data
    for part in path[:-1]:
        if isinstance(current, list):
            current = current[part] if isinstance(part, int) and part < len(current) else None
        elif isinstance(current, dict):
            current = current.get(str(part))
    if isinstance(current, dict):
        current.pop(str(path[-1]), None)


def _parse(override: str) -> tuple[Path, str]:
    """Splits an override into (path of the key, text of the value)."""
    keys, equals, text = override.partition("=")
    parts = keys.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(
            f"'{_quoted(override)}' is not an override", "write key=value, for example learning_rate=1e-4"
        )
    return _path(parts), text


def _path(parts: Sequence[str]) -> Path:
    """Returns the path of a dotted key. A mapping with names that users choose (`lora.rank_pattern`) is followed by one
    name, which may contain dots."""
    path = problems.as_path(".".join(parts))
    for length in range(1, len(path)):
        if problems.values_at(path[:length]) is not None:
            return (*path[:length], ".".join(parts[length:]))
    return path


def _check_conflicts(overrides: Sequence[str]) -> None:
    """Raises for conflicting overrides: a key given twice, a key before its whole section, both keys of a `PAIRS`
    pair."""
    given: dict[Path, str] = {}
    for override in overrides:
        path, text = _parse(override)
        path = current_path(path)
        section = problems.section_at(path)
        if section is not None and issubclass(section, Shorthand) and not problems.is_list(path):
            path = (*path, section.main_key()) if text[:1] not in "{" else path
        twice = next((old for old in given if old == path or _sets_key(given[old], old, path)), None)
        if twice is not None:
            raise RecipeError(
                f"'{_quoted(given[twice])}' and '{_quoted(override)}' set the same key twice",
                "give one of them",
            )
        lost = next((given[old] for old in given if old[: len(path)] == path), None)
        if lost is not None:
            raise RecipeError(
                f"'{_quoted(override)}' would discard '{_quoted(lost)}', which is given before it",
                f"give '{_quoted(lost)}' after it, or leave it out",
            )
        given[path] = override
    for pair in PAIRS:
        first, second = (_value_of(given.get((key,))) for key in pair)
        if first is not None and second is not None:
            raise _conflict(pair, first, second)


def _sets_key(override: str, whole: Path, path: Path) -> bool:
    """Whether an override of a section or list (`data.train=[a, b]`) sets a key inside it (`data.train.0.source`)."""
    if len(path) <= len(whole) or path[: len(whole)] != whole:
        return False
    value = _read_value(_parse(override)[1], f"'{_quoted(override)}'")
    for depth in range(len(whole), len(path)):
        part, section = path[depth], problems.section_at(path[:depth])
        if isinstance(part, int):
            items = value if isinstance(value, list) else [value]  # a single source is a list of length 1
            if part >= len(items):
                return False
            value = items[part]
            continue
        if isinstance(value, str) and section is not None and issubclass(section, Shorthand):
            value = {section.main_key(): value}
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _value_of(override: str | None) -> str | None:
    """The value of an override; None if there is no override or if it removes the key."""
    text = (override or "").partition("=")[2].strip()
    return None if text in (*NULLS, "") else text


def _conflict(pair: tuple[str, str], first: str, second: str) -> RecipeError:
    how = PAIRS[pair]
    if pair[0] == "recompute":
        same = first == {"true": "block", "false": "none"}.get(second)
        how = "set the same policy in two ways" if same else "contradict each other"
    return RecipeError(f"'{pair[0]}={first}' and '{pair[1]}={second}' {how}", "give one of them")


def _descend(path: Path, data: dict[str, Any], label: str) -> Any:
    """Returns the mapping or list that contains the last part of the path; creates it if it is missing."""
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
            child = current[key] = _expand(path[:depth], child, label)
        if isinstance(path[depth], int) and isinstance(child, dict) and child:
            child = current[key] = [child]
        current = child
    return current


def _expand(path: Path, value: Any, label: str) -> dict[str, Any] | list[Any]:
    """Expands `model: NAME` to `model: {name: NAME}`, so that a key inside it can be set."""
    section = problems.section_at(path)
    if section is None and problems.values_at(path) is None:
        raise RecipeError(
            f"{problems.dotted(path)} has no keys inside it ({label})", f"write {problems.dotted(path)}=value"
        )
    if value is None:
        return {}
    if isinstance(value, str) and section is not None and issubclass(section, Shorthand):
        return {section.main_key(): value}
    raise RecipeError(
        f"{problems.dotted(path)} is not a mapping ({label})",
        f"write {problems.dotted(path)} as a mapping of keys to values",
    )


def _index(part: str | int, items: list[Any], path: Path, label: str) -> int:
    if isinstance(part, int) and part < len(items):
        return part
    raise RecipeError(
        f"{problems.dotted(path[:-1])} is a list of length {len(items)} and has no item '{part}' ({label})",
        f"count from 0 to {len(items) - 1}" if items else "give the whole list",
    )
