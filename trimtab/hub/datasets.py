"""Resolves a dataset's name to the data files of one configuration and split."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from trimtab.facts.errors import DataError
from trimtab.facts.names import path_of
from trimtab.hub.card import Config, configs, front_matter
from trimtab.hub.local_files import LocalFiles, looks_local
from trimtab.hub.repository import Access, Repository, open_repository

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".txt", ".md")
"""Kinds of files that may be downloaded; without a card's `configs`, only the first kind that is present."""
_CARD = "README.md"
_NO_DATA = {
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
    "license.txt",
    "license.md",
}


def resolve_dataset(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    config: str | None = None,
    split: str | None = None,
    offline: bool = False,
    max_files: int | None = None,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
    progress: bool = True,
) -> LocalFiles:
    """Resolve a dataset's name to its data files.

    Files are assigned to configurations and splits by the dataset's card (`configs`) or by their names. An existing
    path is returned unchanged. Only Parquet, JSON, CSV, text and Markdown files are downloaded, and no code of a data
    set is ever run.

    Args:
        name: a hub id "owner/name", or a local path.
        revision: a branch, tag or commit; the default branch if None. The result contains the commit.
        token: for private and gated datasets; by default the token stored by `hf auth login`.
        config: required if there are several configurations and no default.
        split: "train" if None.
        offline: use only files in the cache.
        max_files: only the first files of the split, sorted by name.
        cache_dir, endpoint, progress: as for `resolve_model`.

    Example:
        >>> resolve_dataset("owner/math", split="train").files       # doctest: +SKIP
        [PosixPath('…/data/train-00000-of-00001.parquet')]
    """
    path = path_of(name, "the dataset", DataError, is_text_file=True)
    if path.exists():
        return LocalFiles("local", path, None, [path], str(path))
    text = str(name)
    if looks_local(text):
        raise DataError(f"{text} does not exist", "check the path, or write a hub id as owner/name")
    access = Access(token, offline, None if cache_dir is None else Path(cache_dir), endpoint, progress)
    repository = open_repository("dataset", text, revision, access)
    chosen = _choose_config(text, _configs(repository), config)
    names = _choose_split(text, chosen, split or "train")
    files = repository.fetch(names[:max_files])
    return LocalFiles(
        "dataset", repository.folder, repository.commit, files, text, chosen.name, split or "train"
    )


def _configs(repository: Repository) -> list[Config]:
    card = {}
    if _CARD in repository.sizes:
        readme = repository.fetch([_CARD])[0].read_text(encoding="utf-8", errors="replace")
        card = front_matter(readme)
    data = [name for name in repository.sizes if _is_data(name)]
    if not card.get("configs"):
        kinds = [suffix for suffix in DATA_SUFFIXES if any(name.endswith(suffix) for name in data)]
        data = [name for name in data if kinds and name.endswith(kinds[0])]
    if not data:
        raise _no_data(repository)
    return configs(card, data)


def _is_data(name: str) -> bool:
    pure = PurePosixPath(name)
    hidden = any(part.startswith((".", "_")) for part in pure.parts)
    return pure.suffix in DATA_SUFFIXES and not hidden and name != _CARD and pure.name.lower() not in _NO_DATA


def _no_data(repository: Repository) -> DataError:
    suffixes = sorted({PurePosixPath(name).suffix or name for name in repository.sizes})
    cause = f"{repository.repo_id} has no data files that can be read (it has {', '.join(suffixes[:12])})"
    if ".py" in suffixes:
        return DataError(
            f"{cause}, but a loading script, and no code of a dataset is ever run",
            "try revision: refs/convert/parquet, the Parquet copy that the hub makes",
        )
    return DataError(cause, f"name a dataset with {', '.join(DATA_SUFFIXES)} files")


def _choose_config(repo_id: str, found: list[Config], wanted: str | None) -> Config:
    by_name = {config.name: config for config in found}
    if wanted is not None:
        if wanted not in by_name:
            raise DataError(f"{repo_id} has no config {wanted!r}", f"it has {_listed(by_name)}")
        return by_name[wanted]
    defaults = [config for config in found if config.default] or [c for c in found if c.name == "default"]
    if len(found) == 1:
        return found[0]
    if not defaults:
        raise DataError(
            f"{repo_id} has several configs, and none is the default",
            f"set config to one of {_listed(by_name)}",
        )
    return defaults[0]


def _choose_split(repo_id: str, config: Config, split: str) -> list[str]:
    names = config.splits.get(split)
    if not names:
        remedy = f"it has {_listed(s for s, files in config.splits.items() if files)}"
        if "[" in split:
            remedy = "take a part of a split with `first`"
        raise DataError(f"{repo_id} ({config.name}) has no split {split!r} with readable files", remedy)
    return names


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (" …" if len(shown) > 20 else "") if shown else "none"
