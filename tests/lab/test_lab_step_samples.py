"""Samples of kernels from profiles of whole steps, and predictions for recorded cases without a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_accuracy import picture, replan, table
from benchmarks.plan_accuracy.cases import Case
from benchmarks.step_samples import GROUPS, merged, operations_of, samples_of
from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.operations import OperationKind
from trimtab.plan.device_rates import rates_of, shipped_calibration
from trimtab.plan.job import Job
from trimtab.plan.rates import Rates
from trimtab.plan.step_time import step_time_at

CASE = Case.parse("smollm2-135m full 8x512")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    root = tmp_path_factory.mktemp("plans")
    return replan.job_of(CASE, replan.prepare_case(CASE, root), root)


@pytest.fixture(scope="module")
def rates() -> Rates:
    found = rates_of(replan.H200, "bf16")
    assert found is not None
    return found


def profile_of(**ms: float) -> dict[str, Any]:
    kernels = [{"name": name, "ms": value, "count": 1, "kind": "other"} for name, value in ms.items()]
    return {"kernels": kernels, "busy_ms": sum(ms.values()), "launches": 100}


def test_a_groups_time_is_divided_among_its_kernels(job: Job, rates: Rates) -> None:
    profile = profile_of(_gated_mlp_forward_kernel=3.0, _gated_mlp_backward_kernel=6.0)
    samples = list(samples_of(profile, job, rates, None))
    assert {(one.kind, one.backward) for one in samples} == {
        (OperationKind.GATE, False),
        (OperationKind.GATE, True),
    }
    for one in samples:
        assert one.seconds * job.shape.num_layers == pytest.approx(6e-3 if one.backward else 3e-3)
        assert one.moved > 0


def test_the_time_of_products_depends_on_their_sizes(job: Job, rates: Rates) -> None:
    samples = list(samples_of(profile_of(nvjet_sm90_tst=10.0), job, rates, None))
    products = [one for one in samples if one.kind is OperationKind.PRODUCT]
    assert len({one.dims for one in products}) > 6
    assert any(one.kind is OperationKind.LOSS for one in samples)
    again = list(samples_of(profile_of(nvjet_sm90_tst=20.0), job, rates, None))
    for one, twice in zip(samples, again, strict=True):
        assert twice.seconds == pytest.approx(2 * one.seconds)


def test_compute_bound_kernels_are_slower_in_a_step_among_others(job: Job, rates: Rates) -> None:
    profile = profile_of(nvjet_sm90_tst=10.0, _gated_mlp_forward_kernel=3.0)
    alone = {(one.kind, one.dims, one.backward): one.seconds for one in samples_of(profile, job, rates, None)}
    slower = samples_of(profile, job, rates, 13.5e-3 + rates.gap * profile["launches"])
    for one in slower:
        expected = 1.0 if one.kind is OperationKind.GATE else 1.05
        assert one.seconds / alone[one.kind, one.dims, one.backward] == pytest.approx(expected)


def test_operations_have_their_kernels(job: Job, rates: Rates) -> None:
    step = step_time_at(job, dataclasses.replace(rates, tiny=0.0), graphs=True)
    found = list(operations_of(job, rates))
    assert [one.name for one, _ in found] == [one.name for one in step.operations]
    assert sum(one.total for one, _ in found) == pytest.approx(sum(one.total for one in step.operations))
    names = {one.name for one, kernels in found if kernels}
    assert {"mlp.gate_proj", "attention", "loss", "optimizer", "gradient norm"} <= names
    for group in GROUPS:
        if group.name != "bias gradient":  # this model has none
            assert any(one.kind in group.kinds for one, _ in found), group.name


def test_equal_samples_are_averaged() -> None:
    one = KernelSample(OperationKind.NORM, "bf16", 0.0, 1e6, 2e-6)
    [found] = merged([one, dataclasses.replace(one, seconds=8e-6)])
    assert found.seconds == pytest.approx(4e-6)


def test_recorded_cases_are_planned_again(tmp_path: Path) -> None:
    record = {"measured": {"allocated": 3_156_467_840, "step_seconds": 0.0144, "buckets": {}}}
    [found] = replan.replanned(
        {CASE.name: record, "smollm2-135m full 8x2048 packed": {"failed": "x"}}, tmp_path, replan.H200
    )
    assert abs(table.error(found, "allocated") or 1) < 1e-3
    assert abs(table.error(found, "step_seconds") or 1) < 0.3
    assert found["predicted"]["process"] > found["predicted"]["reserved"] > found["predicted"]["allocated"]


def test_documents_determine_the_attended_share(tmp_path: Path) -> None:
    share = replan.attended_share(Case.parse("smollm2-135m full 8x2048 packed"), tmp_path)
    assert share == pytest.approx(2 * 400 / 2048, rel=0.15), (
        "lengths are exponentially distributed, 400 on average"
    )


def test_a_calibration_of_the_shipped_device_keeps_the_kernels_of_steps() -> None:
    shipped = shipped_calibration()
    mine = KernelSample(OperationKind.COPY, "uint8", 0.0, 1e9, 1e-3, impl="copy")
    known = next(one for one in shipped.samples if one.kind is OperationKind.NORM)
    here = Calibration(
        shipped.device,
        {"bf16": 1.02 * shipped.flops["bf16"], "fp32": 5e13},
        shipped.copy,
        4e-5,
        (mine, dataclasses.replace(known, seconds=9 * known.seconds)),
        {"full": 4e-5},
    )
    rates = rates_of(dataclasses.replace(replan.H200, calibration=here), "bf16")
    assert rates is not None
    assert rates.measured.samples == (*shipped.samples, mine)
    assert rates.flops == {"fp32": 5e13, **shipped.flops}
    assert (rates.launch, rates.host_seconds("full")) == (4e-5, 4e-5)
    slower = dataclasses.replace(here, flops={"bf16": 0.8 * shipped.flops["bf16"]})
    other = rates_of(dataclasses.replace(replan.H200, calibration=slower), "bf16")
    assert other is not None
    assert other.measured == slower, "a GPU with a lower power limit"


def test_the_picture_has_a_line_per_quantity(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rows = [
        {
            "case": CASE.name,
            "predicted": {"allocated": 101, "process": 110},
            "measured": {"allocated": 100, "process": 100},
        },
        {"case": "smollm2-135m full 8x2048 packed", "failed": "out of memory"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = picture.chart(table.read(path), "two cases")
    assert {series.name: series.points for series in drawn.series} == {
        "allocated peak": ((pytest.approx(1.0), 100.0),),
        "whole process": ((pytest.approx(10.0), 100.0),),
    }
