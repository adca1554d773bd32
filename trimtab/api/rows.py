"""The `data=` argument: rows are found in it, stored, and named in the recipe as `memory:…` sources."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import DataError, RecipeError
from trimtab.facts.names import shortened

if TYPE_CHECKING:
    from trimtab.data.in_memory import Passed
    from trimtab.recipe import Recipe
    from trimtab.run.lifecycle import View

Position = tuple[str | int, ...]
"""Where a source stands in the recipe's data section: ("train", 0)."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass
class DataArgument:
    """What the user passed as data: the recipe's section, with the rows in it replaced by names.

    Example:
        >>> found = DataArgument.of(["a text"])
        >>> found.section, found.rows
        ({'train': [{'source': 'memory:train.0'}]}, {('train', 0): ['a text']})
    """

    section: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    """Whether the section replaces the recipe's; rows alone replace only its `train`."""
    rows: dict[Position, Any] = field(default_factory=dict)
    key: str | None = None

    @classmethod
    def of(cls, data: Any, key: str | None = None) -> DataArgument:
        """Reads the argument: rows, a source's name, or a mapping like the recipe's data section."""
        found = cls(key=_checked_key(key))
        if data is None:
            pass
        elif isinstance(data, str | Path):
            _refuse_text(str(data))
            found.section = {"train": str(data)}
        elif isinstance(data, Mapping):
            found.whole, found.section = True, found._mapping(data)
        elif _are_sources(data):
            found.section = {"train": found._sources(data, ("train",))}
        else:
            _refuse_files(data)
            found.section = {"train": [found._named(data, ("train", 0))]}
        if key is not None and not found.rows:
            raise RecipeError(
                "data_key is given without rows", "pass the rows as data, or leave data_key out"
            )
        return found

    def merged(self, section: Any) -> Any:
        """A recipe's data section with what was passed."""
        if not self.section:
            return section
        if self.whole or not isinstance(section, Mapping):
            return self.section
        return {**section, **self.section}

    def label(self, position: Position) -> str:
        """What messages call the rows at a position."""
        if not self.whole:
            return "data"
        names = [part for part in position if isinstance(part, str)]
        return "data" + "".join(f"[{name!r}]" for name in names)

    def store(self, recipe: Recipe, view: View) -> tuple[Recipe, dict[str, Passed]]:
        """Spools the rows, or prepares their streaming: the recipe that names them, and what the run is given."""
        from trimtab.recipe import build

        if not self.rows:
            return recipe, {}
        plain = recipe.model_dump(mode="json", exclude_unset=True)
        passed: dict[str, Passed] = {}

        def key_of(position: Position) -> str | None:
            return self.key and (self.key if len(self.rows) == 1 else f"{self.key}.{_dotted(position)}")

        for position, name, given in self._all_stored(recipe, view, key_of):
            _at(plain["data"], position)["source"] = name
            passed[name] = given
        return build(plain), passed

    def store_again(self, recipe: Recipe, view: View, folder: Path) -> dict[str, Passed]:
        """The rows of a run that is resumed: a DataError unless they are those that it began with."""
        from trimtab.data.in_memory import first_difference, spool_path
        from trimtab.run.corpora import MEMORY_PREFIX, cache_folder, memory_folder

        if not self.section:
            return {}
        section = recipe.model_dump(mode="json")["data"]
        self._check_unchanged(section)
        passed: dict[str, Passed] = {}

        def key_of(position: Position) -> str | None:
            own = _kept_name(section, position, folder).removeprefix(MEMORY_PREFIX)
            if self.key is not None and own != self.key and not own.startswith(f"{self.key}."):
                raise DataError(
                    f"data_key is {self.key!r}, and {folder} began with {own!r}",
                    "pass the same data, or start a new run",
                )
            return own if _DIGEST.fullmatch(own) is None else None

        for position, name, given in self._all_stored(recipe, view, key_of):
            kept = _kept_name(section, position, folder)
            if name != kept:
                places = [
                    spool_path(
                        memory_folder(cache_folder(recipe.data.cache_dir)), one.removeprefix(MEMORY_PREFIX)
                    )
                    for one in (kept, name)
                ]
                row = first_difference(*places) if all(place.is_file() for place in places) else None
                where = f" (row {row} differs)" if row else ""
                raise DataError(
                    f"{self.label(position)} is not what {folder} began with{where}",
                    "pass the same rows, or start a new run",
                )
            passed[name] = given
        return passed

    def _check_unchanged(self, section: dict[str, Any]) -> None:
        """What is no rows must be as in the run's recipe; nothing that was passed is ignored."""
        kept = set(_names(section))
        more = [
            key
            for key, value in self.section.items()
            if key not in ("train", "eval", "replay")
            and (key not in section or section[key] not in (value, str(Path.cwd() / str(value))))
        ]
        more += [
            name
            for name in _names(self.section)
            if not name.startswith("memory:") and not {name, str(Path.cwd() / name)} & kept
        ]
        if more:
            raise RecipeError(
                f"data names {', '.join(map(str, more))}, and a resumed run has its data in its recipe",
                "pass only the rows that the run began with",
            )

    def _all_stored(
        self, recipe: Recipe, view: View, key_of: Callable[[Position], str | None]
    ) -> Iterator[tuple[Position, str, Passed]]:
        """The rows of each position, stored: the name of their source, and what the run is given."""
        from trimtab.run.corpora import MEMORY_PREFIX

        names: dict[str, Any] = {}
        # A stream is named by its first rows; where others have that name already, it takes another one.
        for position in sorted(self.rows, key=lambda position: position[0] != "eval"):
            rows = self.rows[position]
            name, given = self._stored(position, recipe, view, key_of(position))
            while given.stream is not None and names.get(name, rows) is not rows:
                name = MEMORY_PREFIX + given.stream.rename()
            names[name] = rows
            yield position, name, given

    def _stored(self, position: Position, recipe: Recipe, view: View, key: str | None) -> tuple[str, Passed]:
        from trimtab.data.in_memory import Passed, RowStream, spool_rows
        from trimtab.run.corpora import MEMORY_PREFIX, cache_folder, memory_folder

        rows, label = self.rows[position], self.label(position)
        if recipe.data.streaming and position[0] != "eval":
            stream = RowStream(rows, label=label, key=key)
            return MEMORY_PREFIX + stream.name, Passed(label, stream)
        spooled = spool_rows(
            rows,
            memory_folder(cache_folder(recipe.data.cache_dir)),
            label=label,
            key=key,
            progress=lambda done: view.working(f"reading {label}", done, None, "rows"),
        )
        if spooled.reused:
            view.message(
                f"{label}: the rows kept under the key {key!r} are used ({spooled.path}); "
                "change data_key when the rows change"
            )
        return MEMORY_PREFIX + spooled.name, Passed(label)

    def _mapping(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if "train" not in data:
            raise RecipeError(
                f"data is a mapping without 'train' (it has {', '.join(map(str, data)) or 'nothing'})",
                "give data={'train': rows, 'eval': rows}, or a list of rows",
            )
        made = {**data, "train": self._sources(data["train"], ("train",))}
        measured = data.get("eval")
        if isinstance(measured, Mapping) and not _is_source(measured):
            made["eval"] = {name: self._sources(one, ("eval", name)) for name, one in measured.items()}
        elif measured is not None:
            made["eval"] = {"domain": self._sources(measured, ("eval", "domain"))}
        replay = data.get("replay")
        if isinstance(replay, Mapping) and "sources" in replay:
            made["replay"] = {**replay, "sources": self._sources(replay["sources"], ("replay", "sources"))}
        return made

    def _sources(self, value: Any, where: Position) -> Any:
        """The sources at one place of the section, as a recipe writes them."""
        if isinstance(value, str | Path):
            return str(value)
        if _is_source(value) or not isinstance(value, list | tuple):
            return [self._named(value, (*where, 0))]
        if not value or isinstance(value[0], list | tuple) or _is_row(value[0]):
            return [self._named(value, (*where, 0))] if value else []
        if all(isinstance(one, str) for one in value):
            _refuse_texts(value, where)
        return [
            str(one) if isinstance(one, str | Path) else self._named(one, (*where, index))
            for index, one in enumerate(value)
        ]

    def _named(self, value: Any, position: Position) -> Any:
        """A source, with a name in place of its rows."""
        options: dict[str, Any] = {}
        if _is_source(value):
            options, value = {key: one for key, one in value.items() if key != "source"}, value["source"]
        if isinstance(value, str | Path):
            return {**options, "source": str(value)}
        self.rows[position] = value
        return {**options, "source": f"memory:{_dotted(position)}"}


def _checked_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not isinstance(key, str) or not _KEY.fullmatch(key) or _DIGEST.fullmatch(key):
        raise RecipeError(
            f"data_key {key!r} cannot name rows",
            "use up to 64 letters, digits, dots, dashes and underscores, such as 'chats-v3'",
        )
    return key


def _is_source(value: Any) -> bool:
    """Whether a mapping is a source with options and not a row, which may have a column named source."""
    from trimtab.recipe.keys import Source

    return isinstance(value, Mapping) and "source" in value and set(value) <= set(Source.model_fields)


def _is_row(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_source(value)


def _are_sources(data: Any) -> bool:
    """Whether a list holds sources with options; rows whose only column is `source` hold texts there, and no names."""
    if not isinstance(data, list | tuple) or not data or not all(_is_source(one) for one in data):
        return False
    values = [one["source"] for one in data if isinstance(one["source"], str)]
    return all(_exists(value) or not any(c.isspace() for c in value.strip()) for value in values)


def _refuse_files(data: Any) -> None:
    """A list of strings is a list of texts; one that names files would be trained on as their names."""
    first = data[0] if isinstance(data, list | tuple) and data else None
    if isinstance(first, Path) or (isinstance(first, str) and _exists(first)):
        raise DataError(
            f"row 1 of data is {str(first)!r}, which is a file or folder, and a list is read as a list of texts",
            "name files as data={'train': [...]}; to train on these very words give rows like {'text': …}",
        )


def _refuse_text(data: str) -> None:
    """A str names a source; one with spaces that names nothing is a text to train on."""
    if len(data.split()) > 1 and not _exists(data) and not glob.glob(data[:255]):
        raise DataError(
            f"data is the text '{shortened(data)}', and a text names a file, a folder or a data set",
            "give texts to train on as a list: data=[text]",
        )


def _exists(name: str) -> bool:
    return 0 < len(name) < 256 and "\0" not in name and Path(name).exists()


def _refuse_texts(values: list[str] | tuple[str, ...], where: Position) -> None:
    """In a mapping strings name sources, as in a recipe."""
    texts = (one for one in values if any(c.isspace() for c in one.strip()) and not _exists(one))
    text = next(texts, None)
    if text is not None and not glob.glob(text[:255]):
        raise DataError(
            f"{_dotted(where)} of data is a list of strings, which name files and data sets there, and "
            f"{text[:40]!r} is none",
            "for texts give rows: [{'text': one} for one in texts]",
        )


def _dotted(position: Position) -> str:
    return ".".join(map(str, position))


def _at(section: Any, position: Position) -> Any:
    for part in position:
        section = section[part]
    return section


def _kept_name(section: dict[str, Any], position: Position, folder: Path) -> str:
    """The source that a run has where rows were passed; an error where it has none from Python."""
    try:
        name = str(_at(section, position)["source"])
    except (KeyError, IndexError, TypeError):
        name = ""
    if not name.startswith("memory:"):
        used = ", ".join(one for one in _names(section) if one.startswith("memory:")) or "none"
        raise DataError(
            f"rows are passed as {_dotted(position)} of data, and {folder} has no rows from Python there "
            f"(its rows: {used})",
            "leave data out, or pass it as the run began with it",
        )
    return name


def _names(section: Mapping[str, Any]) -> Iterator[str]:
    """The names of all sources of a data section, however they are written."""
    places = [section.get("train"), (section.get("replay") or {}).get("sources")]
    places += (section.get("eval") or {}).values()
    for place in places:
        for one in [place] if isinstance(place, str | Mapping) else place or []:
            yield one if isinstance(one, str) else one["source"]
