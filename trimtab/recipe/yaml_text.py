"""Reads YAML 1.2 as plain data with the line of every key, and writes it.

`2e-5` is a number, `on` and `yes` are strings, duplicate keys are an error. Tags, anchors, aliases and directives are
rejected: a recipe is readable from top to bottom, and a few lines cannot expand to gigabytes.
"""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    SequenceStartEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from trimtab.facts.errors import RecipeError

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 12

Path = tuple[str | int, ...]
_PREFIX = "tag:yaml.org,2002:"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def read(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """Parses YAML into (plain data, line number of each key and list item by path). `name` is used in messages.

    Example:
        >>> read("optim: adamw_8bit", "r.yaml")
        ({'optim': 'adamw_8bit'}, {('optim',): 1})
    """
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{name} has {len(text):,} characters", "give a recipe: a YAML file of a few lines")
    try:
        _reject_unsupported(text, name)
        node = _yaml().compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark is not None else ""
        if "'\\t'" in str(error.problem):
            raise RecipeError(f"{name} is indented with a tab{line}", "indent with spaces") from error
        raise RecipeError(
            f"{name} is not YAML: {(error.problem or 'cannot be read').strip()}{line}",
            "correct that line; put text that contains : or # or begins with a sign in quotes",
        ) from error
    except (YAMLError, ValueError) as error:
        raise RecipeError(
            f"{name} is not YAML: {str(error).splitlines()[0]}", "remove that character"
        ) from error
    lines: dict[Path, int] = {}
    return (None if node is None else _plain(node, (), lines, name)), lines


def write(data: Any) -> str:
    """Writes plain data as YAML that `read` parses to the same data."""
    yaml: Any = _yaml()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    yaml.width = 110
    yaml.Representer = _Representer
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


class _Representer(SafeRepresenter):
    """Quotes and escapes strings with line breaks of any kind or unprintable characters.

    In plain or single-quoted style a reader folds them: U+0085, a line break, would be read as a space.
    """

    def represent_str(self, data: str) -> Any:
        plain = all(ch.isprintable() for ch in data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def _reject_unsupported(text: str, name: str) -> None:
    depth = 0
    for event in _yaml().parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, DocumentStartEvent) and (event.version or event.tags):
            raise RecipeError(f"{name} has a YAML directive (line {line})", "delete it; recipes are YAML 1.2")
        if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor):
            raise RecipeError(
                f"{name} uses a YAML anchor or alias (line {line})",
                "write the value out; put a text that begins with * or & in quotes",
            )
        tag = getattr(event, "ctag", None)
        if tag is not None:
            raise RecipeError(
                f"{name} uses the YAML tag {tag} (line {line})", "recipes are plain data: remove it"
            )
        if isinstance(event, MappingStartEvent | SequenceStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise RecipeError(
                    f"{name} is nested more than {MAX_DEPTH} deep (line {line})", "reduce the nesting"
                )
        elif type(event).__name__ in ("MappingEndEvent", "SequenceEndEvent"):
            depth -= 1


def _plain(node: Node, path: Path, lines: dict[Path, int], name: str) -> Any:
    if isinstance(node, ScalarNode):
        return _scalar(node)
    if isinstance(node, SequenceNode):
        items = []
        for i, child in enumerate(node.value):
            lines[(*path, i)] = child.start_mark.line + 1
            items.append(_plain(child, (*path, i), lines, name))
        return items
    assert isinstance(node, MappingNode)
    mapping: dict[str, Any] = {}
    for key_node, child in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            raise RecipeError(
                f"{name} has a key that is not a string (line {line})",
                "write keys as plain strings, such as `optim: adamw_8bit`",
            )
        key = _join_surrogates(key_node.value)
        if key in mapping:
            first = lines[(*path, key)]
            raise RecipeError(f"key '{key}' is given twice (lines {first} and {line})", "keep one of them")
        lines[(*path, key)] = line
        mapping[key] = _plain(child, (*path, key), lines, name)
    return mapping


def _scalar(node: ScalarNode) -> Any:
    kind, text = str(node.tag).removeprefix(_PREFIX), node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        digits = text.replace("_", "")
        return int(digits, 0) if digits.lower().lstrip("+-")[:2] in ("0x", "0o", "0b") else int(digits)
    if kind == "float":
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    # Strings, including those that YAML 1.1 would parse as a date or a merge key.
    return _join_surrogates(text)


def _join_surrogates(text: str) -> str:
    """Joins each surrogate pair, which is JSON's escape of a character beyond U+FFFF, into that character."""
    return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
