"""The loop with the optimizer inside the backward pass: the same run, without allocated gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_setup import TinyLoader, tiny_setup

from trimtab.facts.errors import TrainingError
from trimtab.optim import OptimizerInBackward, build
from trimtab.trainer import Cadence, TrainingSetup, TrainState, train


def setup(loader: TinyLoader, in_backward: bool, name: str = "adamw_8bit") -> TrainingSetup:
    made = tiny_setup(loader, cadence=Cadence(total_steps=8, logging_steps=3, eval_on_start=False))
    made.optimizer = build(name, made.parameters.items(), lr=0.05, weight_decay=0.1)
    made.clip_factor = torch.ones_like
    if in_backward:
        made.in_backward = OptimizerInBackward(made.optimizer)
    return made


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bf16", "adamw_torch"])
def test_the_run_is_the_same(name: str) -> None:
    after, during = (setup(TinyLoader(accumulation=1), flag, name) for flag in (False, True))
    for run in (after, during):
        train(run, TrainState())
    assert during.log.losses() == after.log.losses()
    norms = [[r["grad_norm"] for r in run.log.records if r["kind"] == "train"] for run in (after, during)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    for key, t in after.tensors().items():
        assert torch.equal(t, during.tensors()[key]), key
    peak = next(r for r in during.log.records if r["kind"] == "memory" and r["when"] == "peak")
    assert peak["gradients"] == 0


def test_a_bad_loss_preserves_the_state_before_it() -> None:
    clean, bad = (
        setup(TinyLoader(accumulation=1), False),
        setup(TinyLoader(accumulation=1, poison_step=4), True),
    )
    clean.cadence = Cadence(total_steps=4, eval_on_start=False)
    train(clean, TrainState())
    with pytest.raises(TrainingError, match=r"step 5.*doc:4:0.*before the first non-finite gradient"):
        train(bad, TrainState())
    assert max(bad.store.saved) == 4
    for key, t in clean.tensors().items():
        assert torch.equal(t, bad.store.saved[4][0][key]), key


def test_accumulation_is_refused() -> None:
    two = setup(TinyLoader(accumulation=2), True)
    steps = two.in_backward
    assert steps is not None
    steps.begin(lr=0.1, skip=torch.tensor(False))
    x = torch.ones(2, 8)
    two.model(x).sum().backward()
    with pytest.raises(TrainingError, match="does not support gradient accumulation"):
        two.model(x).sum().backward()


def test_a_non_finite_gradient_updates_no_weight() -> None:
    run = setup(TinyLoader(accumulation=1), True)
    steps, before = run.in_backward, [p.detach().clone() for p in run.parameters.values()]
    assert isinstance(steps, OptimizerInBackward)
    steps.begin(lr=0.1)
    (run.model(torch.ones(2, 8)).sum() * torch.nan).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters.values(), strict=True))
    assert steps.norm().isnan()
    steps.close()
    run.model(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in run.parameters.values())
