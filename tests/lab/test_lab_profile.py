"""`trimtab profile`: a recipe's step measured next to its plan, with everything that can go wrong."""

from __future__ import annotations

import gzip
import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_memory import SMALL, FullMemory
from tiny_model import write_recipe

import trimtab
from trimtab.cli.main import main
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.lab import training_step
from trimtab.lab.profile_options import ProfileOptions
from trimtab.lab.profile_report import profile_sections
from trimtab.lab.profile_result import PredictedStep, ProfileResult
from trimtab.lab.profile_target import ProfileTarget, find_target
from trimtab.lab.profiling import profile_recipe
from trimtab.lab.suggestions import Goal, Suggestion
from trimtab.lab.training_step import TrainingStep
from trimtab.recipe import load
from trimtab.report.document import Section, StackChart, Table, Text

QUICK = ["--steps", "1", "--warm-up", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("profiled")
    write_recipe(place)
    return place


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Reduces all measurements to one round, and silences the profiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KINETO_LOG_LEVEL", "6")
        patch.setattr("trimtab.lab.profiling.OPERATION_ROUNDS", 1)
        patch.setattr("trimtab.lab.profiling.KERNEL_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def record(folder: Path) -> Any:
    """The result of the whole command, run once."""
    out = folder / "lab"
    words = [
        "profile",
        str(folder / "recipe.yaml"),
        "max_seq_length=32",
        *QUICK,
        "--trace",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    [line] = (out / "records.jsonl").read_text().splitlines()
    return json.loads(line)


def test_the_record(record: dict[str, Any]) -> None:
    result = record["result"]
    assert (record["study"], record["outcome"]) == ("profile", "measured")
    assert result["job"]["tokens_per_step"] == 2 * 32 * 2, "with the key from the command line"
    assert result["tokens_per_second"] == pytest.approx(128 / result["step_seconds"])
    assert result["ceiling_share"] == pytest.approx(
        result["model_flops"] / result["step_seconds"] / result["ceiling"]["flops_per_second"]
    )
    assert result["mfu"] is None, "a CPU has no data sheet"
    assert result["peak_bytes"] == pytest.approx(result["predicted_peak"]["total"], rel=0.03)
    assert sum(result["memory"]["buckets"].values()) == result["peak_bytes"]
    names = {row["name"] for row in result["operations"]}
    assert {"self_attn.q_proj", "mlp.down_proj", "attention", "loss"} <= names
    assert result["kernels"]["entries"]
    assert result["predicted_step"] is None
    assert "--calibrate" in result["time_basis"]


def test_the_files(record: dict[str, Any], folder: Path) -> None:
    out = folder / "lab"
    report = (out / "report.md").read_text()
    for heading in (
        "At a glance",
        "What would help most",
        "Time by operation",
        "Memory",
        "What was profiled",
    ):
        assert f"## {heading}\n" in report
    blocks = json.loads((out / "memory.json").read_text())
    assert {span["phase"] for span in blocks["phases"]} == {"forward", "loss", "backward", "optimizer step"}
    with gzip.open(out / "trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]


@pytest.fixture(scope="module")
def adapted(folder: Path) -> tuple[ProfileResult, list[str]]:
    """From Python: quantized, with dropout, recomputation and packed documents shorter than the sequence."""
    told: list[str] = []
    result = trimtab.profile_recipe(
        folder / "recipe.yaml",
        options=ProfileOptions(steps=1, warm_up=0, document=16),
        progress=told.append,
        lora={"r": 4, "lora_dropout": 0.1},
        load_in_4bit=True,
        recompute="block",
        max_seq_length=32,
        gradient_accumulation_steps=1,
    )
    return result, told


def test_the_same_from_python_with_adapters(adapted: tuple[ProfileResult, list[str]]) -> None:
    result, told = adapted
    assert result.job.settings["training"] == "LoRA, rank 4 on NF4 weights"
    assert result.job.trained < result.job.parameters
    assert result.details is not None
    assert result.details.microbatches == 1
    assert told[0].startswith("building ")
    rows = {row.name: row for row in result.details.operations}
    assert rows["mlp.gate_proj dequantization"].measured > 0
    assert rows["attention"].recompute > 0


def test_missing_weights_are_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: Qwen/Qwen3-0.6B}\ndata: {train: nothing-here}\ndevice: cpu\n")
    found = find_target(load(recipe))
    assert found.prepared.recipe.model.init == "random"
    assert any("are not on this machine: random ones" in note for note in found.notes)
    assert found.prepared.shape.num_layers == 28


def test_local_weights_are_loaded(folder: Path) -> None:
    found = find_target(load(folder / "recipe.yaml"))
    assert found.weights == folder / "model"
    assert found.prepared.recipe.model.init == "pretrained"
    assert found.is_eager
    assert found.eager().plan is found.prepared.plan


def test_compiling_is_off_while_operations_are_measured(folder: Path) -> None:
    found = find_target(load(folder / "recipe.yaml", ["torch_compile=true"]))
    assert not found.is_eager
    assert not found.eager().resolved.compile.enabled
    assert found.prepared.resolved.compile.enabled, "whole steps are timed with it"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing.yaml"], 2, "missing.yaml"),
        (["{recipe}", "max_seq_lenght=8"], 2, "max_seq_length"),
        (["{recipe}", "--steps", "0"], 2, "--steps 0 is not a number of steps"),
        (["{recipe}", "--warm-up", "-1"], 2, "--warm-up -1"),
        (["{recipe}", "--document", "1"], 2, "use 2 to 64 tokens"),
        (["{recipe}", "--document", "65"], 2, "use 2 to 64 tokens"),
        (["{recipe}", "--device", "cuda"], 6, "torch sees no CUDA GPU"),
        (["{recipe}", "--device", "gpu"], 2, "device"),
        (["{recipe}", "--nvtx", "--device", "cpu"], 6, "--nvtx needs a CUDA GPU"),
        (["{recipe}", "--snapshot", "x.pickle", "--device", "cpu"], 6, "--snapshot needs a CUDA GPU"),
        (["{recipe}", "--nvtx", "--trace", "--device", "cpu"], 2, "remove --nvtx, or --trace and --snapshot"),
        (["{recipe}", "--max_seq_length", "8"], 2, "max_seq_length=8"),
        (["{recipe}", "memory_limit=300MiB"], 6, "memory_limit: 300MiB allows"),
    ],
)
def test_invalid_options_are_rejected(
    words: list[str], code: int, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    filled = [word.format(recipe=folder / "recipe.yaml") for word in words]
    assert main(["profile", *filled, "--out", str(tmp_path / "out")]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "records.jsonl").exists(), "nothing was measured"


def test_an_unwritable_folder_fails_before_measuring(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("no folder")
    words = [str(folder / "recipe.yaml"), *QUICK, "--out", str(tmp_path / "taken")]
    assert main(["profile", *words]) == 6
    error = capsys.readouterr().err
    assert "give another place with --out" in error
    assert "timing" not in error


def test_out_of_memory_is_explained_and_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder / "recipe.yaml"), "recompute=none", *QUICK, "--out", str(tmp_path / "out")]
    with FullMemory("trainer/microstep.py", spared=60, backward=True, message=SMALL) as memory:
        assert main(["profile", *words]) == 6
    assert memory.failed
    error = capsys.readouterr().err
    assert "out of memory in the backward pass" in error
    assert "saves" in error, "with what would have fitted"
    assert "largest" in error
    [line] = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["outcome"] == "out of memory"
    assert not (tmp_path / "out" / "report.md").exists()


def test_an_interrupted_profile_ends(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.lab.profiling.build_step", interrupt)
    words = ["profile", str(folder / "recipe.yaml"), *QUICK, "--out", str(tmp_path / "out")]
    assert main(words) == 130
    assert not (tmp_path / "out" / "report.md").exists()


def blocks_of(sections: list[Section], kind: type) -> list[Any]:
    return [one for section in sections for one in section.blocks if isinstance(one, kind)]


def test_the_report_of_a_known_device(adapted: tuple[ProfileResult, list[str]]) -> None:
    """A result with predictions, suggestions of both kinds, and one that changes training."""
    result, _ = adapted
    step = result.step_seconds
    suggestions = (
        Suggestion("without recompute", ("recompute: none",), Goal.TIME, True, -step / 10, -(2**20), 2**30),
        Suggestion("bf16 states", ("optim: adamw_bf16",), Goal.MEMORY, False, 0.0, 2**20, 2**29),
    )
    planned = PredictedStep(2 * step, step, 3 * step, 0.1 * step, "a calibration")
    sections = profile_sections(replace(result, predicted_step=planned, suggestions=suggestions))
    glance = blocks_of(sections[:1], Table)[0]
    assert glance.rows[0][3] == "+100.0 %"
    rows = blocks_of(sections[1:2], Table)[0].rows
    assert rows[0][1:] == ("recompute: none", rows[0][2], "+1.00 MiB", "yes")
    assert "(-5 %)" in rows[0][2], "of the predicted step"
    assert rows[1][3:] == ("−1.00 MiB", "no: trains differently")
    [chart] = blocks_of(sections, StackChart)
    assert chart.bands
    operations = next(section for section in sections if section.title == "Time by operation")
    recomputed = [row[2] for row in blocks_of([operations], Table)[0].rows]
    assert any(cell not in ("", "–") for cell in recomputed), "the recomputed layers have a column"


def test_a_share_of_another_dtype_is_labelled(adapted: tuple[ProfileResult, list[str]]) -> None:
    result, _ = adapted
    assert result.ceiling.dtype == result.job.dtype == "fp32"
    plain = blocks_of(profile_sections(result)[:1], Text)[0].text
    assert "The share of a large fp32 matrix product is the FLOPs" in plain
    assert "compares two dtypes" not in plain
    bf16 = replace(result, job=replace(result.job, dtype="bf16"))
    assert "compares two dtypes" in blocks_of(profile_sections(bf16)[:1], Text)[0].text
    sheet = replace(result, ceiling=replace(result.ceiling, is_data_sheet=True))
    assert sheet.mfu == pytest.approx(result.ceiling_share)
    rows = blocks_of(profile_sections(sheet)[:1], Table)[0].rows
    assert "MFU" in [row[0] for row in rows]


def test_the_report_without_details_and_suggestions(adapted: tuple[ProfileResult, list[str]]) -> None:
    """A result of --nvtx: nothing was profiled, and on a CPU no peak is known."""
    result, _ = adapted
    sections = profile_sections(replace(result, details=None, suggestions=(), peak_bytes=0))
    assert [section.title for section in sections] == [
        "At a glance",
        "What would help most",
        "What was profiled",
    ]
    assert "No change of the recipe" in " ".join(text.text for text in blocks_of(sections, Text))
    assert all(row[0] != "tensors at the peak" for row in blocks_of(sections, Table)[0].rows)


def test_options_are_checked_from_python_too(folder: Path) -> None:
    with pytest.raises(RecipeError, match="not a number of steps"):
        profile_recipe(folder / "recipe.yaml", options=ProfileOptions(steps=0))
    with pytest.raises(ResourceError, match="--nvtx needs a CUDA GPU"):
        profile_recipe(folder / "recipe.yaml", options=ProfileOptions(nvtx=True))
    with pytest.raises(RecipeError, match="missing"):
        profile_recipe("missing.yaml")


def tensors_in(buckets: Mapping[str, int]) -> int:
    """Bytes of the model's own tensors."""
    return sum(amount for name, amount in buckets.items() if name != "other")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("changes", [{}, {"lora": {"r": 4}, "load_in_4bit": True}, {"cuda_graphs": True}])
def test_on_a_gpu(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = ProfileOptions(
        steps=2, warm_up=1, folder=tmp_path, trace=True, snapshot=tmp_path / "memory.pickle"
    )
    result = profile_recipe(folder / "recipe.yaml", options=options, device="cuda", dtype="bf16", **changes)
    assert result.times.device is not None, "by the device's clock too"
    assert result.details is not None
    memory, predicted = result.details.memory, result.predicted_peak
    assert memory.peak_bytes == pytest.approx(predicted.total, rel=0.05), "mostly cuBLAS's workspaces"
    assert tensors_in(memory.buckets) == pytest.approx(tensors_in(predicted.buckets), rel=0.25)
    assert result.details.kernels.device == "cuda"
    assert (tmp_path / "memory.pickle").stat().st_size > 0
    assert (tmp_path / "trace.json.gz").exists()


def test_the_first_model_is_freed_before_the_eager_one_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with CUDA graphs: two models would not fit, and the measured memory would contain both."""
    alive: list[int] = []
    models: list[weakref.ref[torch.nn.Module]] = []

    def build_step(*args: Any, **options: Any) -> TrainingStep:
        alive.append(sum(model() is not None for model in models))
        step = training_step.build_step(*args, **options)
        models.append(weakref.ref(step.decoder))
        return step

    monkeypatch.setattr("trimtab.lab.profiling.build_step", build_step)
    monkeypatch.setattr(ProfileTarget, "is_eager", False)
    options = ProfileOptions(steps=1, warm_up=0)
    profile_recipe(folder / "recipe.yaml", options=options, device="cpu", max_seq_length=32)
    assert alive == [0, 0]


@pytest.mark.gpu
@pytest.mark.alone
def test_nvtx_on_a_gpu(folder: Path) -> None:
    options = ProfileOptions(steps=1, warm_up=1, nvtx=True)
    result = profile_recipe(folder / "recipe.yaml", options=options, device="cuda", cuda_graphs=False)
    assert result.details is None
    assert result.peak_bytes > 0
    assert any("NVTX" in note for note in result.notes)
