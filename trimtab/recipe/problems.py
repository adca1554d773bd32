"""Converts pydantic's validation errors into one RecipeError that lists every problem with its remedy."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trimtab.facts.errors import RecipeError
from trimtab.recipe.keys import Recipe
from trimtab.recipe.other_names import OTHER_NAMES, OTHER_VALUES, PEFT_NAMES, UNSUPPORTED_NAMES
from trimtab.recipe.yaml_text import Path

_MESSAGES = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (in quotes if it looks like a number)",
    "list_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}


def as_recipe_error(error: ValidationError, where: dict[Path, str], name: str) -> RecipeError:
    """Converts pydantic's errors into one RecipeError. `where` maps paths to their places in the input, for
    messages."""
    details = error.errors()
    # A misspelt required key is reported once, not as an unknown key and a missing one.
    found = [nearest_key(d["loc"]) for d in details if d["type"] == "extra_forbidden"]
    misspelt = {path[:length] for path in found if path for length in range(1, len(path) + 1)}
    details = [d for d in details if d["type"] != "missing" or d["loc"] not in misspelt]
    alternatives = {_key_of(d["loc"]): d["input"] for d in reversed(details) if _key_of(d["loc"]) != d["loc"]}
    problems = [problem for d in details if _key_of(d["loc"]) == d["loc"] for problem in _problem(d, where)]
    problems += [_no_matching_type(path, value, where) for path, value in alternatives.items()]
    return combine(problems, name)


def _key_of(path: Path) -> Path:
    """Returns the path of the key itself, without the names of the types that pydantic tried, which it appends."""
    for length, part in enumerate(path):
        last = length == len(path) - 1 > 0
        if isinstance(part, str) and (
            "[" in part or part.startswith("constrained-") or (last and part in _SCALAR_TYPES)
        ):
            return path[:length]
    return path


_MAPPING_TYPES = ("model_type", "dict_type", "model_attributes_type")
_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_SCALAR_TYPES = ("bool", "float", "int", "str")


def _as_yaml(value: Any) -> str:
    """Formats a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return value if isinstance(value, str) else _inline(value)


def _no_matching_type(path: Path, value: Any, where: dict[Path, str]) -> tuple[str, str | None]:
    """(cause, remedy) for a value that matches none of the types of its key."""
    if value is None:
        return _missing_value(path, where)
    field = _field(path)
    examples = (field.examples if field else None) or []
    formatted = " or ".join(f"`{path[-1]}: {_as_yaml(example)}`" for example in examples)
    cause = f"{dotted(path)} cannot be {_as_yaml(value)[:80]}{_place(path, where)}"
    return cause, f"write it like {formatted}" if formatted else None


def _missing_value(path: Path, where: dict[Path, str]) -> tuple[str, str]:
    """(cause, remedy) for a key that needs a value and has none: nothing after the colon, or `null`."""
    field = _field(path)
    example = f", for example `{path[-1]}: {_as_yaml(field.examples[0])}`" if field and field.examples else ""
    if field is not None and field.is_required():
        omit = ""
    else:
        as_override = _is_override(_place(path, where)) and is_default_null(path)
        omit = ", or leave it out" + (f" ({dotted(path)}=null)" if as_override else "")
    return f"{dotted(path)} has no value{_place(path, where)}", f"give one{example}{omit}"


def combine(found: list[tuple[str, str | None]], name: str) -> RecipeError:
    """Combines problems into one error; several are listed, one per line."""
    if len(found) == 1:
        return RecipeError(*found[0])
    listed = "".join(f"\n  - {cause}{'; ' + remedy if remedy else ''}" for cause, remedy in found)
    return RecipeError(f"{len(found)} problems in {name}:{listed}")


