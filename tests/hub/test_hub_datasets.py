"""Datasets by name, against a hub on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

from trimtab.facts.errors import DataError, HubError
from trimtab.hub import LocalFiles, resolve_dataset
from trimtab.hub.card import configs, front_matter, matching, splits_by_name

CARD = """---
license: mit
configs:
- config_name: easy
  default: true
  data_files:
  - split: train
    path: easy/train-*
  - split: validation
    path:
    - easy/val.jsonl
- config_name: hard
  data_files: hard/**/*.parquet
- config_name: folder
  data_dir: folder
---
# A dataset
"""
FILES = {
    "README.md": CARD,
    "easy/train-00000-of-00002.parquet": b"p0",
    "easy/train-00001-of-00002.parquet": b"p1",
    "easy/val.jsonl": b"{}",
    "hard/deep/er/x.parquet": b"h",
    "folder/train.csv": b"a,b",
    "folder/test.csv": b"c,d",
    "loader.py": b"raise SystemExit",
    "data.pkl": b"\x80",
}


@pytest.fixture
def get(hub: LoopbackHub, tmp_path: Path):
    def resolve(name: str, **options) -> LocalFiles:
        return resolve_dataset(
            name, endpoint=hub.endpoint, cache_dir=tmp_path / "cache", progress=False, **options
        )

    return resolve


def relative(found: LocalFiles) -> list[str]:
    return [path.relative_to(found.path).as_posix() for path in found.files]


def test_configs_and_splits_of_the_card(hub: LoopbackHub, get) -> None:
    commit = hub.add_dataset("owner/data", FILES)
    found = get("owner/data")
    assert relative(found) == ["easy/train-00000-of-00002.parquet", "easy/train-00001-of-00002.parquet"]
    assert [path.read_bytes() for path in found.files] == [b"p0", b"p1"]
    assert (found.commit, found.config, found.split, found.kind) == (commit, "easy", "train", "dataset")
    assert hub.fetched() == {"README.md", *relative(found)}, "only the split that was asked for"
    assert relative(get("owner/data", split="validation")) == ["easy/val.jsonl"]
    assert relative(get("owner/data", config="hard")) == ["hard/deep/er/x.parquet"]
    assert relative(get("owner/data", config="folder", split="test")) == ["folder/test.csv"]
    assert not {"loader.py", "data.pkl"} & hub.fetched()


def test_choices_are_listed(hub: LoopbackHub, get) -> None:
    hub.add_dataset("owner/data", FILES)
    with pytest.raises(DataError, match=r"no config 'x'; it has 'easy', 'hard', 'folder'"):
        get("owner/data", config="x")
    with pytest.raises(DataError, match=r"no split 'test'.*it has 'train', 'validation'"):
        get("owner/data", split="test")
    with pytest.raises(DataError, match=r"`first`"):
        get("owner/data", split="train[:10]")
    hub.add_dataset("owner/several", {**FILES, "README.md": CARD.replace("  default: true\n", "")})
    with pytest.raises(
        DataError, match=r"several configs, and none is the default; set config to one of 'easy'"
    ):
        get("owner/several")


def test_max_files_downloads_no_more(hub: LoopbackHub, get) -> None:
    hub.add_dataset("owner/data", FILES)
    assert relative(get("owner/data", max_files=1)) == ["easy/train-00000-of-00002.parquet"]
    assert "easy/train-00001-of-00002.parquet" not in hub.fetched()
    assert len(get("owner/data", max_files=2).files) == 2


def test_without_a_card_names_decide(hub: LoopbackHub, get) -> None:
    hub.add_dataset(
        "owner/plain", {"data/train-00000-of-00001.parquet": b"a", "data/test-00000-of-00001.parquet": b"b"}
    )
    assert relative(get("owner/plain")) == ["data/train-00000-of-00001.parquet"]
    hub.add_dataset(
        "owner/text", {"one.txt": b"a", "two.txt": b"b", "README.md": "no front matter", "LICENSE.txt": "x"}
    )
    assert relative(get("owner/text")) == ["one.txt", "two.txt"]


def test_the_hubs_parquet_copies(hub: LoopbackHub, get) -> None:
    files = {f"{c}/{s}/0000.parquet": f"{c}{s}" for c in ("en", "fr") for s in ("train", "held_out")}
    hub.add_dataset("owner/script", {"script.py": "x"})
    with pytest.raises(DataError, match=r"loading script.*refs/convert/parquet"):
        get("owner/script")
    hub.add_dataset("owner/script", files, branch="refs/convert/parquet")
    with pytest.raises(DataError, match="one of 'en', 'fr'"):
        get("owner/script", revision="refs/convert/parquet")
    found = get("owner/script", revision="refs/convert/parquet", config="fr", split="held_out")
    assert relative(found) == ["fr/held_out/0000.parquet"]


def test_nothing_readable(hub: LoopbackHub, get) -> None:
    hub.add_dataset("owner/zip", {"data.zip": b"x", "README.md": "x"})
    with pytest.raises(DataError, match=r"no data files.*\.zip"):
        get("owner/zip")


def test_offline_private_and_missing(hub: LoopbackHub, get) -> None:
    hub.add_dataset("owner/data", FILES, token="hf_right")
    with pytest.raises(HubError, match="private"):
        get("owner/data")
    first = get("owner/data", token="hf_right")
    with pytest.raises(HubError, match="not on the hub"):
        get("owner/nothing")
    hub.close()
    assert get("owner/data", offline=True) == first
    with pytest.raises(HubError, match="is incomplete in the local cache"):
        get("owner/data", config="hard", offline=True)


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    assert resolve_dataset(tmp_path / "x.txt").files == [tmp_path / "x.txt"]
    with pytest.raises(DataError, match="does not exist"):
        resolve_dataset(str(tmp_path / "gone.txt"))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.json", ["a.json"]),
        ("**/*.json", ["a.json", "d/b.json", "d/e/c.json"]),
        ("d/*", ["d/b.json"]),
        ("d", ["d/b.json", "d/e/c.json"]),
        ("./d/**", ["d/b.json", "d/e/c.json"]),
        ("[ab].json", ["a.json"]),
        ("[!a].json", []),
        ("{a,z}.json", ["a.json"]),
        ("?.json", ["a.json"]),
        ("a.jso(n)", []),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert matching(pattern, ["a.json", "d/b.json", "d/e/c.json"]) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.jsonl", "dev.jsonl"], {"train": ["train.jsonl"], "validation": ["dev.jsonl"]}),
        (["train/a.txt", "test/a.txt"], {"train": ["train/a.txt"], "test": ["test/a.txt"]}),
        (["trainer.txt"], {"train": ["trainer.txt"]}),
        (["my_train_1.csv", "latest.csv"], {"train": ["my_train_1.csv"]}),
        (["data/sft-00000-of-00001.parquet"], {"sft": ["data/sft-00000-of-00001.parquet"]}),
        ([], {}),
    ],
)
def test_splits_by_name(names: list[str], expected: dict[str, list[str]]) -> None:
    assert splits_by_name(names) == expected


def test_card_forms() -> None:
    names = ["a/x.json", "b/y.json"]
    for data_files, expected in (
        ("a/*", {"train": ["a/x.json"]}),
        (["a/*", "b/*"], {"train": names}),
        ({"train": "a/*", "test": ["b/*"]}, {"train": ["a/x.json"], "test": ["b/y.json"]}),
        ([{"split": "test", "path": "b/*"}], {"test": ["b/y.json"]}),
    ):
        assert (
            configs({"configs": [{"config_name": "c", "data_files": data_files}]}, names)[0].splits
            == expected
        )


def test_broken_and_malicious_cards() -> None:
    assert front_matter("# no front matter\n---\nx: 1\n---\n") == {}
    assert front_matter("---\n- a\n---\n") == {}
    assert front_matter("\ufeff---\r\nlicense: mit\r\n---\r\n") == {"license": "mit"}
    with pytest.raises(DataError, match="card cannot be read"):
        front_matter("---\na: [1\n---\n")
    with pytest.raises(DataError, match="card cannot be read"):
        front_matter("---\na: !!python/object/apply:os.system ['true']\n---\n")
