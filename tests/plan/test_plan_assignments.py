"""Assignments of recompute policies: more layers than grid positions, unequal layers, and limited host memory."""

from __future__ import annotations

import dataclasses

import pytest
from plan_jobs import H200, QLORA

from trimtab.adapt.spec_recompute import OFFLOADING
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.plan import assignments
from trimtab.plan.layers import Layers
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import _bytes_outside_blocks, lowest_memory, policy_seconds, search_rates

WIDE = uniform_shape("llama", 32_000, 1024, 2816, 40, num_heads=16, num_kv_heads=8, head_dim=64)


def alternating(shape: ModelShape) -> ModelShape:
    """Halves the feed-forward width of every second layer."""
    narrow = dataclasses.replace(
        shape.blocks[0], feed_forward=dataclasses.replace(shape.blocks[0].dense, width=1408)
    )
    return dataclasses.replace(
        shape, blocks=tuple(narrow if i % 2 else b for i, b in enumerate(shape.blocks))
    )


@pytest.mark.parametrize("shape", [WIDE, alternating(WIDE)], ids=["equal", "alternating"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_a_coarse_grid_is_nearly_optimal(
    shape: ModelShape, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.replace(QLORA, shape=shape, batch=1, tokens=8192)
    costs = policy_seconds(job, search_rates(H200, job.dtype))
    lowest, unconstrained = lowest_memory(job, H200, tiles=1), predict(job).needed
    limit, outside = int(lowest + share * (unconstrained - lowest)) + 2**20, _bytes_outside_blocks(job)

    def fastest() -> assignments.Assignment:
        assignment = assignments.Assignments(Layers(job), costs, OFFLOADING, None).fastest(outside, limit)
        assert assignment is not None
        return assignment

    coarse = fastest()
    monkeypatch.setattr(assignments, "GRID", 40)
    exact = fastest()
    assert coarse.needed <= limit
    policies = tuple(policy for policy, count in coarse.segments for _ in range(count))
    assert predict(job.changed(policies=policies)).needed == coarse.needed
    assert exact.seconds <= coarse.seconds <= exact.seconds * 1.01


def test_host_memory_limits_the_offloaded_layers() -> None:
    job = dataclasses.replace(QLORA, shape=WIDE, batch=1, tokens=8192)
    costs = policy_seconds(job, search_rates(H200, job.dtype))
    layers = Layers(job)
    host_bytes = 7 * layers.of(0, "offload").host
    bounded = assignments.Assignments(layers, costs, ("offload",), host_bytes).smallest(
        _bytes_outside_blocks(job)
    )
    assert dict(bounded.segments)["offload"] == 7
    unbounded = assignments.Assignments(layers, costs, ("offload",), None).smallest(
        _bytes_outside_blocks(job)
    )
    assert unbounded.needed < bounded.needed
