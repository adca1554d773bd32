"""Savings and costs of each recompute policy against the plan of a run with that policy."""

from __future__ import annotations

import dataclasses

import pytest
from plan_jobs import FULL, H200, QLORA, QWEN, planned, resolved_for

from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.devices import DeviceFacts
from trimtab.model.spec import flops_per_token
from trimtab.plan import policy_costs
from trimtab.plan.job import Job
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import make_setting, recompute_seconds
from trimtab.recipe import loads

JOBS = {"full": FULL.changed(tokens=4096), "adapters": QLORA.changed(tokens=8192)}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_rows_match_the_plan(job: Job) -> None:
    rows = policy_costs(job, H200)
    assert [row.policy for row in rows] == list(POLICIES)
    layers = job.shape.num_layers
    baseline = make_setting(job, H200, (("none", layers),)).seconds
    for row in rows:
        assert row.kept + row.saved == rows[0].kept
        memory = predict(job.changed(policies=(row.policy,) * layers))
        assert memory.host == row.host * layers
        seconds = make_setting(job, H200, ((row.policy, layers),)).seconds - baseline
        assert recompute_seconds(job, H200, [row.policy] * layers) == pytest.approx(seconds, abs=1e-12)
        # The first layer after frozen embeddings recomputes less; the rows describe the other layers.
        assert row.seconds * layers == pytest.approx(seconds, rel=0.01, abs=1e-12)


def test_arithmetic_is_a_share_of_forward_and_backward() -> None:
    job = JOBS["full"]
    of = {row.policy: row for row in policy_costs(job, H200)}
    assert of["none"].arithmetic == of["pointwise"].arithmetic == 0
    # Recomputing a block costs its forward pass without the last matmul.
    shape = job.shape
    head = 2.0 * shape.vocab_size * shape.hidden_size
    down = 2.0 * shape.hidden_size * shape.intermediate_size
    forward = (flops_per_token(shape, 4096, training=False) - head) / shape.num_layers - down
    forward_backward = (flops_per_token(shape, 4096) - 3 * head) / shape.num_layers
    assert of["block"].arithmetic == pytest.approx(forward / forward_backward)
    assert of["offload"].arithmetic == of["block"].arithmetic > of["selective"].arithmetic
    # Frozen weights have no gradients, so the same work is a larger share.
    frozen = {row.policy: row for row in policy_costs(JOBS["adapters"], H200)}
    trained = policy_costs(dataclasses.replace(JOBS["adapters"], lora=None, quantization=None), H200)
    assert frozen["block"].arithmetic > {row.policy: row for row in trained}["block"].arithmetic


def test_unknown_devices_have_no_times() -> None:
    unknown = DeviceFacts("a GPU", "cuda", 24 * 10**9, capability=(8, 9), bf16=True)
    rows = policy_costs(FULL, unknown)
    assert all(row.seconds is None for row in rows)
    assert recompute_seconds(FULL, unknown, ["block"] * 28) is None


@pytest.mark.parametrize(("limit", "suffix"), [("8GiB", " ms per microbatch faster"), ("100GiB", None)])
def test_the_reason_names_the_cost_of_recomputation(limit: str, suffix: str | None) -> None:
    recipe = loads(
        "model: x\ndata: {train: y}\nmax_seq_length: 4096\nper_device_train_batch_size: 4\n"
        f"optim: adamw_8bit\nmemory_limit: {limit}"
    )
    memory = planned(recipe, QWEN, H200, resolved_for(QWEN)).resolved.memory_plan
    if suffix is None:
        assert memory.reason == "everything fits memory_limit: 100GiB"
        return
    assert memory.reason.startswith(
        "the fastest that fits memory_limit: 8GiB; saving all activations would take "
    )
    assert " and be an estimated " in memory.reason
    assert memory.reason.endswith(suffix)
