"""A resume with another memory limit keeps MLP tiles and the loss's chunks, which determine rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_recipe, write_tiny_model

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import check_fits
from trimtab.recipe import load
from trimtab.run import prepare as preparing
from trimtab.run.prepare import Prepared, StoredConfig, prepare

QWEN = uniform_shape(
    "qwen3",
    151_936,
    1024,
    3072,
    28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=32_768,
    tie_embeddings=True,
)
GPU = DeviceFacts(
    "NVIDIA H200",
    "cuda",
    150 * 10**9,
    free_bytes=140 * 10**9,
    capability=(9, 0),
    bf16=True,
    triton=True,
    host_free_bytes=120 * 2**30,
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that is planned for a large model on a large GPU."""
    monkeypatch.setattr(preparing, "detect", lambda *_: GPU)
    monkeypatch.setattr(preparing, "shape_of", lambda *_: QWEN)
    monkeypatch.setattr(preparing, "read_shape", lambda *_: QWEN)
    write_tiny_model(tmp_path / "model")
    return write_recipe(
        tmp_path, dtype="bf16", device="auto", max_seq_length=4096, per_device_train_batch_size=8
    )


def resumed(begun: Prepared, recipe: Path, *changes: str) -> Prepared:
    return prepare(
        load(recipe, changes),
        StoredConfig(begun.resolved, begun.model, None, begun.device, memory_changed=True),
    )


@pytest.mark.parametrize(
    "changes",
    [("memory_limit=20GB",), ("memory_limit=60GB",), ("memory_limit=12GB",), ("recompute=offload",)],
    ids=" ".join,
)
def test_the_loss_keeps_its_chunks(recipe: Path, changes: tuple[str, ...]) -> None:
    begun = prepare(load(recipe, ["memory_limit=13GB"]))
    other = ["memory_limit=13GB"] if "memory_limit" not in changes[0] else []
    again = resumed(begun, recipe, *other, *changes)
    before, after = begun.resolved.memory_plan, again.resolved.memory_plan
    allowed = begun.resolved.loss.memory_bytes
    assert allowed is not None
    assert before.loss_memory is not None
    assert allowed > before.loss_memory, "the limit decided it"
    assert (after.loss_memory, after.mlp_tiles) == (before.loss_memory, before.mlp_tiles)
    check_fits(again.plan, GPU, resumed=True)
