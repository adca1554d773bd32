"""Loading and saving folders: bitwise round trips, and errors that name the problem and the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trimtab.facts.errors import ModelError, ResourceError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights, load_weights, read_shape, save_folder
from trimtab.model import save as save_module
from trimtab.model.decoder import Decoder

SHAPE = uniform_shape(
    "qwen2", 64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True
)
TIED = uniform_shape(
    "llama", 64, 32, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, tie_embeddings=True
)


def fresh(shape: ModelShape = SHAPE, dtype: str = "fp32") -> Decoder:
    return build(shape, dtype=dtype, device="cpu", attention="reference")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_folder(init_weights(fresh(), seed=0), tmp_path / "model", dtype="fp32")
    return tmp_path / "model"


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors of the folder's one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shard_bytes", [10**9, 8_000])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_save_and_load_round_trip(dtype: str, shard_bytes: int, tmp_path: Path) -> None:
    source = init_weights(fresh(dtype=dtype), seed=1)
    files = save_folder(
        source, tmp_path / "m", dtype=dtype, max_shard_bytes=shard_bytes, metadata={"by": "me"}
    )
    assert sorted(files) == sorted((tmp_path / "m").iterdir())
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert (len(weights) > 2) == (shard_bytes == 8_000)
    with safe_open(weights[0], framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "by": "me"}
    assert read_shape(tmp_path / "m") == SHAPE
    decoder = fresh(dtype=dtype)
    provenance = load_weights(decoder, tmp_path / "m")
    for (name, a), (_, b) in zip(source.named_parameters(), decoder.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert provenance.formats == {dtype: len(list(SHAPE.parameters()))}
    assert set(provenance.checksums()) == {file.name for file in weights}


def test_dtype_is_converted_on_reading_and_writing(saved: Path, tmp_path: Path) -> None:
    decoder = fresh(dtype="bf16")
    load_weights(decoder, saved)
    expected = load_file(saved / "model.safetensors")["lm_head.weight"].bfloat16()
    assert torch.equal(decoder.head_weight, expected)
    save_folder(decoder, tmp_path / "again", dtype="fp32")
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert config["dtype"] == "float32"
    assert load_file(tmp_path / "again/model.safetensors")["lm_head.weight"].dtype == torch.float32


def test_random_weights_depend_only_on_seed_and_name() -> None:
    deeper = dataclasses.replace(SHAPE, blocks=SHAPE.blocks[:1] * 3)
    a, b = init_weights(fresh(), seed=5), init_weights(fresh(deeper), seed=5)
    others = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        assert torch.equal(parameter, others[name]), name
    assert not torch.equal(a.head_weight, init_weights(fresh(), seed=6).head_weight)
    assert abs(float(a.head_weight.detach().std()) - 0.02) < 1e-3
    assert torch.equal(init_weights(fresh(dtype="bf16"), seed=5).head_weight, a.head_weight.bfloat16())


def test_base_model_names_and_computed_tensors(tmp_path: Path) -> None:
    source = init_weights(fresh(TIED), seed=0)
    save_folder(source, tmp_path / "m", dtype="fp32")

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()

    rewrite(tmp_path / "m", strip)
    decoder = fresh(TIED)
    provenance = load_weights(decoder, tmp_path / "m")
    assert sorted(provenance.ignored) == ["layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
    assert torch.equal(decoder.head_weight, source.head_weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"is missing 1 of \d+ tensors: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(3)), r"unexpected tensors: extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(64, 33)}),
            r"\[64, 33\], but .* \[64, 32\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(64, 32, dtype=torch.int8)}), "stored as I8"),
        (lambda t: t["model.norm.weight"].__setitem__(4, float("nan")), r"model\.norm\.weight contains NaN"),
        (lambda t: t["model.norm.weight"].__setitem__(4, float("inf")), r"contains NaN or infinity"),
    ],
)
def test_wrong_tensors_are_named(saved: Path, change: Any, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(fresh(), saved)
    assert caught.value.remedy


def test_truncated_and_garbled_files(saved: Path) -> None:
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-10], whole[:100], b"", b"\xff" * 64, (2**60).to_bytes(8, "little") + whole[8:]):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="not a complete safetensors file"):
            load_weights(fresh(), saved)


def test_nothing_is_changed_when_validation_fails(saved: Path) -> None:
    rewrite(saved, lambda t: t.pop("lm_head.weight"))
    decoder = init_weights(fresh(), seed=9)
    before = decoder.model.embed_tokens.weight.clone()
    with pytest.raises(ModelError):
        load_weights(decoder, saved)
    assert torch.equal(decoder.model.embed_tokens.weight, before)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "c\\d"])
def test_an_index_cannot_reach_outside(saved: Path, name: str) -> None:
    index = {"weight_map": {"lm_head.weight": name}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside its folder"):
        load_weights(fresh(), saved)


def test_an_index_with_a_missing_or_pickled_shard(saved: Path) -> None:
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"has no model-2\.safetensors"):
        load_weights(fresh(), saved)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "pytorch_model.bin"}}))
    with pytest.raises(ModelError, match="pickle"):
        load_weights(fresh(), saved)
    index.write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        load_weights(fresh(), saved)


def test_a_tensor_in_two_shards_raises(saved: Path) -> None:
    shutil.copy(saved / "model.safetensors", saved / "b.safetensors")
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "model.norm.weight": "b.safetensors"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"is in b\.safetensors and in model\.safetensors"):
        load_weights(fresh(), saved)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "consolidated.00.pth"])
def test_pickles_raise_without_being_loaded(saved: Path, name: str) -> None:
    (saved / "model.safetensors").unlink()
    (saved / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    with pytest.raises(ModelError, match=r"is a pickle.*safetensors"):
        load_weights(fresh(), saved)
    with pytest.raises(ModelError, match="is a pickle"):
        read_shape(saved / name)


def test_paths_that_are_not_a_model(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_shape(tmp_path)
    with pytest.raises(ModelError, match="give the folder"):
        read_shape(saved / "model.safetensors")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="name the file"):
        read_shape(tmp_path)
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="init: random"):
        load_weights(fresh(), saved)


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = init_weights(fresh(), seed=0)
    with torch.no_grad():
        decoder.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match=r"model\.norm\.weight contains NaN"):
        save_folder(decoder, tmp_path / "m", dtype="fp32")
    assert list(tmp_path.iterdir()) == []

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    init_weights(decoder, seed=0)
    monkeypatch.setattr(save_module, "save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        save_folder(decoder, tmp_path / "m", dtype="fp32")
    assert list(tmp_path.iterdir()) == []


def test_overflow_on_saving_is_named(tmp_path: Path) -> None:
    decoder = init_weights(fresh(), seed=0)
    with torch.no_grad():
        decoder.model.norm.weight[0] = 1e6
    with pytest.raises(ModelError, match="overflows in fp16; save as bf16"):
        save_folder(decoder, tmp_path / "m", dtype="fp16")


def test_space_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="1000 B free"):
        save_folder(init_weights(fresh(), seed=0), tmp_path / "deep/er/m", dtype="fp32")
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_kept_unless_overwrite(saved: Path, tmp_path: Path) -> None:
    decoder = init_weights(fresh(), seed=7)
    with pytest.raises(ModelError, match="exists already"):
        save_folder(decoder, saved, dtype="fp32")
    save_folder(decoder, saved, dtype="fp32", overwrite=True)
    assert torch.equal(load_file(saved / "model.safetensors")["lm_head.weight"], decoder.head_weight)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/dear.txt").write_text("keep me")
    with pytest.raises(ModelError, match="not a model folder"):
        save_folder(decoder, tmp_path / "letters", dtype="fp32", overwrite=True)
    (tmp_path / "empty").mkdir()
    save_folder(decoder, tmp_path / "empty", dtype="fp32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "letters", "model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResourceError, match="cannot be written"):
        save_folder(init_weights(fresh(), seed=0), tmp_path / "m", dtype="fp32")


def test_saving_over_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="cannot be written"):
        save_folder(init_weights(fresh(), seed=0), tmp_path / "file/m", dtype="fp32")


def test_a_shape_no_config_can_describe_is_not_saved(tmp_path: Path) -> None:
    mixer = dataclasses.replace(TIED.attention, qkv_bias=True)
    odd = dataclasses.replace(TIED, blocks=(dataclasses.replace(TIED.block, mixer=mixer),) * TIED.num_layers)
    with pytest.raises(ModelError, match="cannot describe"):
        save_folder(init_weights(fresh(odd), seed=0), tmp_path / "m", dtype="fp32")


def test_config_extra_and_generation_config(tmp_path: Path) -> None:
    save_folder(
        init_weights(fresh(), seed=0),
        tmp_path / "m",
        dtype="fp32",
        config_extra={"eos_token_id": 7},
        generation_config={"temperature": 0.5},
    )
    assert json.loads((tmp_path / "m/config.json").read_text())["eos_token_id"] == 7
    assert json.loads((tmp_path / "m/generation_config.json").read_text()) == {"temperature": 0.5}


def test_saved_bytes_are_what_numpy_reads(saved: Path) -> None:
    decoder = fresh()
    load_weights(decoder, saved)
    raw = (saved / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    begin, end = header["model.norm.weight"]["data_offsets"]
    values = np.frombuffer(raw[8 + length + begin : 8 + length + end], dtype="<f4")
    assert np.array_equal(values, decoder.model.norm.weight.detach().numpy())
