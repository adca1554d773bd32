"""A hub repository at one commit: its list of files, and the files in huggingface_hub's cache.

The list is cached next to the files, by requested revision, so that offline mode can detect an incomplete download.
"""

from __future__ import annotations

import dataclasses
import glob
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub import errors as hf
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm

from trimtab.facts.errors import HubError, ResourceError
from trimtab.facts.files import read_json_object, write_json
from trimtab.facts.names import shortened, unusable_name
from trimtab.facts.units import format_bytes
from trimtab.hub.faults import translated_errors
from trimtab.hub.local_files import COMMIT, check_name

_VERSION = 1
_SPARE_BYTES = 256 << 20
_NUM_TRIES = 3


@dataclass(frozen=True)
class Access:
    """How to access the hub. A token is taken only from here or from huggingface_hub's token store."""

    token: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    endpoint: str | None = None
    progress: bool = True


@dataclass(frozen=True)
class Repository:
    """A repository's files at a commit."""

    kind: Literal["model", "dataset"]
    repo_id: str
    revision: str
    commit: str
    sizes: dict[str, int | None]
    """Sizes by file name (plain relative paths); None if unknown."""
    access: Access

    @property
    def folder(self) -> Path:
        """The snapshot folder of the files in the cache."""
        return _storage(self.kind, self.repo_id, self.access) / "snapshots" / self.commit

    def missing(self, names: list[str]) -> list[str]:
        """The names that are not downloaded yet."""
        return [name for name in names if not (self.folder / name).is_file()]

    def fetch(self, names: list[str]) -> list[Path]:
        """Return the paths of these files and download missing ones; lost connections are retried."""
        absent = self.missing(names)
        if absent and self.access.offline:
            raise HubError(
                f"{self.repo_id} is incomplete in the local cache ({absent[0]} is missing), and offline mode is on",
                "run once with offline mode off (HF_HUB_OFFLINE=0)",
            )
        if absent:
            self._check_space(absent)
            for tries_left in range(_NUM_TRIES - 1, -1, -1):
                with translated_errors(self.repo_id, self.revision):
                    try:
                        self._download(absent)
                        break
                    except (hf.HTTPError, OSError) as error:
                        # Retry lost connections, but not error responses of the hub or a full disk.
                        if (
                            tries_left == 0
                            or isinstance(error, hf.HfHubHTTPError)
                            or getattr(error, "errno", None)
                        ):
                            raise
                time.sleep(1)
            if absent := self.missing(names):
                raise HubError(f"{absent[0]} of {self.repo_id} was not downloaded", "try again")
        return [self.folder / name for name in names]

    def _download(self, names: list[str]) -> None:
        snapshot_download(
            self.repo_id,
            repo_type=self.kind,
            revision=self.commit,
            allow_patterns=[glob.escape(name) for name in names],
            token=self.access.token,
            cache_dir=self.access.cache_dir,
            endpoint=self.access.endpoint,
            max_workers=4,
            tqdm_class=None if self.access.progress else _DisabledTqdm,
        )

    def _check_space(self, names: list[str]) -> None:
        place = _cache_dir(self.access)
        while not place.exists():
            place = place.parent
        needed, free = sum(self.sizes[name] or 0 for name in names), shutil.disk_usage(place).free
        if needed + _SPARE_BYTES > free:
            raise ResourceError(
                f"{self.repo_id} needs {format_bytes(needed)} of disk space, and {place} has {format_bytes(free)} free",
                "free some space, or set HF_HUB_CACHE to another disk",
            )


class _DisabledTqdm(tqdm):
    """huggingface_hub's progress bar, disabled."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def open_repository(
    kind: Literal["model", "dataset"], repo_id: str, revision: str | None, access: Access
) -> Repository:
    """Open a repository at the commit to which the revision (branch, tag or commit; None for main) resolves now.

    A full commit hash is immutable: once its list is cached, the hub is not queried again.
    """
    wanted = revision or "main"
    if unusable_name(_record_name(wanted)) is not None:
        raise HubError(
            f"{repo_id} has no revision '{shortened(wanted)}'", "name a branch, a tag or a commit of it"
        )
    known = _read_record(kind, repo_id, wanted, access)
    if known is not None and COMMIT.fullmatch(wanted):
        return known
    if access.offline:
        return known or _from_cache(kind, repo_id, wanted, access)
    try:
        return _query_hub(kind, repo_id, wanted, access)
    except hf.OfflineModeIsEnabled:  # the user has set HF_HUB_OFFLINE
        return open_repository(kind, repo_id, revision, dataclasses.replace(access, offline=True))


def _query_hub(kind: Literal["model", "dataset"], repo_id: str, revision: str, access: Access) -> Repository:
    api = HfApi(endpoint=access.endpoint, token=access.token)
    with translated_errors(repo_id, revision):
        commit = api.repo_info(repo_id, repo_type=kind, revision=revision, timeout=20).sha or ""
        tree = list(api.list_repo_tree(repo_id, recursive=True, revision=commit, repo_type=kind))
    if not COMMIT.fullmatch(commit):
        raise HubError(f"the hub returned no commit for {repo_id}", "check that the endpoint is a hub")
    sizes: dict[str, int | None] = {
        check_name(entry.path, repo_id): entry.size for entry in tree if isinstance(entry, RepoFile)
    }
    repository = Repository(kind, repo_id, revision, commit, sizes, access)
    with translated_errors(repo_id, revision):
        for key in {revision, commit}:
            _write_record(repository, key)
    return repository


def _cache_dir(access: Access) -> Path:
    return Path(access.cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()


def _storage(kind: str, repo_id: str, access: Access) -> Path:
    """The repository's folder in the cache, in huggingface_hub's documented layout."""
    return _cache_dir(access) / f"{kind}s--{repo_id.replace('/', '--')}"


def _record_path(kind: str, repo_id: str, revision: str, access: Access) -> Path:
    return _storage(kind, repo_id, access) / "trimtab" / _record_name(revision)


def _record_name(revision: str) -> str:
    return f"{quote(revision, safe='')}.json"


def _write_record(repository: Repository, key: str) -> None:
    path = _record_path(repository.kind, repository.repo_id, key, repository.access)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": _VERSION, "commit": repository.commit, "files": repository.sizes}
    write_json(path, content, durable=False)


def _read_record(
    kind: Literal["model", "dataset"], repo_id: str, revision: str, access: Access
) -> Repository | None:
    try:
        content = read_json_object(_record_path(kind, repo_id, revision, access))
    except (OSError, ValueError):
        return None
    if content.get("version") != _VERSION:
        return None
    sizes = {check_name(name, repo_id): size for name, size in content["files"].items()}
    return Repository(kind, repo_id, revision, content["commit"], sizes, access)


def _from_cache(kind: Literal["model", "dataset"], repo_id: str, revision: str, access: Access) -> Repository:
    """A repository that another tool downloaded: the commit from the cache's refs, the list from the cached files."""
    storage = _storage(kind, repo_id, access)
    ref = storage / "refs" / revision
    commit = revision if COMMIT.fullmatch(revision) else ref.read_text().strip() if ref.is_file() else ""
    folder = storage / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not folder.is_dir():
        raise HubError(
            f"{repo_id} ({revision}) is not in the local cache, and offline mode is on",
            "run once with offline mode off (HF_HUB_OFFLINE=0), or name a local folder",
        )
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes: dict[str, int | None] = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in files
    }
    return Repository(kind, repo_id, revision, commit, sizes, access)
