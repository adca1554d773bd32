"""The loop on a tiny job: accumulation, guards, signals, checkpoints, measured memory."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tiny_job import TinyLoader, TinySGD, tiny_job

from trimtab.facts.errors import DataError, TrainingError
from trimtab.trainer import Cadence, TrainState, train
from trimtab.trainer.memory import LiveBytes, storage_bytes
from trimtab.trainer.microstep import LossSum
from trimtab.trainer.scaling import LossScaler


@pytest.mark.parametrize("accumulation", [1, 2, 16])
def test_the_curve_does_not_depend_on_how_rows_are_spread(accumulation: int) -> None:
    reference, other = tiny_job(TinyLoader(accumulation=4)), tiny_job(TinyLoader(accumulation=accumulation))
    train(reference, TrainState())
    train(other, TrainState())
    torch.testing.assert_close(
        torch.tensor(other.log.losses()), torch.tensor(reference.log.losses()), rtol=1e-6, atol=1e-7
    )
    assert len(set(reference.log.losses())) == 8


def test_every_step_is_logged_whatever_the_logging_cadence() -> None:
    often = tiny_job(TinyLoader())
    seldom = tiny_job(TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=5, eval_on_start=False))
    train(often, TrainState())
    train(seldom, TrainState())
    assert seldom.log.losses() == often.log.losses()


def test_records_are_written_in_the_order_of_their_steps() -> None:
    job = tiny_job(TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=5, eval_on_start=False))
    train(job, TrainState())
    peak = next(r for r in job.log.records if r["kind"] == "memory" and r["when"] == "peak")
    steps = [record["step"] for record in job.log.records if record["kind"] == "train" or record is peak]
    assert steps == sorted(steps)
    assert peak["step"] == 2


def test_a_resumed_state_continues_bit_by_bit() -> None:
    whole = tiny_job(TinyLoader(), cadence=Cadence(total_steps=8, save_steps=3, eval_on_start=False))
    train(whole, TrainState())
    tensors, scalars, _ = whole.store.saved[3]
    resumed = tiny_job(TinyLoader())
    for name, tensor in resumed.tensors().items():
        tensor.copy_(tensors[name])
    resumed.loader.restore(scalars["loader"])
    train(resumed, TrainState(**scalars["state"]))
    assert resumed.log.losses() == whole.log.losses()[3:]


@pytest.mark.parametrize("logging_steps", [1, 3, 8])
def test_a_bad_step_leaves_the_state_before_it(logging_steps: int) -> None:
    clean = tiny_job(TinyLoader(), total_steps=4)
    train(clean, TrainState())
    cadence = Cadence(total_steps=8, logging_steps=logging_steps, eval_on_start=False)
    job = tiny_job(TinyLoader(poison_step=4), cadence=cadence)
    with pytest.raises(TrainingError) as raised:
        train(job, TrainState())
    text = str(raised.value)
    assert "step 5" in text
    assert "microbatch 2 of 4" in text
    assert "doc:4:5" in text
    assert "output of 0" in text
    assert max(job.store.saved) == 4
    for name, tensor in clean.tensors().items():
        assert torch.equal(job.store.saved[4][0][name], tensor), name
    assert job.store.saved[4][1]["loader"] == {"step": 4}
    assert len(job.log.losses()) == 4
    assert any(r["kind"] == "event" for r in job.log.records)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("step", [0, 4])
def test_the_remedy_for_a_bad_step_fits_it(step: int, named: bool, adapters: bool) -> None:
    """Documents only where some are named, an export only where something is saved, and the one that can be done."""
    loader = TinyLoader(poison_step=step if named else None)
    job = tiny_job(loader)
    if not named:  # of all the step's gradients together, not of one
        norm = job.global_norm
        job.global_norm = lambda p: norm(p) * (float("inf") if loader.step == step + 1 else 1.0)
    if adapters:
        job.parameters = {f"{name}.lora_A.default.weight": p for name, p in job.parameters.items()}
        job.optimizer = TinySGD(job.parameters)
    with pytest.raises(TrainingError) as raised:
        train(job, TrainState())
    remedy = raised.value.remedy
    assert remedy is not None
    assert ("doc:" in raised.value.cause) is named
    assert ("look at those documents; " in remedy) is named
    assert ("model.name" in remedy) is (step > 0 and not adapters)
    assert ("lora.adapter" in remedy) is ("trimtab export peft" in remedy) is (step > 0 and adapters)
    assert ("learning_rate" in remedy) is (step > 0)
    assert ("lower lora.lora_alpha" in remedy) is (step == 0 and adapters)


def test_data_that_vanishes_loses_nothing() -> None:
    job = tiny_job(
        TinyLoader(vanish_step=3), cadence=Cadence(total_steps=8, logging_steps=8, eval_on_start=False)
    )
    with pytest.raises(DataError):
        train(job, TrainState())
    assert max(job.store.saved) == 3
    assert len(job.log.losses()) == 3


def test_a_step_without_targets_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no token to learn from"):
        train(tiny_job(TinyLoader(masked_step=2)), TrainState())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number: int) -> None:
    def after_step(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    job = tiny_job(TinyLoader(), after_step=after_step)
    outcome = train(job, TrainState())
    assert (outcome.status, outcome.signal, outcome.state.step) == ("interrupted", number, 3)
    assert max(job.store.saved) == 3
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

    job = tiny_job(
        TinyLoader(), cadence=Cadence(total_steps=8, eval_steps=2), evaluate=evaluate, best_of="domain"
    )
    outcome = train(job, TrainState())
    assert {s for s, (_, _, tags) in job.store.saved.items() if "best" in tags} == {2, 6}
    assert outcome.state.best == 1.0


def test_fp16_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    job = tiny_job(TinyLoader())
    scaler = LossScaler(scale=2.0**127)
    train(job, TrainState(), scaler)
    assert scaler.scale < 2.0**127
    assert job.optimizer.steps < 8
    assert all(torch.isfinite(p).all() for p in job.parameters.values())


def test_scaling_does_not_change_the_curve() -> None:
    plain, scaled = tiny_job(TinyLoader()), tiny_job(TinyLoader(), loss_scale=1024.0)
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


def test_measured_buckets_are_the_tensors_own_sizes() -> None:
    job = tiny_job(TinyLoader(accumulation=1))
    train(job, TrainState())
    (peak,) = [r for r in job.log.records if r["kind"] == "memory" and r["when"] == "peak"]
    size = storage_bytes(job.parameters.values())
    assert peak["weights"] == peak["gradients"] == peak["optimizer"] == size
    assert 0 < peak["activations"] < 20_000


@pytest.mark.parametrize("what", ["evaluation", "log", "observer", "loss"])
def test_whatever_stops_the_loop_the_state_is_saved(what: str) -> None:
    job = tiny_job(
        TinyLoader(), cadence=Cadence(total_steps=8, logging_steps=2, eval_steps=5, eval_on_start=False)
    )
    calls = {"n": 0}

    def fail(*args: object) -> list[dict[str, object]]:
        raise DataError("it broke", "mend it")

    if what == "evaluation":
        job.evaluate = fail
    elif what == "log":
        append = job.log.append

        def sometimes(record: dict[str, object]) -> None:
            if record.get("step") == 4 and record["kind"] == "train":
                raise DataError("the disk is full", "free some")
            append(record)

        job.log.append = sometimes  # type: ignore[method-assign]
    elif what == "observer":

        class Broken:
            def record(self, record: dict[str, object]) -> None:
                if record.get("step") == 4:
                    raise DataError("it broke", "mend it")

            def message(self, text: str) -> None: ...

        job.observers = [Broken()]
    else:
        whole = job.microstep.loss

        def loss(batch: object) -> LossSum:
            calls["n"] += 1
            if calls["n"] == 18:
                raise RuntimeError("a kernel failed")
            return whole(batch)

        job.microstep.loss = loss
    with pytest.raises((DataError, RuntimeError)):
        train(job, TrainState())
    step = max(job.store.saved)
    assert step == (5 if what == "evaluation" else 4)
    clean = tiny_job(TinyLoader(), total_steps=step)
    train(clean, TrainState())
    for name, tensor in clean.tensors().items():
        assert torch.equal(job.store.saved[step][0][name], tensor), name
    assert job.store.saved[step][1]["loader"] == {"step": step}
    logged = [r["step"] for r in job.log.records if r["kind"] == "train"]
    assert logged == sorted(set(logged))


def test_an_unreachable_observer_does_not_stop_training() -> None:
    class Gone:
        def record(self, record: dict[str, object]) -> None:
            raise BrokenPipeError

        def message(self, text: str) -> None: ...

    job = tiny_job(TinyLoader(), observers=[Gone()])
    assert train(job, TrainState()).status == "finished"


def test_a_failed_update_is_not_saved() -> None:
    job = tiny_job(TinyLoader(), total_steps=4)
    step = job.optimizer.step

    def fails(**arguments: object) -> None:
        step(**arguments)  # type: ignore[arg-type]
        if job.optimizer.steps == 3:
            raise RuntimeError("half of the weights are new")

    job.optimizer.step = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError):
        train(job, TrainState())
    assert not job.store.saved
