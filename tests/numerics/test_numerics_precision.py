"""dtypes in whole runs of a tiny model: what 16 bits change, and what must not change."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tiny_model import write_recipe, write_tiny_model
from whole_run import Silent, losses, records, relative, run

from trimtab import launch
from trimtab.api import load
from trimtab.recipe import load as load_recipe

# Wide enough for the 8-bit optimizer to quantize its states.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
BRIEF: dict[str, object] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": None,
    "max_steps": 16,
    "eval_on_start": False,
    "logging_steps": 10,
}
LEARN: dict[str, object] = {**BRIEF, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    write_tiny_model(folder / "model", **WIDE)
    return folder


@pytest.fixture(scope="module")
def fp32(folder: Path) -> Path:
    done = run(folder, "fp32", **LEARN)
    curve = losses(done)
    assert curve[0] - curve[-1] > 1.0, "the loss must fall for the comparisons to be meaningful"
    return done


@pytest.mark.parametrize(
    ("name", "changes", "bound"),
    [
        ("fp16", {"dtype": "fp16"}, 2e-4),
        ("bf16-autocast", {"dtype": "bf16", "weights_dtype": "fp32"}, 6e-4),
        ("bf16", {"dtype": "bf16"}, 1e-3),
        ("bf16-gradients", {"dtype": "bf16", "gradient_dtype": "bf16"}, 1.5e-3),
        ("8bit", {"optim": "adamw_8bit"}, 5e-4),
        ("bf16-8bit", {"dtype": "bf16", "optim": "adamw_8bit"}, 2e-3),
    ],
)
def test_it_follows_fp32(
    folder: Path, fp32: Path, name: str, changes: dict[str, object], bound: float
) -> None:
    """The bounds are three to eight times what was measured (a few 1e-4); the curve itself falls by a third."""
    done = run(folder, name, **LEARN, **changes)
    curve, reference = losses(done), losses(fp32)
    assert curve != reference, "the dtype must have had an effect"
    assert relative(curve, reference) < bound
    ours, theirs = ([record["grad_norm"] for record in records(f, "train")] for f in (done, fp32))
    assert sum(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)) / len(ours) < 10 * bound


def test_recomputation_is_bitwise_identical(folder: Path, fp32: Path) -> None:
    done = run(folder, "recomputed", **LEARN, gradient_checkpointing=True)
    assert [x.hex() for x in losses(done)] == [x.hex() for x in losses(fp32)]
    peaks = {
        name: next(r["activations"] for r in records(f, "memory") if r["when"] == "peak")
        for name, f in (("kept", fp32), ("recomputed", done))
    }
    assert peaks["recomputed"] < 0.8 * peaks["kept"], "and it must have been enabled"


def test_a_run_resumed_with_other_policies_is_bitwise_identical(folder: Path, fp32: Path) -> None:
    """Stopped after six steps, then resumed with another policy; the tiles stay the same."""
    path = write_recipe(
        folder,
        output_dir=str(folder / "turned"),
        **{"eval_steps": None, "save_steps": 2, **LEARN, "recompute": ["selective", "pointwise"]},
    )

    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        launch.train(load_recipe(path), Silent(), after_step=stop)
    assert len(losses(folder / "turned")) < 16
    done = launch.resume(folder / "turned", ["recompute=block"], Silent())
    assert done.status == "finished"
    assert [x.hex() for x in losses(done.folder)] == [x.hex() for x in losses(fp32)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in load(folder, device="cpu").opened.decoder.named_parameters()}


def test_small_updates_of_bf16_weights_need_stochastic_rounding(folder: Path) -> None:
    """At learning rate 2e-5: measured along the trajectory of fp32 weights."""
    small: dict[str, object] = {**BRIEF, "learning_rate": 2e-5, "lr_scheduler_type": "constant"}
    runs = {
        "exact": run(folder, "small-fp32", **small),
        "stochastic": run(folder, "small-bf16", **small, dtype="bf16"),
        "compressed": run(folder, "small-8bit", **small, dtype="bf16", optim="adamw_8bit"),
        "nearest": run(folder, "small-nearest", **small, dtype="bf16", optim="adamw_torch_fused"),
    }
    start = {n: p.to(torch.bfloat16).float() for n, p in weights(folder / "model").items()}
    moved = {
        kind: {n: p.float() - start[n] for n, p in weights(f).items()}
        for kind, f in runs.items()
        if kind != "exact"
    }
    path = {n: p - weights(folder / "model")[n] for n, p in weights(runs["exact"]).items()}
    length = sum(p.square().sum() for p in path.values())
    share = {
        kind: float(sum((step[n] * path[n]).sum() for n in path) / length) for kind, step in moved.items()
    }
    assert share["stochastic"] == pytest.approx(1.0, abs=0.1)
    assert share["compressed"] == pytest.approx(1.0, abs=0.15)
    assert share["nearest"] < 0.7
    # Where weights are near 1, rounding to nearest leaves every one unchanged.
    norm = "model.layers.0.input_layernorm.weight"
    assert not moved["nearest"][norm].any()
    assert moved["stochastic"][norm].any()


def test_packed_and_single_documents_have_the_same_loss_and_gradient(folder: Path) -> None:
    """All documents in one step: their sum does not depend on how they are packed."""
    train = {"source": str(folder / "train.jsonl")}
    section = {
        "train": [train], "eval_share": 0.0, "cache_dir": str(folder / "cache"), "num_proc": 1
    }  # fmt: skip
    step: dict[str, object] = {
        "data": section,
        "max_seq_length": 128,
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
    }
    packed = records(run(folder, "packed", **step), "train")
    single = records(run(folder, "single", **step, packing=False), "train")
    assert len(packed) == len(single) == 1
    assert packed[0]["tokens"] == single[0]["tokens"]
    assert packed[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-6)
    assert packed[0]["grad_norm"] == pytest.approx(single[0]["grad_norm"], rel=1e-5)
