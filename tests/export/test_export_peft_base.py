"""Adapters whose base peft cannot load by its name, and the permissions of written files."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from command import call
from test_model_gguf import write_gguf
from tiny_model import tiny_shape, write_recipe, write_tiny_model

import trimtab
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.model import build, load_weights

LORA: dict[str, Any] = {
    "lora": {"r": 4, "lora_alpha": 64},
    "num_train_epochs": None,
    "max_steps": 3,
    "eval_steps": None,
    "save_steps": None,
    "eval_on_start": False,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file (`base.gguf`) and a run with an adapter on it (`run`), which tests must not change."""
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny_model(folder / "model")
    decoder = build(tiny_shape(), dtype="fp32", device="cpu", attention="reference")
    load_weights(decoder, folder / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    write_gguf(decoder, folder / "base.gguf", tokenizer=tokenizer)
    code, said = call("train", write_recipe(folder, model={"name": str(folder / "base.gguf")}, **LORA))
    assert code == 0, said
    return folder


@pytest.mark.oracle
def test_peft_loads_an_adapter_of_a_gguf_base_as_the_export_advises(world: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    code, said = call("export", "peft", world / "run", adapter)
    assert code == 0, said
    name = world / "base.gguf"
    assert f"peft cannot load the base by the name {name}: it is a GGUF file" in said
    assert f"`trimtab export hf {name} FOLDER`" in said
    assert "`--base FOLDER --overwrite`" in said
    with pytest.raises((OSError, ValueError)):
        peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    code, said = call("export", "hf", name, base, "--dtype", "fp32")
    assert code == 0, said
    code, said = call("export", "peft", world / "run", adapter, "--base", base, "--overwrite")
    assert code == 0, said
    assert "cannot load" not in said
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    ours = trimtab.load(world / "run", dtype="fp32", device="cpu").opened.decoder
    ids_BT = torch.arange(40)[None]
    with torch.no_grad():
        expected = ours.logits(ours(ids_BT))
        torch.testing.assert_close(theirs(ids_BT).logits, expected, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert float((theirs(ids_BT).logits - expected).abs().max()) > 1e-3
    for place in (name, base):
        assert trimtab.load(place, adapter=adapter, dtype="fp32").adapters == ["default"]


def test_invalid_base_names(world: Path, tmp_path: Path) -> None:
    model = trimtab.load(world / "run", dtype="fp32", device="cpu")
    with pytest.raises(RecipeError, match="does not exist"):
        model.save_adapter(tmp_path / "a", base_name=str(tmp_path / "absent"))
    with pytest.raises(RecipeError, match="not a Hugging Face folder"):
        model.save_adapter(tmp_path / "a", base_name=str(world / "base.gguf"))
    write_tiny_model(tmp_path / "other", num_layers=3)
    write_tiny_model(tmp_path / "wide", hidden_size=64)
    for name in ("other", "wide"):
        with pytest.raises(ModelError, match="is another model"):
            model.save_adapter(tmp_path / "a", base_name=str(tmp_path / name))
    assert not (tmp_path / "a").exists()
    model.save_adapter(tmp_path / "a", base_name="someone/their-model")
    assert (
        '"base_model_name_or_path": "someone/their-model"' in (tmp_path / "a/adapter_config.json").read_text()
    )


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_written_files_follow_the_umask(world: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        code, said = call("export", "peft", world / "run", tmp_path / "adapter")
        assert code == 0, said
        code, said = call("merge", world / "run", tmp_path / "merged")
        assert code == 0, said
        folder = tmp_path / "again"
        folder.mkdir()
        shutil.copytree(world / "model", folder / "model")
        recipe = write_recipe(folder, model={"name": str(folder / "model")}, **LORA)
        code, said = call("train", recipe, "max_steps=1")
        assert code == 0, said
    finally:
        os.umask(before)
    written = [
        path
        for name in ("adapter", "merged", "again/run", "again/cache")
        for path in (tmp_path / name).rglob("*")
    ]
    assert any(path.name == "adapter_model.safetensors" for path in written)
    assert any("checkpoints" in path.parts and path.suffix == ".safetensors" for path in written)
    wrong = {
        str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in written
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o666 & ~umask
    }
    # Locks are made for everybody to read, less what the umask forbids.
    assert wrong == {}
