"""The timeline of a step against the predicted moments, and activations by part against the activations bucket."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_jobs import FULL, QLORA

pytest.importorskip("torch")

import itertools

from tests.plan.declared import full_training
from tests.plan.test_plan_saved_activations import FAMILIES, METHODS
from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.operations import MemoryPart
from trimtab.plan.job import Job
from trimtab.plan.memory import Phase, predict
from trimtab.plan.timeline import activation_parts, step_timeline

GPU: dict[str, Any] = {"device": "cuda", "pointwise": "triton", "loss_impl": "triton"}
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"mlp_tiles": 3}, {"accumulation": 2, **GPU}, GPU)


def check(job: Job) -> None:
    memory, points = predict(job), step_timeline(job)
    totals = {point.moment: point.buckets.total - memory.before.total for point in points}
    assert {moment: totals[moment] for moment in memory.moments} == memory.moments
    assert max(totals.values()) == max(memory.moments.values()), (
        "the peak is not at the end of a group of layers"
    )
    for point in points:
        assert sum(point.parts.values()) == point.buckets.activations
        assert min(point.parts.values()) >= 0
        assert point.buckets.gradients <= memory.peak.gradients
    parts = activation_parts(job, memory)
    assert sum(parts.values()) == memory.peak.activations
    rest = {part: size for part, size in parts.items() if part is not MemoryPart.PARAMETER_GRADIENTS}
    assert min(rest.values()) >= 0
    # Gradients allocated at the peak: the bucket's, and the missing (negative) or temporary ones.
    allocated = memory.peak.gradients + parts[MemoryPart.PARAMETER_GRADIENTS]
    step = [point for point in points if point.moment.phase is not Phase.OPTIMIZER_STEP]
    top = max(step, key=lambda point: point.buckets.total)
    if memory.peak.activations > 0:
        assert allocated == top.buckets.gradients + top.parts[MemoryPart.PARAMETER_GRADIENTS]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_add_up_to_the_activations_bucket(family: str, method: str) -> None:
    base = dataclasses.replace(full_training(FAMILIES[family], 2, 48), **METHODS[method])
    for policy in POLICIES:
        for variant in VARIANTS:
            check(dataclasses.replace(base, policies=(policy, policy, "none"), **variant))


def test_order_and_number_of_points() -> None:
    points = step_timeline(FULL)
    phases = [point.moment.phase for point in points]
    assert phases == sorted(phases, key=list(Phase).index)
    forward = [point.moment.layer for point in points if point.moment.phase is Phase.LAYERS_FORWARD]
    backward = [point.moment.layer for point in points if point.moment.phase is Phase.LAYERS_BACKWARD]
    assert forward == list(range(28))
    assert backward == forward[::-1]


def test_activations_grow_in_forward_and_gradients_in_backward() -> None:
    points = {point.moment: point.buckets for point in step_timeline(FULL)}
    forward = [
        buckets.activations for moment, buckets in points.items() if moment.phase is Phase.LAYERS_FORWARD
    ]
    assert len({after - before for before, after in itertools.pairwise(forward)}) == 1
    backward = [buckets for moment, buckets in points.items() if moment.phase is Phase.LAYERS_BACKWARD]
    assert all(a.gradients < b.gradients for a, b in itertools.pairwise(backward))


def test_offloaded_qlora_is_mostly_feed_forward_at_its_peak() -> None:
    job = dataclasses.replace(QLORA, tokens=8192, policies=("offload",) * 32)
    parts = activation_parts(job, predict(job))
    assert parts[MemoryPart.WORKSPACE] >= 14_336 * 4096 * 2  # the dequantized weight
    # gate, up and gated activations, and the outputs of lora_A
    assert parts[MemoryPart.FEED_FORWARD] == 8192 * 2 * (3 * 14_336 + 3 * 16)
