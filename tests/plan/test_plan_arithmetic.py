"""The plan's arithmetic on a real shape, and the errors of runs that do not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import planned

from trimtab.adapt.spec import LoraSettings
from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts, host_cores, host_memory
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import (
    DataFacts,
    Plan,
    attention_table,
    check_disk,
    check_fits,
    remedies,
    steps_per_epoch,
    total_steps,
)
from trimtab.plan.changes import savings
from trimtab.plan.job import Job
from trimtab.plan.resolved import AttentionConfig, OptimizerConfig, PrecisionConfig, Resolved
from trimtab.plan.what_if import effects
from trimtab.recipe import Recipe, loads
from trimtab.report.plan_panel import plan_rows

QWEN = uniform_shape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                  tie_embeddings=True, qk_norm=True, max_positions=32_768)  # fmt: skip
GPU = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
RECIPE = "model: q\ndata: {train: x}\noptim: adamw_8bit\ndtype: bf16\ngradient_dtype: bf16\n"


def resolved(
    recipe: Recipe,
    device: DeviceFacts,
    dtype: str = "bf16",
    gradients: str = "bf16",
    impl: str = "varlen",
    lora: LoraSettings | None = None,
) -> Resolved:
    return Resolved(
        device=device.kind,
        threads=4,
        deterministic=False,
        precision=PrecisionConfig(dtype, "bf16" if dtype == "bf16" else "fp32", gradients),
        attention=AttentionConfig.uniform(QWEN.num_layers, impl, reason="for this test"),
        optimizer=OptimizerConfig(recipe.optim),
        lora=lora,
    )


def plan(*overrides: str, device: DeviceFacts = GPU, data: DataFacts | None = None, **kwargs: Any) -> Plan:
    recipe = loads(RECIPE, overrides)
    return planned(recipe, QWEN, device, resolved(recipe, device, **kwargs), data)


def test_persistent_bytes_of_the_reference_model() -> None:
    assert QWEN.num_parameters == 596_049_920
    before = plan().memory.before
    assert before.weights == 2 * 596_049_920
    # Two bytes per weight, one fp32 scale per moment and 256 weights; norms below 4096 elements keep fp32.
    matrices = sum(d[0] * d[1] for _, d in QWEN.parameters() if len(d) == 2)
    norms = QWEN.num_parameters - matrices
    assert before.optimizer == matrices * 2 + matrices // 256 * 8 + norms * 8
    assert before.gradients == before.activations == before.other == 0
    assert round(before.total / 1e9, 2) == 2.40


@pytest.mark.parametrize(
    ("optim", "gigabytes"), [("adamw_torch", 4.77), ("adamw_bf16", 2.38), ("adamw_8bit", 1.21)]
)
def test_optimizer_states(optim: str, gigabytes: float) -> None:
    assert round(plan(f"optim={optim}").memory.peak.optimizer / 1e9, 2) == gigabytes


def test_buckets_add_up_and_the_peak_is_above_the_start() -> None:
    for result in (plan(), plan("gradient_accumulation_steps=1"), plan("gradient_checkpointing=true")):
        memory = result.memory
        parts = memory.peak.to_dict()
        assert parts.pop("total") == sum(parts.values())
        assert memory.peak.total > memory.before.total
        above = memory.peak.total - memory.peak.weights - memory.peak.optimizer
        assert max(memory.moments.values()) == above == memory.moments[memory.moment]


def test_memory_scales_with_the_settings() -> None:
    base = plan().memory.peak
    assert plan("per_device_train_batch_size=8").memory.peak.activations > 1.8 * base.activations
    assert plan("gradient_checkpointing=true").memory.peak.activations < 0.4 * base.activations
    assert plan(gradients="fp32").memory.peak.gradients == 2 * base.gradients
    assert plan(impl="reference").memory.peak.activations > 2 * base.activations
    assert plan("gradient_accumulation_steps=64").memory == plan("gradient_accumulation_steps=2").memory


def test_attention_figures() -> None:
    rows = attention_table(QWEN, batch=4)
    assert [row.tokens for row in rows] == [512, 1024, 2048, 4096, 8192]
    # As commonly quoted: two matrices in bf16 over 28 layers, one head.
    for row, quoted in zip(rows, [115e6, 470e6, 1.88e9, 7.5e9, 30e9], strict=True):
        assert row.plain_one_head == pytest.approx(quoted, rel=0.025)
        assert row.plain == 16 * row.plain_one_head
        assert row.flash == 4 * 28 * 16 * row.tokens * (128 * 2 + 4)
    assert rows[0].flash_one_head == pytest.approx(29e6, rel=0.02)
    assert rows[-1].flash_one_head == pytest.approx(460e6, rel=0.03)
    assert round(rows[1].plain / 1e9, 1) == 7.5
    assert json.dumps([row.to_dict() for row in rows])


def test_plan_json_has_the_agreed_keys() -> None:
    written = plan(data=DataFacts(sequences=5000, tokens=5_017_600, fill=0.98)).to_dict()
    assert json.loads(json.dumps(written)) == written
    keys = ["version", "model", "memory", "phases", "reserved", "data", "time", "disk", "choices", "notes"]
    assert list(written) == keys
    assert written["model"] == {
        "name": "q",
        "family": "qwen3",
        "parameters": 596_049_920,
        "trained": 596_049_920,
    }
    buckets = ["weights", "gradients", "optimizer", "activations", "other", "total"]
    assert list(written["memory"]["before"]) == list(written["memory"]["peak"]) == buckets
    assert written["data"] == {
        "windows": 5000,
        "tokens": 5_017_600,
        "fill": 0.98,
        "steps": 313,
        "trained_tokens": 5_017_600,
    }
    assert {"flops_per_token", "seconds", "basis"} <= set(written["time"])
    assert set(written["disk"]) == {"checkpoint_bytes", "total_bytes", "checkpoints"}
    assert written["choices"]["attention"]["impl"] == "varlen"
    assert written["choices"]["optimizer"]["name"] == "adamw_8bit"


def test_steps() -> None:
    facts = DataFacts(sequences=100, tokens=90_000, fill=0.9)
    assert steps_per_epoch(100, loads(RECIPE)) == 7
    assert steps_per_epoch(100, loads(RECIPE), num_devices=4) == 2
    assert total_steps(loads(RECIPE, ["num_train_epochs=2"]), facts) == 14
    assert total_steps(loads(RECIPE, ["num_train_epochs=0.1"]), facts) == 1
    assert total_steps(loads(RECIPE, ["max_steps=3"]), None) == 3
    assert total_steps(loads(RECIPE), None) is None
    assert plan("num_train_epochs=2", data=facts).data["trained_tokens"] == 180_000


def test_unknown_rates_give_no_time() -> None:
    facts = DataFacts(sequences=1000, tokens=1_000_000, fill=1.0)
    unknown = plan(data=facts, device=dataclasses.replace(GPU, name="a new device")).time
    assert (unknown.seconds, unknown.step_seconds, unknown.floor_seconds) == (None, None, None)
    assert "no bf16 rate of a new device is known" in unknown.basis
    before = plan().time  # the data was not read yet: only the time of a step is known
    assert before.step_seconds is not None
    assert (before.seconds, before.floor_seconds) == (None, None)


def test_time_reports_its_basis() -> None:
    facts = DataFacts(sequences=1000, tokens=1_000_000, fill=1.0)
    measured = plan(data=facts).time
    assert measured.basis == "measured on an NVIDIA H200"
    sheet = plan(data=facts, device=dataclasses.replace(GPU, name="NVIDIA H100 80GB HBM3")).time
    assert "not measured on this device" in sheet.basis
    assert sheet.floor_seconds is not None
    assert measured.floor_seconds is not None
    # By the data sheet, with the same arithmetic and 3.35 instead of 4.8 TB/s.
    assert 1.0 < sheet.floor_seconds / measured.floor_seconds < 4.8 / 3.35
    arithmetic = measured.flops_per_token * 1000 * 1024 / 989.4e12
    assert arithmetic <= measured.floor_seconds < 1.5 * arithmetic
    for time in (measured, sheet):
        assert time.seconds is not None
        assert time.floor_seconds < time.low_seconds < time.seconds < time.high_seconds
    assert sheet.high_seconds / sheet.seconds > measured.high_seconds / measured.seconds
    calibrated = Calibration(
        "this one", {"bf16": 100e12}, 1e12, 5e-6, measured_at="2026-11-18T09:00:00+00:00"
    )
    here = plan(data=facts, device=dataclasses.replace(GPU, calibration=calibrated)).time
    assert here.basis == "calibrated on this machine on 2026-11-18"
    assert here.seconds > 1.5 * measured.seconds
    busy = dataclasses.replace(calibrated, warnings=("the machine is busy: a load average of 9.0", "more"))
    doubted = plan(data=facts, device=dataclasses.replace(GPU, calibration=busy)).time
    assert doubted.basis == f"{here.basis}, with the warning that {busy.warnings[0]}"


def test_a_run_counts_evaluations_and_checkpoints() -> None:
    facts = DataFacts(sequences=1000, tokens=1_000_000, fill=1.0)
    calibrated = Calibration("this one", {"bf16": 100e12}, 1e12, 5e-6, disk_write=1e8)
    device = dataclasses.replace(GPU, calibration=calibrated)
    result = plan(data=facts, device=device)
    assert result.time.checkpoint_seconds == pytest.approx(
        result.disk.saving.saves * result.disk.checkpoint_bytes / 1e8
    )
    often = plan("data.eval.general=y", "eval_steps=10", data=facts, device=device).time
    seldom = plan("data.eval.general=y", data=facts, device=device).time
    assert often.evaluation_seconds == pytest.approx(8 / 2 * seldom.evaluation_seconds)  # 63 steps
    assert often.seconds > seldom.seconds
    total = often.training_seconds + often.evaluation_seconds + often.checkpoint_seconds
    assert often.seconds == pytest.approx(total)


def test_flops_per_token_of_the_reference_model() -> None:
    # 6 per parameter (the tied embedding is the head's matrix), and attention, 14 per visible pair.
    products = 6 * sum(d[0] * d[1] for _, d in QWEN.parameters() if len(d) == 2)
    attention = 28 * 14 * (1024 + 1) / 2 * 16 * 128
    assert plan().time.flops_per_token == pytest.approx(products + attention, rel=1e-6)


def test_disk_counts_coexisting_checkpoints() -> None:
    facts = DataFacts(sequences=16_000, tokens=16_000_000, fill=1.0)  # 1000 steps
    checkpoint = plan().disk.checkpoint_bytes
    assert checkpoint == pytest.approx(plan().memory.before.total, rel=1e-3)

    def count(*overrides: str, data: DataFacts | None = facts) -> int:
        total = plan(*overrides, data=data).disk.total_bytes
        assert total % checkpoint == 0
        return total // checkpoint

    assert count() == 2  # saved at 500 and 1000, evaluated at the end
    assert count("save_steps=100") == 3  # two kept, one being written
    assert count("save_steps=100", "eval_steps=50") == 4  # and the best checkpoint
    assert (
        count("save_steps=100", "eval_steps=50", "data.eval_share=0") == 3
    )  # no evaluation selects a best checkpoint
    assert count("save_steps=100", "save_total_limit=30") == 10  # only 10 are saved
    assert count("save_steps=null") == count("save_steps=null", data=None) == 1
    assert count("save_steps=null", "eval_steps=400") == 3  # 400, 800 and 1000
    assert count("save_steps=600", "eval_steps=400", "save_total_limit=9") == 4  # 400, 600, 800, 1000
    assert count("save_steps=100", data=None) == 3


def test_the_disk_remedy_makes_the_checkpoints_fit() -> None:
    disk = plan("save_steps=100", "eval_steps=50", "save_total_limit=5").disk
    checkpoint = disk.checkpoint_bytes
    check_disk(disk, 7 * checkpoint, "here")
    with pytest.raises(ResourceError, match=r"7 checkpoints.*save_total_limit: 4"):
        check_disk(disk, 7 * checkpoint - 1, "here")
    check_disk(plan("save_steps=100", "eval_steps=50", "save_total_limit=4").disk, 7 * checkpoint - 1, "here")
    with pytest.raises(ResourceError, match="save_steps: null and eval_steps: null"):
        check_disk(disk, checkpoint, "here")
    check_disk(plan("save_steps=null", "eval_steps=null", "save_total_limit=5").disk, checkpoint, "here")
    with pytest.raises(ResourceError) as caught:
        check_disk(disk, checkpoint - 1, "here")
    assert str(caught.value).endswith("; free some space or set output_dir to another disk")


def test_the_disk_remedy_of_a_resume_moves_the_folder_and_keeps_at_least_one_checkpoint() -> None:
    disk = plan("save_steps=100", "save_total_limit=1").disk
    with pytest.raises(ResourceError) as caught:
        check_disk(disk, disk.checkpoint_bytes - 1, "runs/a", resumed=True)
    assert caught.value.remedy == "free some space or move runs/a to another disk and resume it there"
    with pytest.raises(ResourceError) as caught:
        check_disk(disk, disk.checkpoint_bytes, "runs/a", resumed=True)
    assert caught.value.remedy == (
        "free some space, move runs/a to another disk and resume it there, or save only at the end (save_steps: null)"
    )


def sized(gigabytes: float) -> DeviceFacts:
    return dataclasses.replace(GPU, memory_bytes=int(gigabytes * 1e9))


def test_the_needed_memory_fits_and_one_byte_less_does_not() -> None:
    result = plan()
    check_fits(result)
    check_fits(result, dataclasses.replace(GPU, memory_bytes=result.memory.needed))
    with pytest.raises(ResourceError):
        check_fits(result, dataclasses.replace(GPU, memory_bytes=result.memory.needed - 1))
    with pytest.raises(ResourceError, match=r"has 9\.31 GiB free"):
        check_fits(result, dataclasses.replace(GPU, free_bytes=10 * 10**9))


def test_suggested_remedies_suffice() -> None:
    result = plan("optim=adamw_torch", gradients="fp32")
    for remedy in remedies(result):
        assert remedy.saving > 0
        assert remedy.needed == result.memory.needed - remedy.saving
    by_name = {remedy.change: remedy for remedy in remedies(result)}
    assert by_name["optim: adamw_8bit"].needed == plan(gradients="fp32").memory.needed
    for device, impl in ((GPU, "triton"), (DeviceFacts("laptop", "cpu", 2**34), "reference")):
        job = dataclasses.replace(result.job, device=device.kind, optimizer_impl="torch")
        on_device = dataclasses.replace(result, device=device)
        eight = next(change.job for change in savings(on_device, job) if "adamw_8bit" in change.text)
        assert eight.optimizer_impl == impl, "its temporary buffers count"
    assert by_name["gradient_dtype: bf16"].needed == plan("optim=adamw_torch").memory.needed
    recomputed = plan("optim=adamw_torch", "gradient_checkpointing=true", gradients="fp32")
    assert by_name["recompute: block"].needed == recomputed.memory.needed


def test_remedies_are_valid_for_the_recipe() -> None:
    def changes(*overrides: str, **options: object) -> str:
        return "; ".join(remedy.change for remedy in remedies(plan(*overrides, **options)))

    assert "gradient_accumulation_steps" in changes()
    one_pass = ("optim_in_backward=true", "gradient_accumulation_steps=1", "max_grad_norm=0")
    assert "gradient_accumulation_steps" not in changes(*one_pass)
    assert "lora: {r: 16}" in changes()
    assert "lora: {r: 16}" not in changes("embedding_learning_rate=1e-5")
    assert "load_in_4bit" in changes(lora=LoraSettings(r=16))
    fully_trained = LoraSettings(r=16, target_modules=("q_proj",), modules_to_save=("down_proj",))
    assert "load_in_4bit" not in changes(lora=fully_trained)


def with_half_the_length(original: Plan) -> Job:
    changes = [effect.change for effect in effects(original, savings(original, original.job))]
    return next(change.job for change in changes if "max_seq_length" in change.keys)


def test_shorter_sequences_use_fewer_tiles() -> None:
    auto_tiles = plan("max_seq_length=1024", "per_device_train_batch_size=2", gradients="fp32")
    auto_tiles = dataclasses.replace(auto_tiles, job=auto_tiles.job.changed(mlp_tiles=4))
    shorter = with_half_the_length(auto_tiles)
    assert (shorter.tokens, shorter.mlp_tiles) == (512, 2)
    fixed_tiles = plan("max_seq_length=1024", "per_device_train_batch_size=2", "mlp_tiles=4")
    fixed_tiles = dataclasses.replace(fixed_tiles, job=fixed_tiles.job.changed(mlp_tiles=4))
    assert with_half_the_length(fixed_tiles).mlp_tiles == 4


def test_messages_of_a_run_that_does_not_fit() -> None:
    with pytest.raises(ResourceError) as caught:
        check_fits(plan(), sized(9.5))
    assert "training needs" in caught.value.cause
    assert "NVIDIA H200 has 8.85 GiB free" in caught.value.cause
    assert caught.value.remedy is not None
    assert "per_device_train_batch_size: 2 with gradient_accumulation_steps: 8 (saves" in caught.value.remedy
    with pytest.raises(ResourceError, match=r"set .*, and .*: together"):
        check_fits(plan("optim=adamw_torch", gradients="fp32"), sized(6.5))
    with pytest.raises(ResourceError, match=r"lora: \{r: 16\}.*, and load_in_4bit: true .*: together"):
        check_fits(plan(), sized(2))
    with pytest.raises(ResourceError, match="use a smaller model or a larger device"):
        check_fits(plan(), sized(1))


def test_adapters_have_fewer_flops_and_smaller_checkpoints() -> None:
    full, adapters = plan(), plan(lora=LoraSettings(r=16))
    # Two of the three matmuls of each frozen matrix remain; attention and adapters come on top.
    assert 2 / 3 < adapters.time.flops_per_token / full.time.flops_per_token < 0.75
    assert adapters.disk.checkpoint_bytes < full.disk.checkpoint_bytes / 10
    assert adapters.to_dict()["model"]["trained"] == 10_092_544


def test_bf16_is_suggested_only_if_the_device_supports_it() -> None:
    def changes(device: DeviceFacts) -> list[str]:
        recipe = loads(RECIPE, ["dtype=fp32", "gradient_dtype=fp32"])
        chosen = resolved(recipe, device, dtype="fp32", gradients="fp32", impl="sdpa_flash")
        return [r.change for r in remedies(planned(recipe, QWEN, device, chosen))]

    assert "dtype: bf16 with weights_dtype: bf16" in changes(GPU)
    assert "dtype: bf16 with weights_dtype: bf16" not in changes(DeviceFacts("laptop", "cpu", 2**34))


def test_notes() -> None:
    assert any("bf16" in note for note in plan().notes)
    assert any("stochastically" in note for note in plan("optim=adamw_torch_fused").notes)
    assert any("held out" in note for note in plan("data.eval_share=0").notes)
    assert any("held out" in note for note in plan("data.streaming=true", "max_steps=5").notes)
    cpu = DeviceFacts("laptop", "cpu", 2**34)
    assert any("no bf16 arithmetic" in note for note in plan(device=cpu, impl="sdpa_flash").notes)


def test_devices() -> None:
    assert GPU.ceiling("bf16") == (989.4e12, "data sheet of NVIDIA H200")
    assert GPU.ceiling("fp64") is None
    assert DeviceFacts("NVIDIA H200", "cpu", 1).ceiling("bf16") is None
    total, available = host_memory()
    assert 2**28 < available <= total
    assert host_cores() >= 1


def test_the_example_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    text = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "make_plan" in block
    )
    names: dict[str, Any] = {}
    exec(compile(code, "docs/planning.md", "exec"), names)
    assert names["plan"].memory.peak.weights == 2 * 596_049_920


def test_the_table_of_the_documentation_is_computed() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "planning.md").read_text(encoding="utf-8")

    def short(count: int) -> str:
        return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

    for row in attention_table(QWEN, batch=4):
        figures = (row.plain, row.flash, row.plain_one_head, row.flash_one_head)
        assert f"| {row.tokens} | " + " | ".join(short(figure) for figure in figures) + " |\n" in text


def test_data_completes_a_plan_without_predicting_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataFacts(sequences=1000, tokens=900_000, fill=0.88)
    complete, before = plan(data=data), plan()
    monkeypatch.setattr("trimtab.plan.memory.predict", lambda job: pytest.fail("predicted a second time"))
    assert before.with_data(data) == complete
    assert before.to_dict() != complete.to_dict()


def test_a_resumed_run_needs_the_time_of_its_remaining_steps() -> None:
    data = DataFacts(sequences=1000, tokens=900_000, fill=0.88)
    complete = plan(data=data)
    steps, seconds = complete.data["steps"], complete.time.seconds
    assert seconds is not None
    resumed = plan().with_data(data, trained_steps=steps - 1)
    assert resumed.time.seconds == pytest.approx(seconds / steps)
    assert resumed.time.step == complete.time.step
    assert (resumed.data, resumed.disk) == (complete.data, complete.disk), "of the whole run"
    rows = dict(plan_rows(resumed.to_dict()))
    assert "rest of run" in rows
    assert "run" not in rows
    assert "run" in dict(plan_rows(complete.to_dict()))
