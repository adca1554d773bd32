"""Resolves a model's name: a local path, a hub id, or a GGUF file of a hub repository."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from trimtab.facts.errors import HubError, ModelError
from trimtab.facts.files import read_json_object
from trimtab.facts.names import path_of
from trimtab.hub.local_files import LocalFiles, check_name, looks_local
from trimtab.hub.repository import Access, Repository, open_repository

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""All files except weights that may be downloaded."""
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def resolve_model(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    weights: bool = True,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
    progress: bool = True,
) -> LocalFiles:
    """Resolve a model's name to a local folder or file.

    Configuration, tokenizer and safetensors, or one GGUF file, are downloaded from the hub; never pickles or code.
    Interrupted downloads resume: within a file during one call, file by file in later calls.

    Args:
        name: a local folder or .gguf file; a hub id "owner/name"; or "owner/name/file.gguf".
        revision: a branch, tag or commit; the default branch if None. The result contains the commit.
        token: for private and gated models; by default the token stored by `hf auth login`.
        offline: use only files in the cache.
        weights: False to download only the small files, to plan or to tokenize.
        cache_dir: folder of the downloads; huggingface_hub's cache by default.
        endpoint: URL of another hub.
        progress: show huggingface_hub's progress bars.

    Example:
        >>> resolve_model("Qwen/Qwen3-0.6B-Base", weights=False).commit        # doctest: +SKIP
        'da87bfb608c14b7cf20ba1ce41287e8de496c0cd'
    """
    path = path_of(name, "the model", ModelError)
    if path.exists():
        return _local(path)
    text = str(name)
    repo_id, file = _split_id(text)
    access = Access(token, offline, None if cache_dir is None else Path(cache_dir), endpoint, progress)
    repository = open_repository("model", repo_id, revision, access)
    file = file or _only_gguf(repository)
    if file is not None:
        return _gguf(repository, file, text)
    small = [name for name in SMALL_FILES if name in repository.sizes]
    if "config.json" not in small:
        raise HubError(
            f"{repo_id} has no config.json", "name a model in Hugging Face's format, or owner/name/file.gguf"
        )
    repository.fetch(small)
    if weights:
        repository.fetch(_weight_files(repository))
    return LocalFiles("folder", repository.folder, repository.commit, name=text)


def _local(path: Path) -> LocalFiles:
    if path.is_dir():
        return LocalFiles("folder", path, None, name=str(path))
    if path.suffix.lower() == ".gguf":
        return LocalFiles("gguf", path, None, name=str(path))
    if any(fnmatchcase(path.name.lower(), pattern) for pattern in _PICKLES):
        raise ModelError(
            f"{path} is a pickle, which can run code when it is read",
            "use the model's folder with safetensors, or convert it",
        )
    raise ModelError(f"{path} is not a model", "name a Hugging Face folder or a .gguf file")


def _split_id(text: str) -> tuple[str, str | None]:
    """ "owner/name/sub/file.gguf" → ("owner/name", "sub/file.gguf")."""
    parts = text.split("/")
    if len(parts) > 2 and text.endswith(".gguf") and not looks_local("/".join(parts[:2])):
        repo_id = "/".join(parts[:2])
        return repo_id, check_name("/".join(parts[2:]), repo_id)
    if looks_local(text):
        raise ModelError(f"{text} does not exist", "check the path, or write a hub id as owner/name")
    return text, None


def _only_gguf(repository: Repository) -> str | None:
    """The GGUF file of a repository without safetensors weights; an error if it has several."""
    if "config.json" in repository.sizes and any(n.endswith(".safetensors") for n in repository.sizes):
        return None
    found = sorted(n for n in repository.sizes if n.endswith(".gguf"))
    if len(found) > 1:
        listed = ", ".join(found[:12]) + (" …" if len(found) > 12 else "")
        raise HubError(
            f"{repository.repo_id} has several GGUF files: {listed}", "name one: owner/name/file.gguf"
        )
    return found[0] if found else None


def _gguf(repository: Repository, file: str, name: str) -> LocalFiles:
    if file not in repository.sizes:
        listed = ", ".join(sorted(n for n in repository.sizes if n.endswith(".gguf"))) or "none"
        raise HubError(f"{repository.repo_id} has no file {file}", f"its GGUF files are: {listed}")
    return LocalFiles("gguf", repository.fetch([file])[0], repository.commit, name=name)


def _weight_files(repository: Repository) -> list[str]:
    """Safetensors files to download: those in the index, else model.safetensors, else all in the top folder."""
    names = repository.sizes
    if _INDEX in names:
        index = repository.fetch([_INDEX])[0]
        try:
            shards = {check_name(shard, repository.repo_id) for shard in _weight_map(index).values()}
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ModelError(
                f"{index} is not an index of shards ({error})", "use another revision or copy of the model"
            ) from None
        if absent := sorted(shards - set(names)):
            raise HubError(
                f"{repository.repo_id} does not have the shard {absent[0]}",
                "use another revision or copy of the model",
            )
        return sorted(shards)
    if "model.safetensors" in names:
        return ["model.safetensors"]
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if not found:
        pickles = [n for n in names if any(fnmatchcase(n.lower(), pattern) for pattern in _PICKLES)]
        also = f" (only pickles: {pickles[0]})" if pickles else ""
        raise HubError(
            f"{repository.repo_id} has no safetensors weights{also}",
            "use a revision or a model that has them; pickles can run code and are never read",
        )
    return found


def _weight_map(path: Path) -> dict[str, str]:
    weight_map: dict[str, str] = read_json_object(path)["weight_map"]
    return weight_map
