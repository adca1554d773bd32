"""Invalid model files are refused by name before training, and nothing is left behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_world import Call, World
from safetensors.torch import load_file, save_file

Job = Callable[..., Path]
Damage = Callable[[Path], None]
NORM = "model.norm.weight"


def _change(**tensors: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        loaded = load_file(path)
        for name, change in tensors.items():
            changed = change(loaded.pop(name.replace("__", ".")))
            if changed is not None:
                loaded[name.replace("__", ".")] = changed
        save_file(loaded, path)

    return damage


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")


def _config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def _shard_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {NORM: "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor[3] = float("nan")
    return tensor


CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "truncated": (_truncate, ("model.safetensors",)),
    "empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"") and None,
        ("model.safetensors",),
    ),
    "huge header": (_huge_header, ("model.safetensors",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("safetensors",)),
    "pickle": (_pickle_only, ("pytorch_model.bin", "pickle")),
    "missing tensor": (_change(model__norm__weight=lambda t: None), (NORM,)),
    "wrong shape": (_change(model__norm__weight=lambda t: t[:-1].clone()), (NORM, "31", "32")),
    "integers": (_change(model__norm__weight=lambda t: t.to(torch.int32)), (NORM,)),
    "not a number": (_change(model__norm__weight=_poison), (NORM,)),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, ("config.json",)),
    "unknown family": (_config(model_type="mamba9", architectures=["Mamba9"]), ("mamba9",)),
    "layers beyond the file": (_config(num_hidden_layers=3), ("layers.2",)),
    "heads that do not divide": (_config(num_attention_heads=3), ("heads",)),
    "negative size": (_config(hidden_size=-4), ("hidden_size",)),
    "remote code": (_config(auto_map={"AutoModelForCausalLM": "x.Y"}, model_type="custom"), ("custom",)),
    "shard outside": (_shard_outside, ("outside.safetensors",)),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer",)),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}") and None, ("tokenizer.json",)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_folders(job: Job, cli: Call, tmp_path: Path, model_copy: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(model_copy)
    cli("train", job(model=str(model_copy))).refused(4, *words)
    assert not (tmp_path / "run").exists()
    cli("generate", model_copy, "the cat", "--max-new-tokens", 2).refused(4, *words)


def test_config_missing(job: Job, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    for verb in ("train", "plan"):
        cli(verb, job(model=str(tmp_path / "hollow"))).refused(4, "config.json")


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "weights.pth", "weights.ckpt", "weights.pkl"])
def test_pickles_by_path(job: Job, cli: Call, tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    cli("train", job(model=str(tmp_path / name))).refused(4, name, "pickle")


def test_no_such_model(job: Job, cli: Call, tmp_path: Path) -> None:
    cli("train", job(model=str(tmp_path / "absent"))).refused(4, "absent")
    cli("generate", tmp_path / "absent", "x").refused(4, "absent")
    cli("eval", tmp_path / "absent").refused(4, "absent")
    cli("export", "hf", tmp_path / "absent", tmp_path / "out").refused(4, "absent")
    assert not (tmp_path / "out").exists()


def _gguf(*, count: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, keys) + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"not a gguf at all",
        _gguf(),
        _gguf(count=2**62, keys=2**62),
        _gguf(keys=1, body=struct.pack("<Q", 2**62) + b"abc"),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        _gguf(keys=1, body=struct.pack("<Q", 3) + b"key" + struct.pack("<I", 77)),
    ],
)
def test_malformed_gguf(job: Job, cli: Call, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    cli("train", job(model=str(path))).refused(4, "model.gguf")
    cli("plan", job(model=str(path))).refused(4, "model.gguf")
    assert not (tmp_path / "run").exists()


def test_random_start_needs_no_weights(job: Job, cli: Call, model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    result = cli("train", job(model={"name": str(model_copy), "init": "random"}))
    assert result.code == 0, result.err


def test_a_checkpoint_from_another_model(world: World, cli: Call, tmp_path: Path) -> None:
    import shutil

    from tiny_model import write_recipe, write_tiny_model

    write_tiny_model(tmp_path / "model", hidden_size=64, head_dim=16)
    recipe = write_recipe(
        tmp_path, num_train_epochs=None, max_steps=2, eval_steps=None, lr_scheduler_type="constant"
    )
    assert cli("train", recipe).code == 0
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(world.run / "checkpoints", run / "checkpoints")
    cli("train", "--resume", run, "max_steps=9").refused(5, "another model")
    cli("generate", run, "the cat", "--max-new-tokens", 2).refused(5, "another model")
