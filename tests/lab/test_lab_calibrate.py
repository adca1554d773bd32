"""Calibration of a CPU in seconds; probes with the costs that blocks declare; warnings; Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.operations import Operation, OperationKind
from trimtab.facts.shapes import uniform_shape
from trimtab.lab import calibrate as calibrating
from trimtab.lab import machine_state, probes_kernels
from trimtab.lab.calibrate import calibrate
from trimtab.lab.launch_overhead import launch_seconds
from trimtab.lab.machine_state import load_warnings
from trimtab.lab.probes import Probe, ProbeGroup
from trimtab.lab.probes_blocks import KernelChoices, attention_probes, gate_probes, norm_probes, rope_probes
from trimtab.lab.probes_kernels import kernel_groups
from trimtab.lab.probes_products import _products, product_dtypes, product_groups
from trimtab.model.spec_block import block_operations
from trimtab.model.spec_operations import Execution
from trimtab.run.device import detect

CPU = DeviceFacts("a CPU", "cpu", 2**33)


def test_a_cpu_is_calibrated_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state, "DISK_BYTES", 2**20)
    labels: list[str] = []
    threads = torch.get_num_threads()
    found = calibrate("cpu", 1, lambda label, share: labels.append(label), folder=tmp_path, seconds=1.0)
    assert found.device == detect("cpu").name
    assert found.threads == 1
    assert torch.get_num_threads() == threads
    assert found.flops["fp32"] > 1e8
    assert found.copy > 1e8
    assert 1e-7 < found.launch_seconds < 1e-2
    assert found.disk_write is not None
    assert found.to_host is None
    assert {OperationKind.COPY, OperationKind.PRODUCT, OperationKind.NORM} <= {
        sample.kind for sample in found.samples
    }
    assert all(sample.seconds > 0 for sample in found.samples)
    assert any("skipped" in warning for warning in found.warnings)
    assert len(labels) >= 5
    assert list(tmp_path.iterdir()) == []
    assert Calibration.from_dict(found.to_dict()) == found


def test_a_cpu_without_bf16_instructions_measures_its_bf16_kernels_too() -> None:
    """It only emulates bf16, so that times in fp32 do not tell times in bf16."""
    run = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)
    run.rates = {"fp32": 1e11, "bf16": 2e10}
    assert run._kernel_dtypes("fp32") == ["fp32", "bf16"]
    assert run._kernel_dtypes("bf16") == ["bf16", "fp32"]
    run.rates = {"fp32": 1e11}
    assert run._kernel_dtypes("fp32") == ["fp32"], "bf16 that is ten times slower is not measured"
    run.kind, run.rates = "cuda", {"bf16": 1e14, "fp16": 1e14, "fp32": 1e13}
    assert run._kernel_dtypes("bf16") == ["bf16"]


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state, "DISK_BYTES", 2**16)

    def interrupt(label: str, share: float) -> None:
        if "copy" in label:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        calibrate("cpu", threads + 1, interrupt, folder=tmp_path, seconds=1.0)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


def declared(pointwise: str, impl: str) -> dict[str, Operation]:
    """A block of 2 × 64 tokens, 64 wide, 4 and 2 heads of 16, intermediate size 96."""
    shape = uniform_shape("llama", 64, 64, 96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    run = Execution(2, 64, "fp32", impl, pointwise=pointwise)
    return {one.name: one for one in block_operations(shape.blocks[0], 64, run)}


def test_probes_have_the_costs_that_a_block_declares() -> None:
    operations = declared("reference", "sdpa_flash")
    choices = KernelChoices(CPU, "fp32")
    made = {
        "input_layernorm": norm_probes(choices, 128, 64),
        "mlp.activation": gate_probes(choices, 128, 96),
        "rope": rope_probes(choices, 2, 64, 4, 2, 16),
        "attention": attention_probes(choices, 2, 64, 4, 2, 16),
    }
    for name, (forward, backward) in made.items():
        one = operations[name]
        assert (forward.kind, forward.dtype) == (one.kind, one.dtype)
        assert (forward.flops, forward.moved) == (one.forward.flops, one.forward.moved), name
        assert (backward.flops, backward.moved) == (one.backward.flops, one.backward.moved), name
        assert backward.backward
        forward.run()
        backward.run()
    up = operations["mlp.up_proj"]
    products = _products("cpu", "fp32", (128, 96, 64))
    assert {(one.flops, one.moved) for one in products} == {(up.forward.flops, up.forward.moved)}
    assert [one.run().shape for one in products] == [(128, 96), (128, 64), (96, 64)]  # type: ignore[attr-defined]
    assert [one.dims[:2] for one in products] == [(128, 96), (128, 64), (96, 64)]


def test_every_kind_is_probed_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"ROWS": (8, 16), "GATES": (8, 16), "HEADS": (1, 16, 4, 2, 8), "LONG_HEADS": (1, 32, 2, 1, 8)}
    small |= {"WEIGHTS": (16, 64), "LOSSES": (8, 16, 32), "ELEMENTS": 1024}
    for name, sizes in small.items():
        monkeypatch.setitem(getattr(probes_kernels, name), "cpu", (sizes,))
    monkeypatch.setitem(probes_kernels.MATRIX, "cpu", 32)
    monkeypatch.setitem(probes_kernels.blocks.DOCUMENT, "cpu", 8)
    probes = [probe for group in kernel_groups(CPU, "fp32", 2**33) for probe in group.build()]
    for probe in probes:
        probe.run()
    assert {probe.kind for probe in probes} == set(OperationKind) - {OperationKind.PRODUCT}
    assert {probe.dtype for probe in probes if probe.kind is OperationKind.DEQUANTIZE} == {"nf4", "int8"}
    assert all(probe.impl and probe.moved > 0 and probe.dims for probe in probes)
    assert len([probe for probe in probes if probe.kind is OperationKind.OPTIMIZER]) == 4
    assert any("packed" in probe.impl for probe in probes)


def test_products_cover_training_and_fit() -> None:
    gpu = DeviceFacts("a GPU", "cuda", 2**37, capability=(9, 0), bf16=True)
    assert product_dtypes(gpu) == ("bf16", "fp16", "tf32", "fp32")
    labels = [group.label for group in product_groups(gpu, "bf16", 7e14, 2**37)]
    assert "bf16 product 16384 × 28672 × 8192" in labels
    assert len(labels) == len(set(labels)) > 80
    small = list(product_groups(gpu, "bf16", 1e13, 2**30))
    assert 10 < len(small) < len(labels)
    assert all(group.nbytes <= 2**28 for group in small)


def test_launch_overhead_is_of_one_operation() -> None:
    assert 1e-6 < launch_seconds(CPU, "fp32") < 2e-3


def test_a_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_state.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    (warning,) = load_warnings("cpu")
    assert "load average of 99.0" in warning
    monkeypatch.setattr(machine_state.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert load_warnings("cpu") == []


def test_falling_rates_and_spread_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)
    measuring.warnings.clear()
    monkeypatch.setattr(calibrating, "probe_rate", lambda kind, dtype: 8e10)
    measuring._check_clock("fp32", 8.5e10)
    measuring.spreads = [0.01] * 9 + [0.5]
    measuring._check_spread()
    assert measuring.warnings == []
    measuring._check_clock("fp32", 1e11)
    measuring.spreads = [0.01] * 5 + [0.5] * 5
    measuring._check_spread()
    assert ["by 20%" in measuring.warnings[0], "5 of 10" in measuring.warnings[1]] == [True, True]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_probes_that_do_not_fit_or_take_too_long_are_skipped(error: RuntimeError) -> None:
    measuring = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)
    measuring.warnings.clear()
    measuring.rates = {"fp32": 1e9}

    def full() -> list[Probe]:
        raise error

    long = Probe(OperationKind.PRODUCT, "fp32", 1e12, 1.0, full)
    measuring._measure(ProbeGroup("a long one", lambda: [long]))
    assert measuring.left_out == 1
    measuring._measure(ProbeGroup("a large one", full))
    assert measuring.warnings == ["a large one was skipped: it does not fit into free memory"]


def test_other_errors_of_a_probe_are_raised() -> None:
    measuring = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)

    def wrong() -> list[Probe]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        measuring._measure(ProbeGroup("a wrong one", wrong))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    measuring = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)
    measuring.warnings.clear()
    assert measuring._disk(tmp_path / "missing") == (None, None)
    assert "the disk was not measured" in measuring.warnings[0]


def test_nothing_to_measure_is_an_error_with_a_remedy() -> None:
    measuring = calibrating._CalibrationRun(CPU, 1.0, lambda label, share: None)
    with pytest.raises(ResourceError, match="too little free memory for a calibration; end other programs"):
        measuring._best_copy()
    with pytest.raises(RecipeError, match="threads is 0; give at least 1"):
        calibrate("cpu", 0)
    with pytest.raises(RecipeError, match="device 'gpu' is not known"):
        calibrate("gpu")


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_is_calibrated(tmp_path: Path) -> None:
    found = calibrate("cuda", folder=tmp_path)
    assert found.device == torch.cuda.get_device_name()
    assert {sample.kind for sample in found.samples} == set(OperationKind)
    assert found.threads is None
    assert found.to_host is not None
    assert found.to_host > 1e9
    assert 1e-6 < found.launch_seconds < 1e-3
    assert any(sample.impl.startswith("triton") for sample in found.samples)
    best = max(s.flops / s.seconds for s in found.samples if s.kind is OperationKind.PRODUCT)
    assert best == max(found.flops.values())
