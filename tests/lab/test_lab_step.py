"""The step study: its cells, invalid options, measured cells, and a report with known figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.main import main
from trimtab.facts.errors import DataError, ModelError, RecipeError
from trimtab.lab.samples import Samples
from trimtab.lab.step_settings import TimedPart
from trimtab.lab.step_times import StepTimes
from trimtab.lab.studies.step.cells import cells
from trimtab.lab.studies.step.entries import differ
from trimtab.lab.studies.step.measure import measure
from trimtab.lab.studies.step.report import sections
from trimtab.lab.studies.step.result import StepResult, TimedStep, model_flops
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.study_models import study_model
from trimtab.report.document import BarChart, Document, LineChart, Section, Table
from trimtab.report.document_markdown import markdown

TINY: dict[str, Any] = {"device": "cpu", "sizes": ["tiny"], "contexts": [16]}


def settings(**changes: Any) -> list[dict[str, Any]]:
    return [dict(cell.settings) for cell in cells(**{**TINY, **changes})]


def test_cells_are_the_product_and_the_real_loss_is_timed_once() -> None:
    found = settings(contexts=[16, 32], precisions=["fp32", "bf16"], modes=["eager", "compiled"])
    assert len(found) == 2 * 2 * 2 * 5
    real = [one for one in found if one["loss"] == "cross_entropy"]
    assert {one["part"] for one in real} == {"both"}
    assert len({Cell("step", one).key for one in found}) == len(found)
    assert settings(losses=["cross_entropy"], parts=["forward"])[0]["loss"] == "cross_entropy"
    assert len(settings(parts=["forward"])) == 2, "both losses, of the only part"
    assert {one["device"] for one in settings(device="cuda:1")} == {"cuda"}


def test_defaults_depend_on_the_device() -> None:
    cpu, gpu = cells(device="cpu"), cells(device="cuda")
    assert {(one.settings["size"], one.settings["context"]) for one in cpu} == {
        ("small", 128),
        ("small", 256),
    }
    assert {one.settings["size"] for one in gpu} == {"small", "medium", "large", "xl", "2.7B"}
    assert max(one.settings["context"] for one in gpu) == 1024
    assert {(one.settings["batch"], one.settings["warm_up"], one.settings["steps"]) for one in gpu} == {
        (4, 5, 10)
    }


def test_a_warm_up_study_has_fresh_processes() -> None:
    found = cells(**TINY, warm_up=[0, 1, 2, 5])
    assert [one.settings["warm_up"] for one in found] == [0, 1, 2, 5]
    assert all(one.fresh for one in found)
    assert {one.settings["part"] for one in found} == {"both"}
    assert all(one.fresh for one in cells(**TINY, warm_up=[0]))
    assert not any(one.fresh for one in cells(**TINY))
    assert {one.settings["size"] for one in cells(device="cuda", warm_up=[0, 1])} == {"small"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ["smal"]}, "did you mean small"),
        ({"precisions": ["bf61"]}, "did you mean bf16"),
        ({"modes": ["compile"]}, "did you mean compiled"),
        ({"modes": ["?"]}, "choose from eager, compiled, graphs"),
        ({"kernels": ["quick"]}, "choose from reference, fast"),
        ({"losses": ["crossentropy"]}, "did you mean cross_entropy"),
        ({"parts": ["forwards"]}, "did you mean forward"),
        ({"steps": 0}, "--steps 0 is too small; use at least 1"),
        ({"batch": 0}, "--batch 0"),
        ({"contexts": [-1]}, "--contexts -1"),
        ({"warm_up": [-1]}, "--warm-up -1 is too small; use at least 0"),
        ({"budget_s": 0.0}, "--budget 0"),
        ({"budget_s": float("nan")}, "--budget nan"),
        ({"contexts": [16, 70_000]}, "longer than the 65536 positions of tiny; use at most 65536"),
    ],
)
def test_bad_options_are_errors_with_a_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        settings(**changes)


def test_models_of_other_families_cannot_be_timed() -> None:
    with pytest.raises(ModelError, match="bench sizes"):
        settings(sizes=["Qwen/Qwen3-30B-A3B"])
    with pytest.raises(RecipeError, match="positions"):
        settings(sizes=["starter"], contexts=[100_000])


@pytest.mark.parametrize("part", TimedPart)
def test_a_part_is_measured(part: TimedPart) -> None:
    (wanted,) = settings(parts=[part.value], losses=["logits_sum"], steps=3, warm_up=[2])
    found = StepResult.from_dict(json.loads(json.dumps(measure(wanted))))
    assert found.times.host.repetitions == 3
    assert len(found.times.warm_up_ms) == 2
    assert found.times.device is None
    assert found.tokens == 4 * 16
    assert found.flops == model_flops(study_model("tiny").shape(), 16, 4, part)
    assert found.ceiling_share > 0
    assert found.cpu_share is not None
    assert 0 < found.cpu_share <= 1
    assert (found.ceiling_dtype, found.mfu, found.attention) == ("float32", None, "reference")
    assert found.compile_seconds is found.difference is None


def test_a_model_from_a_config_is_measured(tmp_path: Path) -> None:
    config = {**study_model("tiny").config(), "num_key_value_heads": 2, "max_position_embeddings": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (wanted,) = settings(
        sizes=[str(path)], parts=["both"], losses=["cross_entropy"], steps=1, kernels=["fast"]
    )
    found = StepResult.from_dict(measure(wanted))
    assert found.parameters < study_model("tiny").shape().num_parameters
    with pytest.raises(RecipeError, match="the 32 positions"):
        settings(sizes=[str(path)], contexts=[64])


def test_model_flops_are_twice_the_weights_of_each_product() -> None:
    shape = study_model("small").shape()
    products = shape.num_parameters - 10_000 * 768 - 25 * 768  # no product with the embedding or a norm
    forward = model_flops(shape, 128, 4, TimedPart.FORWARD)
    attention = 4 * 12 * 4 * 768 * 128 * 129 / 2  # batch · layers · (QK and PV, 2 FLOPs each) · visible pairs
    assert forward == pytest.approx(4 * 128 * 2 * products + attention)
    assert model_flops(shape, 128, 4, TimedPart.BACKWARD) == 2 * forward
    assert model_flops(shape, 128, 4, TimedPart.FULL) == 3 * forward


def made(wanted: dict[str, Any], times: Sequence[float], **changes: Any) -> Measurement:
    """A measurement with known times."""
    timed = TimedStep.from_settings(wanted)
    device = Samples(tuple(0.99 * ms for ms in times)) if wanted["device"] == "cuda" else None
    result: dict[str, Any] = {
        "times": StepTimes(Samples(tuple(times)), device, changes.pop("warm_up_ms", (99.0,))).to_dict(),
        "tokens": timed.step.batch * timed.step.context,
        "flops": 1e9,
        "parameters": 1000,
        "attention": "reference",
        "threads": 2,
        "cpu_share": None,
        "ceiling_flops": 1e12,
        "ceiling_dtype": "float32",
        "copy_bytes": 2.0**30,
        "sheet_flops": 2e12 if wanted["device"] == "cuda" else None,
        "compile_seconds": None,
        "from_cache": False,
        "difference": None,
    }
    outcome = changes.pop("outcome", CellOutcome.MEASURED)
    message = changes.pop("message", "")
    measured = outcome is CellOutcome.MEASURED
    return Measurement(
        Cell("step", wanted), outcome, {**result, **changes} if measured else {}, message, 1.0,
        Machine("a device", {"torch": "2.13"}), "abc", "2026-11-18T00:00:00+00:00",
    )  # fmt: skip


PART_MS = {"forward": 10.0, "backward": 20.0, "both": 30.0, "full": 40.0}


def text_of(found: Sequence[Section]) -> str:
    for section in found:
        for block in section.blocks:
            if isinstance(block, Table):
                assert {len(row) for row in block.rows} == {len(block.head)}, block.title
    return re.sub(" +", " ", markdown(Document("Steps", (), tuple(found), "trimtab bench step")))


def charts_of(found: Sequence[Section]) -> list[LineChart | BarChart]:
    return [b for section in found for b in section.blocks if isinstance(b, LineChart | BarChart)]


def test_the_report_of_known_times() -> None:
    asked = [dict(one.settings) for one in cells(device="cuda", sizes=["small"], contexts=[128, 256])]
    measurements = []
    for one in asked:
        ms = PART_MS[one["part"]] * one["context"] / 128 * (1.1 if one["loss"] == "cross_entropy" else 1)
        if (one["part"], one["context"]) == ("full", 256):
            measurements.append(made(one, [1.0], outcome=CellOutcome.OUT_OF_MEMORY, message="tried 3 GiB"))
        else:
            measurements.append(made(one, [ms - 1, ms + 1] * 5))
    found = sections(measurements)
    text = text_of(found)
    assert "| 10.0 ± 1.1 " in text
    assert "| out of memory " in text
    assert "tried 3 GiB" in text
    assert "38.3 and 36.8" in text, "the reference's figures of the same settings"
    assert "backward pass takes 2.0 times as long" in text
    assert "optimizer takes 25 % of a full step" in text
    assert (
        "cross entropy instead of the sum of the logits, the time of forward + backward changes by +10.0 %"
        in text
    )
    assert "states a backward pass of 1.1 times the forward pass at 128 tokens" in text
    assert "From 128 to 256 tokens, 2 times as many, forward + backward of small takes 2.0 times" in text
    # 10⁹ FLOPs in 30 ms: 33.3 GFLOP/s, of 1 TFLOP/s measured and 2 by the data sheet
    assert "33.3 GFLOP/s" in text
    assert "| 3.3 % " in text
    assert "| 1.7 % " in text
    assert "1.0 % above the device's" in text
    # 28 bytes for each of 1000 parameters in 10 ms, of 1 GiB/s
    assert "| 0.3 % " in text
    line, bars = charts_of(found)
    assert isinstance(line, LineChart)
    assert line.series[0].points == ((128.0, 30.0), (256.0, 60.0))
    assert isinstance(bars, BarChart)
    assert bars.bars[0].parts == (("forward", 10.0), ("backward", 20.0), ("optimizer", 10.0))


def test_noise_is_reported_and_nothing_is_concluded_from_it() -> None:
    asked = settings(losses=["logits_sum"])
    times = {"forward": [8.0, 12.0], "backward": [20.0, 20.0], "both": [28.0, 32.0], "full": [27.0, 35.0]}
    noisy = text_of(sections([made(one, times[one["part"]], cpu_share=0.5) for one in asked]))
    assert "The optimizer takes" not in noisy, "31 ± 6 is not clearly more than 30 ± 3"
    (bars,) = charts_of(sections([made(one, times[one["part"]]) for one in asked]))
    assert isinstance(bars, BarChart)
    assert [name for name, _ in bars.bars[0].parts] == ["forward", "backward"]
    assert re.search(r"\| 2\.00 \| – \| 30\.0 \|", noisy), "nor a share of the copy's rate"
    assert "standard deviations reach 28 % of the mean" in noisy
    assert "this process ran 50 % of the time" in noisy
    assert "above 100 %" not in noisy
    quiet = [made(one, [PART_MS[one["part"]]] * 2, cpu_share=0.99, ceiling_flops=1e10) for one in asked]
    text = text_of(sections(quiet))
    assert "The optimizer takes 25 % of a full step" in text
    assert "noisy" not in text
    assert "Other programs" not in text
    assert "above 100 %" in text
    modes = settings(modes=["eager", "compiled"], losses=["logits_sum"], parts=["both"])
    unclear = text_of(sections([made(modes[0], [10.0, 12.0]), made(modes[1], [10.5, 10.6])]))
    assert "(1.04×, within noise)" in unclear


def test_means_are_compared_by_welchs_interval() -> None:
    few, many = Samples((10.0, 12.0, 14.0)), Samples((15.0, 15.1) * 5)
    # By hand: the standard error is 2 / √3 with 2.0006 degrees of freedom, t = 4.302: an interval of ±4.97 around 3.05.
    # With the 11 degrees of freedom of a pooled variance it would be ±2.54, and exclude zero.
    assert not differ(few, many)
    assert differ(few, Samples((17.1, 17.2) * 5))
    assert differ(Samples((1.0, 1.0)), Samples((2.0, 2.0)))
    assert not differ(Samples((1.0, 1.0)), Samples((1.0, 1.0)))


def test_the_report_counts_the_warm_up_steps_that_ran() -> None:
    (wanted,) = settings(parts=["forward"], losses=["logits_sum"], warm_up=[5])
    assert "after 2 of warm-up" in text_of(sections([made(wanted, [1.0, 1.0], warm_up_ms=(9.0, 8.0))]))


def test_gains_of_precision_mode_and_kernels() -> None:
    asked = settings(
        precisions=["fp32", "bf16"], modes=["eager", "compiled", "graphs"], kernels=["reference", "fast"],
        losses=["logits_sum"], parts=["both"],
    )  # fmt: skip
    speed = {"fp32": 1.0, "bf16": 2.0, "eager": 1.0, "compiled": 1.25, "reference": 1.0, "fast": 4.0}
    measurements = []
    for one in asked:
        if one["mode"] == "graphs":
            measurements.append(made(one, [1.0], outcome=CellOutcome.NOT_SUPPORTED, message="no GPU"))
            continue
        ms = 100 / speed[one["precision"]] / speed[one["mode"]] / speed[one["kernels"]]
        more = {"compile_seconds": 20.0, "difference": 2e-7} if one["mode"] == "compiled" else {}
        measurements.append(made(one, [ms, ms], **more))
    found = {section.title: section for section in sections(measurements)}
    texts = {title: text_of([section]) for title, section in found.items()}
    assert "bf16, times as fast as fp32: forward + backward 2.00." in texts["Precision"]
    assert "50.0 (2.00×)" in texts["Precision"]
    modes = texts["torch.compile and CUDA graphs"]
    assert "compiled, times as fast as eager: forward + backward 1.25." in modes
    assert "graphs: not supported (no GPU)." in modes
    assert "| 20.0 " in modes
    assert "| 1,000 " in modes, "20 s of compiling, 20 ms saved at each step"
    assert "differ by at most 2e-07" in modes
    assert "fast, times as fast as reference: forward + backward 4.00." in texts["Kernels"]
    assert any(
        "not supported" in texts[title] for title in texts if title.startswith("Step time: fp32, graphs")
    )


def test_compiling_without_gain_is_reported() -> None:
    asked = settings(modes=["eager", "compiled"], losses=["logits_sum"], parts=["both"])
    found = [made(asked[0], [10.0]), made(asked[1], [11.0], compile_seconds=5.0, from_cache=True)]
    text = text_of(sections(found))
    assert "never: it is not faster" in text
    assert "kernels from the cache" in text
    assert "5.0 (kernels" in text_of(sections(found[1:])), "compiled alone"


def test_the_warm_up_report_is_made_of_its_data() -> None:
    asked = [dict(one.settings) for one in cells(device="cuda", warm_up=[0, 1, 5])]
    times = {0: [400.0, 50.0, 50.0], 1: [60.0, 61.0, 62.0], 5: [50.0, 50.0, 50.0]}
    measurements = [made(one, times[one["warm_up"]], warm_up_ms=(390.0,) * one["warm_up"]) for one in asked]
    (section,) = sections(measurements)
    text = text_of([section])
    assert section.title == "Warm-up"
    assert "the first step takes 8.0 times the median" in text
    assert "3.33 times that after 5 steps" in text
    assert "226.0 ± 441.0" in text, "the reference's, at the same settings"
    assert "| 390.0 " in text
    failed = [made(one, [1.0], outcome=CellOutcome.TIMED_OUT, message="longer than 600 s") for one in asked]
    assert "timed out" in text_of(sections(failed))


def test_cells_and_reports_import_no_torch() -> None:
    code = (
        "import sys; from trimtab.lab.studies import find_study; from trimtab.lab.studies.step.cells import cells; "
        "find_study('step'); cells(device='cuda'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_damaged_records_are_errors() -> None:
    (wanted,) = settings(parts=["forward"], losses=["logits_sum"])
    with pytest.raises(DataError, match="damaged"):
        sections([made(wanted, [1.0], tokens={}, times_ms=3)])
    with pytest.raises(DataError, match="damaged"):
        sections([made(wanted, [1.0], unknown=3)])
    broken = made(wanted, [1.0])
    with pytest.raises(DataError, match="settings of a record are damaged"):
        sections([Measurement(**{**vars(broken), "cell": Cell("step", {"size": "tiny"})})])


def test_the_command_measures_reports_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--sizes tiny --contexts 8 --parts forward --modes eager,graphs --loss logits_sum --steps 2 --warm-up 1"
    words = ["bench", "step", *options.split(), "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    eager, graphs = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert len(eager["result"]["times"]["host"]["times_ms"]) == 2
    assert (graphs["outcome"], graphs["message"]) == ("not supported", "CUDA graphs need a CUDA GPU")
    assert "forward" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr("trimtab.lab.sweep.WorkerProcess.measure", None)  # everything is recorded
    assert main(words) == 0
    assert "Step time: fp32, eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contexts", "128,x"], "not a list of whole numbers"),
        (["--sizes", "smal"], "did you mean small"),
        (["--steps", "0"], "use at least 1"),
        (["--device", "cuda"], "no CUDA GPU"),
    ],
)
def test_bad_words_end_the_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "step", *words]) in (2, 6)
    assert message in capsys.readouterr().err
