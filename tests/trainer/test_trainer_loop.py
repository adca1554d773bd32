"""The loop on a tiny setup: accumulation, guards, signals, checkpoints, measured memory."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from tiny_setup import TinyLoader, TinySGD, tiny_setup

from trimtab.facts.errors import DataError, TrainingError
from trimtab.trainer import Cadence, TrainState, train
from trimtab.trainer.memory import LiveBytes, storage_bytes
from trimtab.trainer.microstep import LossSum
from trimtab.trainer.scaling import LossScaler


@pytest.mark.parametrize("accumulation", [1, 2, 16])
def test_the_curve_does_not_depend_on_how_rows_are_spread(accumulation: int) -> None:
    reference, other = (
        tiny_setup(TinyLoader(accumulation=4)),
        tiny_setup(TinyLoader(accumulation=accumulation)),
    )
    train(reference, TrainState())
    train(other, TrainState())
    torch.testing.assert_close(
        torch.tensor(other.log.losses()), torch.tensor(reference.log.losses()), rtol=1e-6, atol=1e-7
    )
    assert len(set(reference.log.losses())) == 8


def test_every_step_is_logged_whatever_the_logging_cadence() -> None:
    often = tiny_setup(TinyLoader())
    seldom = tiny_setup(TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=5, eval_on_start=False))
    train(often, TrainState())
    train(seldom, TrainState())
    assert seldom.log.losses() == often.log.losses()


def test_records_are_written_in_the_order_of_their_steps() -> None:
    setup = tiny_setup(TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=5, eval_on_start=False))
    train(setup, TrainState())
    peak = next(r for r in setup.log.records if r["kind"] == "memory" and r["when"] == "peak")
    steps = [record["step"] for record in setup.log.records if record["kind"] == "train" or record is peak]
    assert steps == sorted(steps)
    assert peak["step"] == 2


def test_a_workspace_of_earlier_steps_counts_as_activations() -> None:
    peaks = []
    for size in (0, 1000):
        setup = tiny_setup(TinyLoader(accumulation=1), workspace_bytes=partial(int, size))
        train(setup, TrainState())
        peaks += [r for r in setup.log.records if r["kind"] == "memory" and r["when"] == "peak"]
    without, with_workspace = peaks
    assert with_workspace == without | {"activations": without["activations"] + 1000}


def test_a_resumed_state_continues_bitwise_identically() -> None:
    whole = tiny_setup(TinyLoader(), cadence=Cadence(total_steps=8, save_steps=3, eval_on_start=False))
    train(whole, TrainState())
    tensors, scalars, _ = whole.store.saved[3]
    resumed = tiny_setup(TinyLoader())
    for name, tensor in resumed.tensors().items():
        tensor.copy_(tensors[name])
    resumed.loader.restore(scalars["loader"])
    train(resumed, TrainState(**scalars["state"]))
    assert resumed.log.losses() == whole.log.losses()[3:]


@pytest.mark.parametrize("logging_steps", [1, 3, 8])
def test_a_bad_step_preserves_the_state_before_it(logging_steps: int) -> None:
    clean = tiny_setup(TinyLoader(), total_steps=4)
    train(clean, TrainState())
    cadence = Cadence(total_steps=8, logging_steps=logging_steps, eval_on_start=False)
    setup = tiny_setup(TinyLoader(poison_step=4), cadence=cadence)
    with pytest.raises(TrainingError) as raised:
        train(setup, TrainState())
    text = str(raised.value)
    assert "step 5" in text
    assert "microbatch 2 of 4" in text
    assert "doc:4:5" in text
    assert "output of 0" in text
    assert max(setup.store.saved) == 4
    for name, tensor in clean.tensors().items():
        assert torch.equal(setup.store.saved[4][0][name], tensor), name
    assert setup.store.saved[4][1]["loader"] == {"step": 4}
    assert len(setup.log.losses()) == 4
    assert any(r["kind"] == "event" for r in setup.log.records)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("step", [0, 4])
def test_the_remedy_for_a_bad_step_fits_it(step: int, named: bool, adapters: bool) -> None:
    """It mentions documents only if some are named, and a suitable export only if a checkpoint is saved."""
    loader = TinyLoader(poison_step=step if named else None)
    setup = tiny_setup(loader)
    if not named:  # of all the step's gradients together, not of one
        norm = setup.global_norm
        setup.global_norm = lambda p: norm(p) * (float("inf") if loader.step == step + 1 else 1.0)
    if adapters:
        setup.parameters = {f"{name}.lora_A.default.weight": p for name, p in setup.parameters.items()}
        setup.optimizer = TinySGD(setup.parameters)
    with pytest.raises(TrainingError) as raised:
        train(setup, TrainState())
    remedy = raised.value.remedy
    assert remedy is not None
    assert ("doc:" in raised.value.cause) is named
    assert ("check those documents; " in remedy) is named
    assert ("model.name" in remedy) is (step > 0 and not adapters)
    assert ("lora.adapter" in remedy) is ("trimtab export peft" in remedy) is (step > 0 and adapters)
    assert ("learning_rate" in remedy) is (step > 0)
    assert ("lower lora.lora_alpha" in remedy) is (step == 0 and adapters)


def test_missing_data_loses_no_step() -> None:
    setup = tiny_setup(
        TinyLoader(vanish_step=3), cadence=Cadence(total_steps=8, logging_steps=8, eval_on_start=False)
    )
    with pytest.raises(DataError):
        train(setup, TrainState())
    assert max(setup.store.saved) == 3
    assert len(setup.log.losses()) == 3


def test_a_step_without_targets_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no target tokens"):
        train(tiny_setup(TinyLoader(masked_step=2)), TrainState())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number: int) -> None:
    def after_step(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    setup = tiny_setup(TinyLoader(), after_step=after_step)
    outcome = train(setup, TrainState())
    assert (outcome.status, outcome.signal, outcome.state.step) == ("interrupted", number, 3)
    assert max(setup.store.saved) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_best_is_tagged_when_the_score_improves() -> None:
    scores = iter([3.0, 2.0, 2.5, 1.0, 1.5])

    def evaluate(step: int) -> list[dict[str, object]]:
        return [
            {
                "kind": "eval",
                "step": step,
                "name": "domain",
                "loss": next(scores),
                "perplexity": 1.0,
                "tokens": 1,
            }
        ]

    setup = tiny_setup(
        TinyLoader(), cadence=Cadence(total_steps=8, eval_steps=2), evaluate=evaluate, best_of="domain"
    )
    outcome = train(setup, TrainState())
    assert {s for s, (_, _, tags) in setup.store.saved.items() if "best" in tags} == {2, 6}
    assert outcome.state.best == 1.0


def test_fp16_overflow_skips_the_step_and_halves_the_scale() -> None:
    setup = tiny_setup(TinyLoader())
    scaler = LossScaler(scale=2.0**127)
    train(setup, TrainState(), scaler)
    assert scaler.scale < 2.0**127
    assert setup.optimizer.steps < 8
    assert all(torch.isfinite(p).all() for p in setup.parameters.values())


def test_scaling_does_not_change_the_curve() -> None:
    plain, scaled = tiny_setup(TinyLoader()), tiny_setup(TinyLoader(), loss_scale=1024.0)
    train(plain, TrainState())
    train(scaled, TrainState())
    assert scaled.log.losses() == plain.log.losses()


def test_live_bytes_sees_peak_and_release() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b.view(10, 100)
        c.add_(1)
    assert live.peak == 8000
    assert live.now == 4000


def test_measured_buckets_equal_the_tensors_sizes() -> None:
    setup = tiny_setup(TinyLoader(accumulation=1))
    train(setup, TrainState())
    (peak,) = [r for r in setup.log.records if r["kind"] == "memory" and r["when"] == "peak"]
    size = storage_bytes(setup.parameters.values())
    assert peak["weights"] == peak["gradients"] == peak["optimizer"] == size
    assert 0 < peak["activations"] < 20_000


@pytest.mark.parametrize("what", ["evaluation", "log", "observer", "loss"])
def test_the_state_is_saved_after_any_error(what: str) -> None:
    setup = tiny_setup(
        TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=2, eval_steps=5, eval_on_start=False)
    )
    calls = {"n": 0}

    def fail(*args: object) -> list[dict[str, object]]:
        raise DataError("it broke", "mend it")

    if what == "evaluation":
        setup.evaluate = fail
    elif what == "log":
        append = setup.log.append

        def sometimes(record: dict[str, object]) -> None:
            if record.get("step") == 4 and record["kind"] == "train":
                raise DataError("the disk is full", "free some")
            append(record)

        setup.log.append = sometimes  # type: ignore[method-assign]
    elif what == "observer":

        class Broken:
            def record(self, record: dict[str, object]) -> None:
                if record.get("step") == 4:
                    raise DataError("it broke", "mend it")

            def message(self, text: str) -> None: ...

        setup.observers = [Broken()]
    else:
        whole = setup.microstep.loss

        def loss(batch: object) -> LossSum:
            calls["n"] += 1
            if calls["n"] == 18:
                raise RuntimeError("a kernel failed")
            return whole(batch)

        setup.microstep.loss = loss
    with pytest.raises((DataError, RuntimeError)):
        train(setup, TrainState())
    step = max(setup.store.saved)
    assert step == (5 if what == "evaluation" else 4)
    clean = tiny_setup(TinyLoader(), total_steps=step)
    train(clean, TrainState())
    for name, tensor in clean.tensors().items():
        assert torch.equal(setup.store.saved[step][0][name], tensor), name
    assert setup.store.saved[step][1]["loader"] == {"step": step}
    logged = [r["step"] for r in setup.log.records if r["kind"] == "train"]
    assert logged == sorted(set(logged))


def test_a_failing_observer_does_not_stop_training() -> None:
    class Gone:
        def record(self, record: dict[str, object]) -> None:
            raise BrokenPipeError

        def message(self, text: str) -> None: ...

    setup = tiny_setup(TinyLoader(), observers=[Gone()])
    assert train(setup, TrainState()).status == "finished"


def test_a_failed_update_is_not_saved() -> None:
    setup = tiny_setup(TinyLoader(), total_steps=4)
    step = setup.optimizer.step

    def fails(**arguments: object) -> None:
        step(**arguments)  # type: ignore[arg-type]
        if setup.optimizer.steps == 3:
            raise RuntimeError("half of the weights are new")

    setup.optimizer.step = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError):
        train(setup, TrainState())
    assert not setup.store.saved