def _problem(detail: Any, where: dict[Path, str]) -> Iterator[tuple[str, str | None]]:
    path: Path = detail["loc"]
    kind, value, place = detail["type"], detail["input"], _place(path, where)
    if kind == "recipe_rules":
        for text in detail["ctx"]["problems"]:
            cause, _, remedy = text.partition("; ")
            yield cause, remedy
    elif kind == "unusable_name":
        yield f"{dotted(path)} {detail['ctx']['cause']}{place}", detail["ctx"]["remedy"]
    elif kind == "extra_forbidden":
        yield unknown_key(path, place, value)
    elif value is None and path:
        yield _missing_value(path, where)
    elif kind == "missing":
        field = _field(path)
        assert field is not None
        remedy = f"for example `{path[-1]}: {_inline(field.examples[0])}`" if field.examples else None
        yield f"missing key '{dotted(path)}'{_place(path[:-1], where)}", remedy
    elif kind == "literal_error":
        choices = [word.strip("'") for word in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        choices = [word.lower() if word in ("True", "False") else word for word in choices]
        cause = f"{dotted(path)}: {_inline(value)} is not one of {', '.join(choices)}{place}"
        other = OTHER_VALUES.get(dotted(path), {}).get(str(value).lower())
        similar = [other] if other else difflib.get_close_matches(str(value), choices, n=1)
        yield cause, f"did you mean '{similar[0]}'?" if similar else None
    else:
        sentence = _MESSAGES.get(kind) or detail["msg"].replace("Input should", "must")
        cause = f"{dotted(path) or 'the recipe'} {sentence}, not {_inline(value)}{place}"
        yield _wrong_type(path, kind, value, cause)


def _wrong_type(path: Path, kind: str, value: Any, cause: str) -> tuple[str, str | None]:
    """(cause, remedy) for a value of the wrong type: the same value as YAML writes it, or an example."""
    key, field, text = (path or ("",))[-1], _field(path), str(value).lower()
    if path == ("gradient_checkpointing",) and text == "unsloth":
        return cause, "write recompute: offload instead"
    if kind == "bool_type" and text in _BOOLEANS:
        return cause, f"write `{key}: {_BOOLEANS[text]}`"
    if kind == "float_type" and isinstance(value, str) and _is_number(text):
        return cause, f"write it without quotes: `{key}: {value}`"
    if kind in _MAPPING_TYPES and field is not None and field.examples:
        return cause, f"write it like `{key}: {_as_yaml(field.examples[0])}`"
    return cause, None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text) is not None


def unknown_key(path: Path, place: str, value: Any = "") -> tuple[str, str]:
    """(cause, remedy) for a key that does not exist at its level; the remedy suggests the nearest key.

    Recipes of other tools list keys that are off (`fp16: false`, `deepspeed:`). Such a key can be left out.
    """
    key, parent = str(path[-1]), path[:-1]
    cause = f"unknown key '{key}'{' in ' + dotted(parent) if parent else ''}{place}"
    if key in UNSUPPORTED_NAMES and (parent != ("lora",) or key in PEFT_NAMES):
        remedy = UNSUPPORTED_NAMES[key]
        if (value is None or value is False) and "leave it out" not in remedy and key != "trust_remote_code":
            return cause, f"leave it out: it {'is false' if value is False else 'has no value'}"
        return cause, remedy
    typed_as_override = _is_override(place)
    if "." in key and as_path(key) in all_keys():
        return cause, f"write `{nested(as_path(key))}`; dots are for the command line"
    similar = nearest_key(path)
    is_optional = similar is None or (key in OTHER_NAMES and not _is_required(similar))
    if value is None and is_optional and not typed_as_override:
        return cause, "leave it out: it has no value"
    if similar is not None:
        if similar[:-1] == parent:
            return cause, f"did you mean '{similar[-1]}'?"
        if len(similar) > 1 and not typed_as_override:
            return cause, f"write `{nested(similar)}`"
        top = " at the top level of the recipe" if len(similar) == 1 else ""
        return cause, f"did you mean '{dotted(similar)}'{top}?"
    model = section_at(parent)
    here = list(model.model_fields) if model else []
    if 0 < len(here) < 12:
        return cause, f"known keys here are {', '.join(here)}"
    return cause, "`trimtab schema` prints every key"


def nearest_key(path: Path) -> Path | None:
    """The key that was probably meant: another tool's name, the same name at another level, or a misspelling."""
    key, parent = str(path[-1]), path[:-1]
    model = section_at(parent)
    here = list(model.model_fields) if model else []
    if key in OTHER_NAMES:
        target = as_path(OTHER_NAMES[key])
        # Items of `data.replay.sources` and `data.eval.domain` have the keys of `data.train.0` too.
        return (*parent, target[-1]) if target[-1] in here else target
    same_name = [full for full in all_keys() if full[-1] == key]
    if same_name:
        return min(same_name, key=len)
    similar = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    return (*parent, similar[0]) if similar else None


