"""Models by name, against a hub on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from loopback_hub import LoopbackHub

from trimtab.facts.errors import HubError, ModelError, ResourceError
from trimtab.hub import LocalFiles, resolve_model
from trimtab.hub import repository as repository_module

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"eos_token": "</s>"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80\x04pickle",
    "modeling_evil.py": "raise SystemExit",
    "README.md": "# card",
    "consolidated.safetensors": WEIGHTS + b"!",
    "onnx/model.onnx": b"x",
}


@pytest.fixture
def get(hub: LoopbackHub, tmp_path: Path):
    def resolve(name: str, **options) -> LocalFiles:
        return resolve_model(
            name, endpoint=hub.endpoint, cache_dir=tmp_path / "cache", progress=False, **options
        )

    return resolve


def test_an_id_becomes_a_folder_pinned_to_its_commit(hub: LoopbackHub, get) -> None:
    commit = hub.add_model("owner/name", FILES)
    found = get("owner/name")
    assert (found.kind, found.commit, found.name) == ("folder", commit, "owner/name")
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    names = {p.relative_to(found.path).as_posix() for p in found.path.rglob("*") if p.is_file()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def test_pickles_and_code_are_never_requested(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/name", FILES)
    get("owner/name")
    assert hub.fetched() == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def test_without_weights_only_small_files_are_downloaded(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/name", FILES)
    get("owner/name", weights=False)
    assert "model.safetensors" not in hub.fetched()
    assert get("owner/name").path.joinpath("model.safetensors").is_file()


def test_branches_tags_and_commits(hub: LoopbackHub, get) -> None:
    old = hub.add_model("owner/name", {**FILES, "config.json": '{"v": 1}'})
    hub.tag("models", "owner/name", "v1", old)
    new = hub.add_model("owner/name", {**FILES, "config.json": '{"v": 2}'})
    side = hub.add_model("owner/name", {**FILES, "config.json": '{"v": 3}'}, branch="feature/x")
    for revision, commit, version in ((None, new, 2), ("v1", old, 1), (old, old, 1), ("feature/x", side, 3)):
        found = get("owner/name", revision=revision)
        assert found.commit == commit
        assert json.loads((found.path / "config.json").read_text()) == {"v": version}
    with pytest.raises(HubError, match=r"no revision 'v9'; name a branch"):
        get("owner/name", revision="v9")


def test_a_branch_that_moved_gives_the_new_commit_and_a_pinned_one_stays(hub: LoopbackHub, get) -> None:
    old = hub.add_model("owner/name", FILES)
    assert get("owner/name").commit == old
    new = hub.add_model("owner/name", {**FILES, "config.json": "{}"})
    assert get("owner/name").commit == new
    assert get("owner/name", revision=old).commit == old


def test_private_model_needs_its_token(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/secret", FILES, token="hf_right")
    with pytest.raises(HubError, match=r"private.*hf auth login"):
        get("owner/secret")
    with pytest.raises(HubError, match=r"not on the hub, or it is private"):
        get("owner/secret", token="hf_wrong")
    assert (get("owner/secret", token="hf_right").path / "model.safetensors").is_file()
    assert {s.authorization for s in hub.requests[-3:]} == {"Bearer hf_right"}


def test_the_token_stored_at_login_is_used(hub: LoopbackHub, get, tmp_path: Path) -> None:
    hub.add_model("owner/secret", FILES, token="hf_stored")
    (tmp_path / "token").write_text("hf_stored")
    assert get("owner/secret").commit


def test_gated_model_says_to_accept_its_conditions(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/gated", FILES, token="hf_accepted", gated=True)
    for token in (None, "hf_other"):
        with pytest.raises(HubError, match=r"gated; accept its conditions"):
            get("owner/gated", token=token)
    assert get("owner/gated", token="hf_accepted").commit


def test_unknown_id_and_broken_hub(hub: LoopbackHub, get) -> None:
    with pytest.raises(HubError, match="not on the hub"):
        get("owner/nothing")
    hub.add_model("owner/name", FILES)
    for status, message in (
        (500, "returned status 500"),
        (403, "may not read"),
        (429, "refuses further requests"),
    ):
        hub.status_for_all = status
        with pytest.raises(HubError, match=message):
            get("owner/name")


def test_no_network(hub: LoopbackHub, get) -> None:
    hub.close()
    with pytest.raises(HubError, match=r"could not be reached.*HF_HUB_OFFLINE=1"):
        get("owner/name")


def test_an_interrupted_download_is_resumed(hub: LoopbackHub, get) -> None:
    large = bytes(range(256)) * 96_000  # huggingface_hub writes in pieces of 10 MB
    hub.add_model("owner/name", {**FILES, "model.safetensors": large})
    hub.cut_once["model.safetensors"] = 22_000_000
    assert (get("owner/name").path / "model.safetensors").read_bytes() == large
    ranges = [s.range for s in hub.requests if s.path.endswith("model.safetensors") and s.method == "GET"]
    assert ranges[0] is None
    assert 10_000_000 < int(ranges[1].removeprefix("bytes=").split("-")[0]) <= 22_000_000


def test_repeatedly_lost_connections_are_an_error(
    hub: LoopbackHub, get, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_model("owner/name", FILES)
    tries = []

    def lose(*_: object, **__: object) -> None:
        tries.append(1)
        raise ConnectionError("lost")

    monkeypatch.setattr(repository_module, "snapshot_download", lose)
    monkeypatch.setattr(repository_module.time, "sleep", lambda _: None)
    with pytest.raises(HubError, match=r"could not be reached.*lost"):
        get("owner/name")
    assert len(tries) == 3


def test_second_use_offline_needs_no_server(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/name", FILES)
    first = get("owner/name")
    hub.close()
    count = len(hub.requests)
    assert get("owner/name", offline=True) == first
    assert get("owner/name", revision=first.commit).path == first.path, "a known commit needs no hub at all"
    assert len(hub.requests) == count
    with pytest.raises(HubError, match=r"not in the local cache.*offline mode off .HF_HUB_OFFLINE"):
        get("owner/other", offline=True)


def test_offline_notices_an_incomplete_download(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/name", FILES)
    get("owner/name", weights=False)
    with pytest.raises(HubError, match=r"is incomplete in the local cache \(model.safetensors"):
        get("owner/name", offline=True)


def test_offline_reads_what_another_tool_downloaded(hub: LoopbackHub, get, tmp_path: Path) -> None:
    commit = hub.add_model("owner/name", FILES)
    huggingface_hub.snapshot_download(
        "owner/name", endpoint=hub.endpoint, cache_dir=tmp_path / "cache", ignore_patterns=["*.bin", "*.py"]
    )
    hub.close()
    assert get("owner/name", offline=True).commit == commit


def test_shards_are_those_the_index_names(hub: LoopbackHub, get) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 99 for i in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {"config.json": "{}", **shards, "extra.safetensors": b"x"}
    hub.add_model("owner/big", {**files, "model.safetensors.index.json": json.dumps(index)})
    get("owner/big")
    assert hub.fetched() == {"config.json", "model.safetensors.index.json", *shards}
    index["weight_map"]["c"] = "../../escape.safetensors"
    hub.add_model("owner/evil", {**files, "model.safetensors.index.json": json.dumps(index)})
    with pytest.raises(HubError, match="outside the repository's folder"):
        get("owner/evil")
    hub.add_model("owner/odd", {**files, "model.safetensors.index.json": "[]"})
    with pytest.raises(ModelError, match="not an index"):
        get("owner/odd")
    del files["model-00002-of-00002.safetensors"]
    del index["weight_map"]["c"]
    hub.add_model("owner/short", {**files, "model.safetensors.index.json": json.dumps(index)})
    with pytest.raises(HubError, match="does not have the shard model-00002"):
        get("owner/short")


@pytest.mark.parametrize(
    "name", ["../../outside.json", "/etc/passwd", "a//b", "a\\b", "C:x", "a/../b", "x\n"]
)
def test_paths_outside_the_folder_are_an_error(hub: LoopbackHub, get, name: str) -> None:
    hub.add_model("owner/evil", {**FILES, name: b"x"})
    with pytest.raises(HubError, match="outside the repository's folder"):
        get("owner/evil")


def test_only_pickles(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/old", {"config.json": "{}", "pytorch_model.bin": b"\x80"})
    with pytest.raises(HubError, match=r"only pickles: pytorch_model\.bin"):
        get("owner/old")
    assert get("owner/old", weights=False).kind == "folder"
    hub.add_model("owner/empty", {"README.md": ""})
    with pytest.raises(HubError, match=r"no config\.json"):
        get("owner/empty")


def test_gguf_files_by_name_or_alone(hub: LoopbackHub, get) -> None:
    hub.add_model("owner/gguf", {"a.Q4_0.gguf": b"GGUF4", "sub/a.Q8_0.gguf": b"GGUF8", "README.md": "x"})
    found = get("owner/gguf/sub/a.Q8_0.gguf")
    assert (found.kind, found.path.read_bytes()) == ("gguf", b"GGUF8")
    assert hub.fetched() == {"sub/a.Q8_0.gguf"}
    with pytest.raises(HubError, match=r"several GGUF files: a\.Q4_0\.gguf"):
        get("owner/gguf")
    with pytest.raises(HubError, match=r"no file b\.gguf; its GGUF files are: a\.Q4"):
        get("owner/gguf/b.gguf")
    hub.add_model("owner/one", {"only.gguf": b"GGUF1"})
    assert get("owner/one").path.read_bytes() == b"GGUF1"


def test_a_full_disk_is_detected_before_downloading(
    hub: LoopbackHub, get, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_model("owner/name", FILES)
    usage = type("Usage", (), {"free": (256 << 20) + 1000})
    monkeypatch.setattr(repository_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"needs 100\.0 KiB"):
        get("owner/name")
    assert "model.safetensors" not in hub.fetched()


def test_local_paths_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.bin").write_bytes(b"\x80")
    (tmp_path / "m.txt").write_text("x")
    assert resolve_model(tmp_path / "m") == LocalFiles(
        "folder", tmp_path / "m", None, name=str(tmp_path / "m")
    )
    assert resolve_model(str(tmp_path / "m.gguf")).kind == "gguf"
    with pytest.raises(ModelError, match="pickle"):
        resolve_model(tmp_path / "m.bin")
    with pytest.raises(ModelError, match="not a model"):
        resolve_model(tmp_path / "m.txt")


@pytest.mark.parametrize(
    "name", ["./gone", "/gone/x", "~/gone", "a/b/c", "models/", "https://hub/x", "a b/c", ""]
)
def test_a_mistyped_path_never_reaches_the_hub(hub: LoopbackHub, get, name: str) -> None:
    if name == "":
        name = "…"
    with pytest.raises(ModelError, match="does not exist"):
        get(name)
    assert hub.requests == []


def test_endpoint_and_offline_through_huggingface_hubs_own_settings(hub: LoopbackHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are read by huggingface_hub at import: needs a separate process."""
    hub.add_model("owner/name", FILES)
    code = (
        "import sys; from trimtab.hub import resolve_model;"
        "print(resolve_model('owner/name', progress=False).commit);"
        "assert 'torch' not in sys.modules"
    )
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PATH": "/usr/bin",
    }
    run = [sys.executable, "-c", code]
    options = {"capture_output": True, "text": True, "check": True}
    first = subprocess.run(run, env=settings, **options).stdout
    assert (tmp_path / "hub" / "models--owner--name").is_dir()
    hub.close()
    assert subprocess.run(run, env={**settings, "HF_HUB_OFFLINE": "1"}, **options).stdout == first


def test_a_typo_in_a_local_path_is_not_sent_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match="runs/demp does not exist"):
        resolve_model("runs/demp")
