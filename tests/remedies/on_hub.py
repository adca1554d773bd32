"""Models and datasets by name, against a hub on loopback."""

from __future__ import annotations

import json
import re
from typing import Any

from cases import World, case, in_turn, listed

from trimtab.hub import LocalFiles, resolve_dataset, resolve_model

GOOD = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": b"weights"}
ROWS = b'{"text": "a cat"}\n'


def model(w: World, name: str = "owner/name", **options: Any) -> LocalFiles:
    options = {"endpoint": w.hub.endpoint, "cache_dir": w.tmp / "cache", "progress": False, **options}
    return resolve_model(name, **options)


def dataset(w: World, name: str = "owner/data", **options: Any) -> LocalFiles:
    options = {"endpoint": w.hub.endpoint, "cache_dir": w.tmp / "cache", "progress": False, **options}
    return resolve_dataset(name, **options)


def resolved(w: World, files: dict[str, Any], **options: Any) -> LocalFiles:
    w.hub.add_model("owner/name", files)
    return model(w, **options)


def good(w: World, remedy: str = "") -> LocalFiles:
    """Another revision, or another model, that is whole."""
    w.hub.add_model("owner/name", GOOD, branch="whole")
    w.hub.add_model("owner/another", GOOD)
    model(w, "owner/another")
    return model(w, revision="whole")


def gguf_named(w: World) -> LocalFiles:
    w.hub.add_model("owner/files", {"a.gguf": b"a", "b.gguf": b"b"})
    return model(w, "owner/files/a.gguf")


# Names.
case(
    "hub/models.py:_split_id: check the path, or write a hub id as owner/name",
    lambda w: model(w, "./absent"),
    lambda w, remedy: (model(w, str(w.model)), good(w)),
)
case(
    "hub/datasets.py:resolve_dataset: check the path, or write a hub id as owner/name",
    lambda w: dataset(w, "./absent.jsonl"),
    lambda w, remedy: (
        (w.tmp / "there.jsonl").write_bytes(ROWS),
        dataset(w, str(w.tmp / "there.jsonl")),
        w.hub.add_dataset("owner/data", {"train.jsonl": ROWS}),
        dataset(w, "owner/data"),
    ),
)
case(
    "hub/faults.py:explain: write it as owner/name, or name a local path",
    lambda w: model(w, "owner/bad--name"),
    lambda w, remedy: (good(w), model(w, str(w.model))),
)
case(
    "hub/models.py:_local: use the model's folder with safetensors, or convert it",
    lambda w: ((w.tmp / "m.bin").write_bytes(b"x"), model(w, str(w.tmp / "m.bin"))),
    lambda w, remedy: model(w, str(w.model)),
)
case(
    "hub/models.py:_local: name a Hugging Face folder or a .gguf file",
    lambda w: ((w.tmp / "m.txt").write_bytes(b"x"), model(w, str(w.tmp / "m.txt"))),
    lambda w, remedy: (
        model(w, str(w.model)),
        (w.tmp / "m.gguf").write_bytes(b"x"),
        model(w, str(w.tmp / "m.gguf")),
    ),
)


# What a repository holds.
case(
    "hub/models.py:resolve_model: name a model in Hugging Face's format, or owner/name/file.gguf",
    lambda w: resolved(w, {"model.safetensors": b"x"}),
    lambda w, remedy: (good(w), gguf_named(w)),
)


def several(w: World) -> LocalFiles:
    w.hub.add_model("owner/files", {"a.gguf": b"a", "b.gguf": b"b"})
    return model(w, "owner/files")


case("hub/models.py:_only_gguf: name one: owner/name/file.gguf", several, lambda w, remedy: gguf_named(w))
case(
    "hub/models.py:_gguf: its GGUF files are: {}",
    lambda w: (gguf_named(w), model(w, "owner/files/c.gguf")),
    lambda w, remedy: in_turn(
        lambda name: model(w, f"owner/files/{name}"), remedy.partition(": ")[2].split(", ")
    ),
)
INDEX = "model.safetensors.index.json"
COPY = "hub/models.py:_weight_files: use another revision or copy of the model"
case(COPY, lambda w: resolved(w, {"config.json": "{}", INDEX: "[]"}), good)
shards = json.dumps({"weight_map": {"a": "model-1.safetensors"}})
case(COPY, lambda w: resolved(w, {"config.json": "{}", INDEX: shards}), good)
case(
    "hub/models.py:_weight_files: use a revision or a model that has them; pickles can run code and are never read",
    lambda w: resolved(w, {"config.json": "{}", "pytorch_model.bin": b"x"}),
    good,
)
case(
    "hub/local_files.py:check_name: the path is outside the repository's folder; use another copy of the repository",
    lambda w: resolved(
        w, {"config.json": "{}", INDEX: json.dumps({"weight_map": {"a": "../x.safetensors"}})}
    ),
    good,
)


# Revisions, tokens, offline.
def follow_revision(w: World, remedy: str) -> None:
    commit = w.hub.add_model("owner/name", GOOD, branch="side")
    w.hub.tag("models", "owner/name", "v1", commit)
    for revision in ("side", "v1", commit):  # a branch, a tag, a commit
        model(w, revision=revision)


case(
    "hub/faults.py:explain: name a branch, a tag or a commit of it",
    lambda w: resolved(w, GOOD, revision="v9"),
    follow_revision,
)
case(
    "hub/repository.py:open_repository: name a branch, a tag or a commit of it",
    lambda w: resolved(w, GOOD, revision="v" * 300),
    follow_revision,
)


def with_token(w: World, remedy: str) -> None:
    """What logging in leaves, and the variable."""
    (w.tmp / "token").write_text("hf_right")
    model(w)
    (w.tmp / "token").unlink()
    w.patch.setenv(re.findall(r"HF_\w+", remedy)[0], "hf_right")
    model(w)