def nested(path: Path) -> str:
    """A key as it is written in a recipe file.

    Example:
        >>> nested(("model", "name")), nested(("data", "train", 0, "first"))
        ('model: {name: …}', 'data: {train: [{first: …}]}')
    """
    text = "…"
    for part in reversed(path[1:]):
        text = f"[{text}]" if isinstance(part, int) else f"{{{part}: {text}}}"
    return f"{path[0]}: {text}"


def as_path(text: str) -> Path:
    """The inverse of `dotted`.

    Example:
        >>> as_path("data.train.0.source")
        ('data', 'train', 0, 'source')
    """
    return tuple(int(part) if part.isdecimal() else part for part in text.split("."))


def section_at(path: Path) -> type[BaseModel] | None:
    """The section of the schema at this path; None if the path is not a section."""
    current: type[BaseModel] | None = Recipe
    for part in path:
        if current is None:
            return None
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = _section_in(field.annotation) if field is not None else None
    return current


def values_at(path: Path) -> Any:
    """The value type of a mapping with arbitrary names (`lora.rank_pattern`) at this path; None for any other key."""
    annotation = _annotation(path)
    for inner in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(inner) is dict:
            return typing.get_args(inner)[1]
    return None


def is_default_null(path: Path) -> bool:
    """Whether `key=null` selects the default of the key at this path: true for every key that has a default.

    `save_steps` is the exception: its default is a number, and null is another valid value.

    Example:
        >>> [is_default_null((key,)) for key in ("learning_rate", "eval_steps", "save_steps", "model")]
        [True, True, False, False]
    """
    if values_at(path[:-1]) is not None:  # an arbitrary name, such as `lora.rank_pattern.down_proj`
        return True
    field = _field(path)
    if field is None or field.is_required():
        return False
    return field.default is None or type(None) not in typing.get_args(field.annotation)


def is_list(path: Path) -> bool:
    """Whether the value of the key at this path is a list."""
    return typing.get_origin(_annotation(path)) is list


def expects_text(path: Path) -> bool:
    """Whether the value of the key at this path is a string, so that `model.revision=123` needs no quotes."""
    return _annotation(path) in (str, str | None) or values_at(path[:-1]) is str


def _annotation(path: Path) -> Any:
    """The type of the key at this path; None if there is no such key."""
    field = _field(path)
    return field.annotation if field else None


def _field(path: Path) -> FieldInfo | None:
    """The key at this path; None if there is no such key."""
    parent = section_at(path[:-1]) if path else None
    return parent.model_fields.get(str(path[-1])) if parent else None


def unencodable(value: Any, where: dict[Path, str], path: Path = ()) -> Iterator[tuple[str, str | None]]:
    """(cause, remedy) for each string that UTF-8 cannot encode, so that it cannot be saved with the run."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str) and not _is_encodable(key):
                what = f"a name in {dotted(path) or 'the recipe'}"
                yield _not_utf8(key, what, _place((*path, key), where))
            yield from unencodable(inner, where, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from unencodable(inner, where, (*path, i))
    elif isinstance(value, str) and not _is_encodable(value):
        yield _not_utf8(value, dotted(path), _place(path, where))


def _not_utf8(text: str, what: str, place: str) -> tuple[str, str]:
    cause = f"{what} contains a character that UTF-8 cannot encode: {_inline(text)}{place}"
    return cause.encode(errors="backslashreplace").decode(), "correct it, or leave it out"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def all_keys(section: type[BaseModel] = Recipe, prefix: Path = ()) -> Iterator[Path]:
    """Yields the path of every key of the schema; items of a list appear as item 0."""
    for key, field in section.model_fields.items():
        yield (*prefix, key)
        inner = _section_in(field.annotation)
        if inner is not None:
            index: Path = (0,) if "list" in str(field.annotation) else ()
            yield from all_keys(inner, (*prefix, key, *index))


def dotted(path: Path) -> str:
    """Returns a path in dotted form: `('data', 'train', 0)` becomes `data.train.0`."""
    return ".".join(str(part) for part in path)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _section_in(inner)
        if found is not None:
            return found
    return None


def _is_override(place: str) -> bool:
    """Whether a place in the input is an override (`key=value`), not a line of a file."""
    return place.startswith(" (from ")


def _is_required(path: Path) -> bool:
    """Whether a recipe must set the key at this path."""
    field = _field(path)
    return field is not None and field.is_required()


def _place(path: Path, where: dict[Path, str]) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in where:
            return f" ({where[path[:length]]})"
    return ""


def _inline(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
