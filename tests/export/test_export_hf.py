"""Exports are verified before they are published, and transformers loads the same model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from trimtab import text
from trimtab.export import Receipt, export_hf
from trimtab.export import hf as hf_module
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights
from trimtab.model.decoder import Decoder

SHAPE = uniform_shape(
    "qwen3",
    300,
    32,
    48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm=True,
    tie_embeddings=True,
)


def decoder(dtype: str = "fp32", shape: ModelShape = SHAPE) -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention="sdpa_flash"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> text.Tokenizer:
    """Byte-level BPE without merges: 256 bytes and an EOS token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return text.load(folder)


@pytest.mark.oracle
@pytest.mark.parametrize(("loaded", "stored"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_transformers_loads_the_same_model(
    loaded: str, stored: str, tokenizer: text.Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = decoder(loaded)
    receipt = export_hf(
        model, tokenizer, tmp_path / "out", dtype=stored, receipt=tmp_path / "receipts/export-hf-1.json"
    )
    assert [check.name for check in receipt.checks] == ["names and shapes", "weights", "logits", "tokenizer"]
    kept = json.loads((tmp_path / "receipts/export-hf-1.json").read_text())
    assert Receipt.from_dict(kept) == receipt
    assert set(receipt.files) == {path.name for path in (tmp_path / "out").iterdir()}

    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert oracle.dtype == (torch.float32 if stored == "fp32" else torch.bfloat16)
    theirs = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to(oracle.dtype), theirs[name]), name
    assert oracle.config.eos_token_id == oracle.generation_config.eos_token_id == tokenizer.eos_id
    if stored == "fp32":
        ids_BT = torch.tensor([receipt.token_ids])
        with torch.no_grad():
            ours_BTV = model.logits(model(ids_BT))
            assert (oracle(input_ids=ids_BT).logits - ours_BTV).abs().max() < 1e-5
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.encode("f(x) = 3·x²", add_special_tokens=False) == tokenizer.encode("f(x) = 3·x²")


def test_a_receipt_has_files_and_logits(tmp_path: Path) -> None:
    import hashlib

    first = export_hf(
        decoder(), None, tmp_path / "a", dtype="fp32", max_shard_bytes=9_000, source={"step": 7}
    )
    again = export_hf(decoder(), None, tmp_path / "b", dtype="fp32", max_shard_bytes=9_000)
    assert len([name for name in first.files if name.endswith(".safetensors")]) > 2
    for name, facts in first.files.items():
        content = (tmp_path / "a" / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert first.files == again.files
    assert first.logits_sha256 == again.logits_sha256
    assert (first.source, first.num_parameters) == ({"step": 7}, SHAPE.num_parameters)
    assert "tokenizer" not in [check.name for check in first.checks]
    other = decoder()
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    assert export_hf(other, None, tmp_path / "c", dtype="fp32").logits_sha256 != first.logits_sha256


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "differs between file and memory"),
        (lambda raw: raw.replace(b"model.norm.weight", b"model.nord.weight"), "tensors differ"),
        (lambda raw: raw.replace(b'"F32"', b'"I32"'), "tensors differ"),
        (lambda raw: raw + b"\0", "belong to no tensor"),
    ],
)
def test_damage_between_writing_and_reading_is_caught(
    damage: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hf_module.write_model

    def write_and_damage(model: Decoder, folder: Path, **options: Any) -> list[str]:
        names = real(model, folder, **options)
        path = folder / "model.safetensors"
        path.write_bytes(damage(path.read_bytes()))
        return names

    monkeypatch.setattr(hf_module, "write_model", write_and_damage)
    with pytest.raises(ModelError, match=message):
        export_hf(decoder(), None, tmp_path / "out", dtype="fp32", receipt=tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_a_config_of_another_shape_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_module.write_model

    def write_and_change(model: Decoder, folder: Path, **options: Any) -> list[str]:
        names = real(model, folder, **options)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
        return names

    monkeypatch.setattr(hf_module, "write_model", write_and_change)
    with pytest.raises(ModelError, match=r"config\.json describes a different architecture"):
        export_hf(decoder(), None, tmp_path / "out", dtype="fp32")
    assert list(tmp_path.iterdir()) == []


def test_other_logits_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_module._logits
    calls = []

    def off_by_a_bit(model: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
        calls.append(model)
        return real(model, ids_BT) + (1e-6 if len(calls) == 2 else 0)

    monkeypatch.setattr(hf_module, "_logits", off_by_a_bit)
    with pytest.raises(ModelError, match="logits differ by up to"):
        export_hf(decoder(), None, tmp_path / "out", dtype="fp32")


def test_a_tokenizer_larger_than_the_model(tokenizer: text.Tokenizer, tmp_path: Path) -> None:
    small = dataclasses.replace(SHAPE, vocab_size=256)
    with pytest.raises(ModelError, match="the tokenizer has 257 tokens, the model 256"):
        export_hf(decoder(shape=small), tokenizer, tmp_path / "out", dtype="fp32")


def test_existing_folders_and_full_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_hf(decoder(), None, tmp_path / "out", dtype="fp32")
    with pytest.raises(ModelError, match="exists already"):
        export_hf(decoder(), None, tmp_path / "out", dtype="fp32")
    export_hf(decoder(), None, tmp_path / "out", dtype="bf16", overwrite=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ResourceError, match="10 B free"):
        export_hf(decoder(), None, tmp_path / "new", dtype="fp32")
