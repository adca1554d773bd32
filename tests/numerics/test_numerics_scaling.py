"""fp16's loss scaling tolerates overflows, and nothing else."""

from __future__ import annotations

import pytest
from tiny_setup import TinyLoader, tiny_setup

from trimtab.facts.errors import TrainingError
from trimtab.trainer import TrainState, train
from trimtab.trainer.microstep import LossSum
from trimtab.trainer.scaling import MIN_SCALE


def test_gradients_that_no_scale_fixes_stop_the_run() -> None:
    setup = tiny_setup(TinyLoader(), total_steps=12, loss_scale=4 * MIN_SCALE)
    calm, weight = setup.microstep.loss, next(iter(setup.parameters.values()))
    # A finite loss whose gradient is 0 · ∞, whatever the scale.
    spoiled = lambda batch: LossSum(calm(batch).total + (weight * 0).sqrt().sum(), batch.num_targets)  # noqa: E731
    setup.microstep.loss = spoiled
    with pytest.raises(TrainingError, match="not finite at step 3"):
        train(setup, TrainState())
