"""`torch_compile` in complete runs: decided once, stored, resumed bit-identically, counted in the log."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
from tiny_model import tiny_shape, write_recipe
from whole_run import Silent, losses, records, relative

from trimtab import launch
from trimtab.facts import compilers
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import ModelShape
from trimtab.plan.resolved import CompileConfig, Resolved
from trimtab.plan.resolved_json import resolved_from_dict, resolved_to_dict
from trimtab.recipe import load, loads
from trimtab.run.resolve import resolve_backends, resolve_inference

CPU = DeviceFacts("a CPU", "cpu", memory_bytes=2**34)
GPU = DeviceFacts("a GPU", "cuda", memory_bytes=2**34, capability=(9, 0), bf16=True)
LARGE = tiny_shape(vocab_size=2_000_000, max_positions=2048)


def resolved(line: str, device: DeviceFacts, shape: ModelShape = LARGE) -> Resolved:
    recipe = loads(f"model: x\ndata: {{train: y}}\n{line}")
    return resolve_backends(recipe, shape, device, threads=1)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which of Triton and the compilers are installed."""
    there = {"gcc": True, "g++": True, "triton": True}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compilers.shutil, "which", lambda name: name if there.get(name) else None)
    monkeypatch.setattr(compilers, "find_spec", lambda name: object() if there.get(name) else None)
    return there


def test_auto_does_not_compile_and_gives_the_reason(tools: dict[str, bool]) -> None:
    assert resolved("", CPU).compile.enabled is False
    assert "leave little to gain" in resolved("", GPU).compile.reason
    tools["gcc"] = False
    missing = resolved("", GPU).compile
    assert (missing.enabled, missing.reason) == (False, "there is no C compiler (install gcc)")


def test_an_explicit_setting_is_used_or_raises(tools: dict[str, bool]) -> None:
    assert resolved("torch_compile: true", CPU).compile.enabled is True
    assert resolved("torch_compile: false", GPU).compile.enabled is False
    tools["g++"] = False
    with pytest.raises(ResourceError, match="no C\\+\\+ compiler"):
        resolved("torch_compile: true", CPU)
    tools["triton"] = False
    with pytest.raises(ResourceError, match="Triton is not installed"):
        resolved("torch_compile: true", GPU)


def test_sequences_have_one_length_and_offsets_of_documents_do_not() -> None:
    assert resolved("torch_compile: false", CPU).compile.dynamic is False
    varlen = "torch_compile: false\nmodel: {name: x, attn_implementation: varlen}\npacking: "
    recipes = [loads(f"data: {{train: y}}\n{varlen}{packing}") for packing in ("true", "false")]
    found = [resolve_backends(recipe, LARGE, GPU, threads=1).compile.dynamic for recipe in recipes]
    assert found == [True, False]


def test_unpacked_sequences_have_their_fastest_attention() -> None:
    packed, whole = (resolved(f"packing: {word}", GPU).attention.layers[0] for word in ("true", "false"))
    assert packed.unpacked == packed.packed
    assert (whole.packed, whole.unpacked) == (packed.packed, "sdpa_cudnn")
    same = resolved("packing: false\ndeterministic: true", CPU).attention.layers[0]
    assert same.unpacked == same.packed


def test_layers_with_another_head_dim_have_their_own_attention() -> None:
    narrow = LARGE.blocks[0]
    wide = dataclasses.replace(narrow, mixer=dataclasses.replace(narrow.attention, head_dim=512))
    mixed = dataclasses.replace(LARGE, blocks=(narrow, wide, narrow))
    recipe = loads("model: x\ndata: {train: y}")
    layers = resolve_backends(recipe, mixed, GPU, threads=1).attention.layers
    alone = [
        resolve_backends(
            recipe, dataclasses.replace(LARGE, blocks=(block,)), GPU, threads=1
        ).attention.layers[0]
        for block in mixed.blocks
    ]
    assert list(layers) == alone
    assert layers[0] == layers[2] != layers[1]
    inference = resolve_inference(mixed, "cuda", dtype="bf16", capability=(9, 0)).attention.layers
    assert inference[0] == inference[2] != inference[1]


def test_an_old_folder_has_no_compile_setting() -> None:
    kept = resolved_to_dict(resolved("", CPU))
    del kept["compile"]
    assert resolved_from_dict(kept, LARGE.num_layers).compile == CompileConfig(enabled=False)


@pytest.mark.slow
def test_a_compiled_run_is_counted_and_resumes_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo as dynamo

    changes = {"torch_compile": True, "save_steps": 2, "max_steps": 4, "num_train_epochs": None}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))

    def recipe(name: str, **more: object) -> Path:
        return write_recipe(tmp_path, output_dir=str(tmp_path / name), **{**changes, **more})

    dynamo.utils.counters.clear()
    launch.train(load(recipe("whole")), Silent())
    first, last = records(tmp_path / "whole", "compile")
    assert first["first_step_seconds"] > 0
    assert (first["step"], last["step"]) == (1, 4)
    assert first["count"] == last["count"] == 1, "one program for every layer and step"
    assert json.loads((tmp_path / "whole" / "choices.json").read_text())["compile"]["on"] is True

    def stop(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    half = launch.train(load(recipe("half")), Silent(), after_step=stop)
    assert half.status == "interrupted"
    dynamo.reset()
    assert launch.resume(tmp_path / "half", [], Silent()).status == "finished"
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")

    launch.train(load(recipe("plain", torch_compile=False)), Silent())
    assert relative(losses(tmp_path / "whole"), losses(tmp_path / "plain")) < 1e-5
    assert records(tmp_path / "plain", "compile") == []


@pytest.mark.slow
def test_fp16_with_a_scaled_loss_trains_adapters_on_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    changes = {
        "dtype": "fp16",
        "lora": {"r": 4},
        "load_in_4bit": True,
        "recompute": "block",
        "max_steps": 4,
        "num_train_epochs": None,
    }
    curves = []
    for on in (True, False):
        path = write_recipe(tmp_path, output_dir=str(tmp_path / f"run-{on}"), torch_compile=on, **changes)
        assert launch.train(load(path), Silent()).status == "finished"
        curves.append(losses(tmp_path / f"run-{on}"))
    assert relative(*curves) < 5e-3
    assert curves[0][-1] < curves[0][0]
