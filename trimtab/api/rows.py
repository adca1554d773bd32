"""The `data=` argument: stores the rows in it and replaces them by `memory:…` sources in the recipe."""

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
    from trimtab.data.in_memory import PassedRows
    from trimtab.recipe import Recipe
    from trimtab.run.lifecycle import View

Position = tuple[str | int, ...]
"""Position of a source in the recipe's data section: ("train", 0)."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass
class DataArgument:
    """The data that the user passed: the recipe's section, with rows replaced by names.

    Example:
        >>> found = DataArgument.of(["a text"])
        >>> found.section, found.rows
        ({'train': [{'source': 'memory:train.0'}]}, {('train', 0): ['a text']})
    """

    section: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    """Whether the section replaces the whole section of the recipe instead of only its `train`."""
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
            raise RecipeError("data_key is given without rows", "pass the rows as data, or omit data_key")
        return found

    def merged(self, section: Any) -> Any:
        """Merges the passed data into a recipe's data section."""
        if not self.section:
            return section
        if self.whole or not isinstance(section, Mapping):
            return self.section
        return {**section, **self.section}

    def label(self, position: Position) -> str:
        """Returns the name of the rows at a position in messages."""
        if not self.whole:
            return "data"
        names = [part for part in position if isinstance(part, str)]
        return "data" + "".join(f"[{name!r}]" for name in names)

    def store(self, recipe: Recipe, view: View) -> tuple[Recipe, dict[str, PassedRows]]:
        """Spools the rows or prepares streaming; returns the recipe with their names, and the rows for the run."""
        from trimtab.recipe import build

        if not self.rows:
            return recipe, {}
        plain = recipe.model_dump(mode="json", exclude_unset=True)
        passed: dict[str, PassedRows] = {}

        def key_of(position: Position) -> str | None:
            return self.key and (self.key if len(self.rows) == 1 else f"{self.key}.{_dotted(position)}")

        for position, name, given in self._all_stored(recipe, view, key_of):
            _at(plain["data"], position)["source"] = name
            passed[name] = given
        return build(plain), passed

    def store_for_resume(self, recipe: Recipe, view: View, folder: Path) -> dict[str, PassedRows]:
        """Stores the rows of a resumed run; raises a DataError unless they equal those of its start."""
        from trimtab.data.in_memory import first_difference, spool_path
        from trimtab.run.corpora import MEMORY_PREFIX, cache_folder, memory_folder

        if not self.section:
            return {}
        section = recipe.model_dump(mode="json")["data"]
        self._check_unchanged(section)
        passed: dict[str, PassedRows] = {}

        def key_of(position: Position) -> str | None:
            own = _recorded_name(section, position, folder).removeprefix(MEMORY_PREFIX)
            if self.key is not None and own != self.key and not own.startswith(f"{self.key}."):
                raise DataError(
                    f"data_key is {self.key!r}, but {folder} was started with {own!r}",
                    "pass the same data, or start a new run",
                )
            return own if _DIGEST.fullmatch(own) is None else None

        for position, name, given in self._all_stored(recipe, view, key_of):
            recorded = _recorded_name(section, position, folder)
            if name != recorded:
                spools = [
                    spool_path(
                        memory_folder(cache_folder(recipe.data.cache_dir)), source.removeprefix(MEMORY_PREFIX)
                    )
                    for source in (recorded, name)
                ]
                row = first_difference(*spools) if all(path.is_file() for path in spools) else None
                where = f" (row {row} differs)" if row else ""
                raise DataError(
                    f"{self.label(position)} is not the data with which {folder} was started{where}",
                    "pass the same rows, or start a new run",
                )
            passed[name] = given
        return passed

    def _check_unchanged(self, section: dict[str, Any]) -> None:
        """Raises a RecipeError if anything besides rows differs from the run's recipe."""
        recorded = set(_names(section))
        more = [
            key
            for key, value in self.section.items()
            if key not in ("train", "eval", "replay")
            and (key not in section or section[key] not in (value, str(Path.cwd() / str(value))))
        ]
        more += [
            name
            for name in _names(self.section)
            if not name.startswith("memory:") and not {name, str(Path.cwd() / name)} & recorded
        ]
        if more:
            raise RecipeError(
                f"data contains {', '.join(map(str, more))}, but a resumed run uses the data of its recipe",
                "pass only the rows with which the run was started",
            )

    def _all_stored(
        self, recipe: Recipe, view: View, key_of: Callable[[Position], str | None]
    ) -> Iterator[tuple[Position, str, PassedRows]]:
        """Stores the rows of each position; yields the name of their source, and the rows for the run."""
        from trimtab.run.corpora import MEMORY_PREFIX

        names: dict[str, Any] = {}
        # A stream is named by a digest of its first rows; if another source has that name, it is renamed.
        for position in sorted(self.rows, key=lambda position: position[0] != "eval"):
            rows = self.rows[position]
            name, given = self._stored(position, recipe, view, key_of(position))
            while given.stream is not None and names.get(name, rows) is not rows:
                name = MEMORY_PREFIX + given.stream.rename()
            names[name] = rows
            yield position, name, given

    def _stored(
        self, position: Position, recipe: Recipe, view: View, key: str | None
    ) -> tuple[str, PassedRows]:
        from trimtab.data.in_memory import PassedRows, RowStream, spool_rows
        from trimtab.run.corpora import MEMORY_PREFIX, cache_folder, memory_folder

        rows, label = self.rows[position], self.label(position)
        if recipe.data.streaming and position[0] != "eval":
            stream = RowStream(rows, label=label, key=key)
            return MEMORY_PREFIX + stream.name, PassedRows(label, stream)
        spooled = spool_rows(
            rows,
            memory_folder(cache_folder(recipe.data.cache_dir)),
            label=label,
            key=key,
            progress=lambda done: view.progress(f"reading {label}", done, None, "rows"),
        )
        if spooled.reused:
            view.message(
                f"{label}: using the rows cached under the key {key!r} ({spooled.path}); "
                "change data_key when the rows change"
            )
        return MEMORY_PREFIX + spooled.name, PassedRows(label)

    def _mapping(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if "train" not in data:
            raise RecipeError(
                f"data is a mapping without 'train' (it has {', '.join(map(str, data)) or 'nothing'})",
                "give data={'train': rows, 'eval': rows}, or a list of rows",
            )
        made = {**data, "train": self._sources(data["train"], ("train",))}
        held_out = data.get("eval")
        if isinstance(held_out, Mapping) and not _is_source(held_out):
            made["eval"] = {
                name: self._sources(sources, ("eval", name)) for name, sources in held_out.items()
            }
        elif held_out is not None:
            made["eval"] = {"domain": self._sources(held_out, ("eval", "domain"))}
        replay = data.get("replay")
        if isinstance(replay, Mapping) and "sources" in replay:
            made["replay"] = {**replay, "sources": self._sources(replay["sources"], ("replay", "sources"))}
        return made

    def _sources(self, value: Any, where: Position) -> Any:
        """Converts the sources at one position of the section to the form in a recipe."""
        if isinstance(value, str | Path):
            return str(value)
        if _is_source(value) or not isinstance(value, list | tuple):
            return [self._named(value, (*where, 0))]
        if not value or isinstance(value[0], list | tuple) or _is_row(value[0]):
            return [self._named(value, (*where, 0))] if value else []
        if all(isinstance(source, str) for source in value):
            _refuse_texts(value, where)
        return [
            str(source) if isinstance(source, str | Path) else self._named(source, (*where, index))
            for index, source in enumerate(value)
        ]

    def _named(self, value: Any, position: Position) -> Any:
        """Returns a source with its rows replaced by a name."""
        options: dict[str, Any] = {}
        if _is_source(value):
            options = {key: option for key, option in value.items() if key != "source"}
            value = value["source"]
        if isinstance(value, str | Path):
            return {**options, "source": str(value)}
        self.rows[position] = value
        return {**options, "source": f"memory:{_dotted(position)}"}


def _checked_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not isinstance(key, str) or not _KEY.fullmatch(key) or _DIGEST.fullmatch(key):
        raise RecipeError(
            f"data_key {key!r} is not a valid name",
            "use up to 64 letters, digits, dots, dashes and underscores, such as 'chats-v3'",
        )
    return key


def _is_source(value: Any) -> bool:
    """Whether a mapping is a source with options, not a row that has a column named source."""
    from trimtab.recipe.keys import Source

    return isinstance(value, Mapping) and "source" in value and set(value) <= set(Source.model_fields)


def _is_row(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_source(value)


def _are_sources(data: Any) -> bool:
    """Whether a list contains sources with options, not rows whose only column `source` contains texts."""
    if not isinstance(data, list | tuple) or not data or not all(_is_source(item) for item in data):
        return False
    values = [item["source"] for item in data if isinstance(item["source"], str)]
    return all(_exists(value) or not any(c.isspace() for c in value.strip()) for value in values)


def _refuse_files(data: Any) -> None:
    """Raises a DataError for a list of file names: a list of strings is a list of texts."""
    first = data[0] if isinstance(data, list | tuple) and data else None
    if isinstance(first, Path) or (isinstance(first, str) and _exists(first)):
        raise DataError(
            f"row 1 of data is {str(first)!r}, which is a file or folder, but a list is read as a list of texts",
            "name files as data={'train': [...]}; to train on these strings as text, give rows like {'text': …}",
        )


def _refuse_text(data: str) -> None:
    """Raises a DataError for a string with spaces that is not a source, and so probably a text to train on."""
    if len(data.split()) > 1 and not _exists(data) and not glob.glob(data[:255]):
        raise DataError(
            f"data is the string '{shortened(data)}', but a string names a file, a folder or a dataset",
            "give texts to train on as a list: data=[text]",
        )


def _exists(name: str) -> bool:
    return 0 < len(name) < 256 and "\0" not in name and Path(name).exists()


def _refuse_texts(values: list[str] | tuple[str, ...], where: Position) -> None:
    """Raises a DataError for texts in a mapping, in which strings name sources, as in a recipe."""
    texts = (value for value in values if any(c.isspace() for c in value.strip()) and not _exists(value))
    text = next(texts, None)
    if text is not None and not glob.glob(text[:255]):
        raise DataError(
            f"{_dotted(where)} of data is a list of strings, which name files and datasets, but "
            f"{text[:40]!r} is neither",
            "for texts give rows: [{'text': text} for text in texts]",
        )


def _dotted(position: Position) -> str:
    return ".".join(map(str, position))


def _at(section: Any, position: Position) -> Any:
    for part in position:
        section = section[part]
    return section


def _recorded_name(section: dict[str, Any], position: Position, folder: Path) -> str:
    """Returns the source in the run's recipe for the passed rows; raises a DataError if it has no rows there."""
    try:
        name = str(_at(section, position)["source"])
    except (KeyError, IndexError, TypeError):
        name = ""
    if not name.startswith("memory:"):
        used = ", ".join(source for source in _names(section) if source.startswith("memory:")) or "none"
        raise DataError(
            f"rows are passed as {_dotted(position)} of data, but {folder} has no rows from Python there "
            f"(its rows: {used})",
            "omit data, or pass it as when the run was started",
        )
    return name


def _names(section: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of all sources of a data section in any of its forms."""
    places = [section.get("train"), (section.get("replay") or {}).get("sources")]
    places += (section.get("eval") or {}).values()
    for place in places:
        for source in [place] if isinstance(place, str | Mapping) else place or []:
            yield source if isinstance(source, str) else source["source"]