def private(w: World, **options: Any) -> LocalFiles:
    w.hub.add_model("owner/name", GOOD, token="hf_right", **options)
    return model(w)


LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
case(
    f"hub/faults.py:explain: accept its conditions on its page on the hub, then {LOGIN}",
    lambda w: private(w, gated=True),
    with_token,
)
case(
    f"hub/faults.py:_explain_status: check the id; for a private one {LOGIN}",
    private,
    lambda w, remedy: (with_token(w, remedy), good(w)),
)


def answered(w: World, status: int) -> LocalFiles:
    w.hub.add_model("owner/name", GOOD)
    w.hub.status_for_all = status
    return model(w)


def later(w: World, remedy: str) -> None:
    """The hub answers again: for another token, after some minutes."""
    w.hub.status_for_all = None
    if "HF_TOKEN" in remedy:
        w.patch.setenv("HF_TOKEN", "hf_right")
    model(w)


case(
    "hub/faults.py:_explain_status: ask its owner for access, or set HF_TOKEN to another token",
    lambda w: answered(w, 403),
    later,
)
case(
    f"hub/faults.py:_explain_status: wait a few minutes; for a higher limit, {LOGIN}",
    lambda w: answered(w, 429),
    later,
)
case("hub/faults.py:_explain_status: try again later", lambda w: answered(w, 500), later)


def unreachable(w: World) -> LocalFiles:
    w.hub.add_model("owner/name", GOOD)
    model(w)
    return model(w, endpoint="http://127.0.0.1:9")


def follow_unreachable(w: World, remedy: str) -> None:
    assert "HF_HUB_OFFLINE=1" in remedy
    model(w, offline=True)
    model(w, str(w.model))


case(
    "hub/faults.py:explain: check the network, name a local folder, or work offline with HF_HUB_OFFLINE=1 if it was "
    "downloaded before",
    unreachable,
    follow_unreachable,
)


def never(w: World) -> LocalFiles:
    w.hub.add_model("owner/name", GOOD)
    return model(w, offline=True)


def follow_once_online(w: World, remedy: str) -> None:
    assert "HF_HUB_OFFLINE" in remedy
    model(w)
    model(w, offline=True)
    if "local folder" in remedy:
        model(w, str(w.model), offline=True)


case(
    "hub/repository.py:_from_cache: run once with offline mode off (HF_HUB_OFFLINE=0), or name a local folder",
    never,
    follow_once_online,
)
case(
    "hub/repository.py:Repository.fetch: run once with offline mode off (HF_HUB_OFFLINE=0)",
    lambda w: (resolved(w, GOOD, weights=False), model(w, offline=True)),
    follow_once_online,
)


# Datasets.
CARD = """---
configs:
- config_name: easy
  data_files: easy/*.jsonl
- config_name: hard
  data_files: [{split: train, path: hard/a.jsonl}, {split: test, path: hard/b.jsonl}]
---
"""
FILES = {"README.md": CARD, "easy/a.jsonl": ROWS, "hard/a.jsonl": ROWS, "hard/b.jsonl": ROWS}


def data(w: World, files: dict[str, Any] | None = None, **options: Any) -> LocalFiles:
    w.hub.add_dataset("owner/data", files or FILES)
    return dataset(w, **options)


case(
    "hub/datasets.py:_choose_config: it has {}",
    lambda w: data(w, config="x"),
    lambda w, remedy: in_turn(lambda name: data(w, config=name), listed(remedy, "it has")),
)
case(
    "hub/datasets.py:_choose_config: set config to one of {}",
    data,
    lambda w, remedy: in_turn(lambda name: data(w, config=name), listed(remedy, "one of")),
)
case(
    "hub/datasets.py:_choose_split: it has {}",
    lambda w: data(w, config="hard", split="x"),
    lambda w, remedy: in_turn(lambda name: data(w, config="hard", split=name), listed(remedy, "it has")),
)


def follow_first(w: World, remedy: str) -> None:
    """`first` is a key of a source in a recipe."""
    key = re.findall("`(.*?)`", remedy)[0]
    found = data(w, config="hard", split="train")
    w.train(data_train=[{"source": str(found.files[0]), key: 1}], max_steps=1)


case(
    "hub/datasets.py:_choose_split: take a part of a split with `first`",
    lambda w: data(w, config="hard", split="train[:10]"),
    follow_first,
)


def scripted(w: World, **options: Any) -> LocalFiles:
    w.hub.add_dataset("owner/data", {"default/train/0000.parquet": b"x"}, branch="refs/convert/parquet")
    return data(w, {"script.py": "x"}, **options)


case(
    "hub/datasets.py:_no_data: try revision: refs/convert/parquet, the Parquet copy that the hub makes",
    scripted,
    lambda w, remedy: scripted(w, revision=remedy.partition("revision: ")[2].split(",")[0]),
)


def follow_suffixes(w: World, remedy: str) -> None:
    for suffix in listed(remedy.removesuffix(" files"), "with"):
        data(w, {f"train{suffix}": ROWS})


case(
    "hub/datasets.py:_no_data: name a dataset with {} files",
    lambda w: data(w, {"data.zip": b"x"}),
    follow_suffixes,
)


def follow_folder(w: World, remedy: str) -> None:
    folder = w.tmp / "downloaded"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(ROWS * 4)
    dataset(w, str(folder))
    w.train(data_train=[str(folder)], max_steps=1)


case(
    "hub/card.py:front_matter: download its files and name their folder",
    lambda w: data(w, {"README.md": "---\na: [\n---\n", "train.jsonl": ROWS}),
    follow_folder,
)
