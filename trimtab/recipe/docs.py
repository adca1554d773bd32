"""The reference page and the JSON schema, made from the keys' own descriptions.

`python -m trimtab.recipe.docs [FOLDER]` writes FOLDER/reference/recipe.md and FOLDER/recipe.schema.json
(FOLDER is `docs` unless given). A test compares both with what is kept there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from trimtab.recipe.keys import Data, Evaluation, Lora, Model, Recipe, Replay, Source
from trimtab.recipe.resume import CHANGEABLE_ON_RESUME

GROUPS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("Top level", Recipe, ""),
    ("`model`", Model, "model."),
    ("`data`", Data, "data."),
    ("A source: an item of `data.train`, `data.replay.sources`, `data.eval.*`", Source, ""),
    ("`data.replay`", Replay, "data.replay."),
    ("`data.eval`", Evaluation, "data.eval."),
    ("`lora`", Lora, "lora."),
)

_HEAD = """\
<!-- Made by `python -m trimtab.recipe.docs` from trimtab/recipe/keys.py; edit the descriptions there. -->
# Recipe reference

A recipe is one YAML file (YAML 1.2: `2e-5` is a number, `on` and `yes` are words, a key given twice is an
error). Only `model` and `data.train` are required; every other key has the default shown. Unknown keys are
errors that name the nearest known one. The complete recipe, defaults written out, is kept in the run folder.

```yaml
model: Qwen/Qwen3-0.6B-Base
data:
  train: ./notes
```

Any key can be set on the command line, nested ones with dots, list items by number from 0; values are YAML:

```sh
trimtab train recipe.yaml learning_rate=1e-4 data.train.0.weight=2 model.revision=main
```

`KEY=null` takes out what the file says, so that the default holds (`eval_steps=null`); only for `save_steps` null is a
value of its own, and saves at the end alone. A key may be given once.

`max_steps` given there replaces the file's `num_train_epochs` and the other way round; so do `warmup_steps`
and `warmup_ratio`. Editors complete and check recipes that begin with this line (the path is the one to
`docs/recipe.schema.json`):

```yaml
# yaml-language-server: $schema=../docs/recipe.schema.json
```
"""

_RESUME = """\
## What may change on resume

`trimtab train --resume RUN` continues the very run that stopped, so most keys must stay as they were. A
change of a key that is not listed here is an error.

| key | why it may change |
|---|---|
"""


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe, as editors read it.

    Example:
        >>> "learning_rate" in schema()["properties"]
        True
    """
    made = Recipe.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_one_line(made),
        "title": "trimtab recipe",
    }


def reference() -> str:
    """The reference page, as Markdown."""
    parts = [_HEAD]
    for title, section, prefix in GROUPS:
        parts.append(f"## {title}\n")
        if section is not Recipe:
            parts.append(f"{section.__doc__}\n")
        parts += [_entry(prefix, key, field) for key, field in section.model_fields.items()]
    rows = [f"| `{key}` | {why} |" for key, why in CHANGEABLE_ON_RESUME.items()]
    parts.append(_RESUME + "\n".join(rows) + "\n")
    return "\n".join(parts)


def files(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, text) of everything that is generated under a docs folder."""
    yield folder / "reference" / "recipe.md", reference()
    yield folder / "recipe.schema.json", json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _entry(prefix: str, key: str, field: FieldInfo) -> str:
    facts = [f"**Type:** {_type(field)}"]
    facts.append("**Required**" if field.is_required() else f"**Default:** {_default(key, field)}")
    text = " ".join((field.description or "").split())
    return f"### `{prefix}{key}`\n\n{text}\n\n{' · '.join(facts)}\n{_example(key, field)}"


def _example(key: str, field: FieldInfo) -> str:
    if not field.examples:
        return ""
    value = json.dumps(field.examples[0], ensure_ascii=False)
    return f"\n```yaml\n{key}: {value}\n```\n"


def _default(key: str, field: FieldInfo) -> str:
    if isinstance(field.default, BaseModel):
        return "see its keys"
    return f"`{json.dumps(field.default)}`"


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    return _schema_type(TypeAdapter(annotation).json_schema(), _limits(field))


def _schema_type(node: dict[str, Any], limits: str) -> str:
    if "enum" in node:
        return " \\| ".join(f"`{str(c).lower() if isinstance(c, bool) else c}`" for c in node["enum"])
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_schema_type(option, limits) for option in node["anyOf"]))
    if "$ref" in node:
        word = node["$ref"].rsplit("/", 1)[1].lower()
        return "a source" if word == "source" else "a mapping (below)"
    if node.get("type") == "array":
        return f"list of: {_schema_type(node['items'], '')}"
    if node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
        return f"a mapping of names to: {_schema_type(node['additionalProperties'], '')}"
    if "pattern" in node:
        return f"text matching `{node['pattern']}`"
    words = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "object": "a mapping (below)",
    }
    word = words.get(node.get("type", ""), node.get("type", ""))
    return f"{word}{limits}" if word in ("whole number", "number") else word


def _limits(field: FieldInfo) -> str:
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = []
    for limit in field.metadata:
        for name, word in signs.items():
            value = getattr(limit, name, None)
            if value is not None:
                found.append(f"{word} {value if value != 2**63 else '2^63'}")
    return f", {', '.join(found)}" if found else ""


def _one_line(node: Any) -> Any:
    """Descriptions without the line breaks of the source file."""
    if isinstance(node, dict):
        return {
            key: " ".join(value.split())
            if key == "description" and isinstance(value, str)
            else _one_line(value)
            for key, value in node.items()
        }
    return [_one_line(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    for path, text in files(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
