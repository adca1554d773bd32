"""Maps the files of a dataset to configurations and splits, by its card or by file names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trimtab.facts.errors import DataError

_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.DOTALL)
_SHARD = re.compile(r"(?:^|/)([A-Za-z0-9_.]+?)-\d{5}-of-\d{5}[^/]*$")
_CONVERTED = re.compile(r"^([^/]+)/(?:partial-)?([^/]+)/\d{4,}\.parquet$")
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORD = re.compile(rf"(?:^|[/._\- 0-9])({'|'.join(sorted(_WORDS, key=len, reverse=True))})(?=[/._\- 0-9]|$)")


@dataclass(frozen=True)
class Config:
    """A configuration of a dataset: its files by split."""

    name: str
    splits: dict[str, list[str]]
    default: bool = False


def front_matter(readme: str) -> dict[str, Any]:
    """The YAML front matter of a card; empty if there is none."""
    found = _FRONT.match(readme)
    if found is None:
        return {}
    try:
        data = YAML(typ="safe", pure=True).load(found.group(1))
    except (YAMLError, ValueError, RecursionError) as error:
        raise DataError(
            f"the dataset's card cannot be read ({str(error).splitlines()[0]})",
            "download its files and name their folder",
        ) from None
    return data if isinstance(data, dict) else {}


def configs(card: dict[str, Any], names: Iterable[str]) -> list[Config]:
    """All configurations, from the card's `configs` or from the file names."""
    names = sorted(names)
    listed = card.get("configs")
    if isinstance(listed, list) and listed:
        return [_from_card(entry, names) for entry in listed if isinstance(entry, dict)]
    converted = [_CONVERTED.match(name) for name in names]
    if converted and all(converted):  # the hub's own Parquet copies: config/split/0000.parquet
        found: dict[str, dict[str, list[str]]] = {}
        for match in converted:
            assert match is not None
            found.setdefault(match[1], {}).setdefault(match[2], []).append(match[0])
        return [Config(name, splits) for name, splits in found.items()]
    return [Config("default", splits_by_name(names))]


def splits_by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by split: "train-00000-of-00002", or a split's name in the path; otherwise all are "train".

    Example:
        >>> splits_by_name(["data/train-00000-of-00001.parquet", "data/val.parquet"])
        {'train': ['data/train-00000-of-00001.parquet'], 'validation': ['data/val.parquet']}
    """
    splits: dict[str, list[str]] = {}
    names = sorted(names)
    for name in names:
        shard = _SHARD.search(name)
        words = _WORD.findall(name.lower())
        if shard is not None and shard[1].lower() not in _WORDS:
            split = _WORDS[words[-1]] if words else shard[1]
        elif words:
            split = _WORDS[words[-1]]
        else:
            continue
        splits.setdefault(split, []).append(name)
    return splits or ({"train": names} if names else {})


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """File names that match a card's pattern: `*` within a folder, `**` across folders, a folder for all its files.

    Example:
        >>> matching("data/*.json", ["data/a.json", "data/b/c.json"])
        ['data/a.json']
    """
    pattern = pattern.removeprefix("./")
    regex = re.compile(_to_regex(pattern))
    folder = pattern.rstrip("/") + "/"
    return [name for name in names if regex.fullmatch(name) or name.startswith(folder)]


def _to_regex(pattern: str) -> str:
    out, at = [], 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            out.append("(?:.*/)?")
            at += 3
        elif rest.startswith("**"):
            out.append(".*")
            at += 2
        elif rest[0] in "*?":
            out.append("[^/]*" if rest[0] == "*" else "[^/]")
            at += 1
        elif (bracket := re.match(r"\[([!^]?)([^\[\]/\\]+)\]", rest)) is not None:
            out.append(f"[{'^' if bracket[1] else ''}{bracket[2]}]")
            at += bracket.end()
        elif (braces := re.match(r"\{([^{}]+)\}", rest)) is not None:
            out.append("(?:" + "|".join(_to_regex(choice) for choice in braces[1].split(",")) + ")")
            at += braces.end()
        else:
            out.append(re.escape(rest[0]))
            at += 1
    return "".join(out)


def _from_card(entry: dict[str, Any], names: list[str]) -> Config:
    name = str(entry.get("config_name", "default"))
    folder = entry.get("data_dir")
    if isinstance(folder, str) and folder.strip("./"):
        prefix = folder.removeprefix("./").strip("/") + "/"
        names = [n for n in names if n.startswith(prefix)]
    patterns = _patterns(entry.get("data_files"))
    if not patterns:
        splits = splits_by_name(names)
    else:
        splits = {}
        for split, wanted in patterns:
            found = {n for pattern in wanted for n in matching(pattern, names)}
            splits.setdefault(split, []).extend(sorted(found))
    return Config(name, splits, default=entry.get("default") is True)


def _patterns(data_files: Any) -> list[tuple[str, list[str]]]:
    """Normalize a card's `data_files`: a pattern, a list, {split: patterns} or [{split, path}]."""
    if isinstance(data_files, dict):
        return [(str(split), _texts(wanted)) for split, wanted in data_files.items()]
    if isinstance(data_files, list) and all(isinstance(item, dict) for item in data_files):
        return [(str(item.get("split", "train")), _texts(item.get("path"))) for item in data_files]
    return [("train", wanted)] if (wanted := _texts(data_files)) else []


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str) and v]
