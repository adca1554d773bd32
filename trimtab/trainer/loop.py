"""The training loop: steps, metrics, evaluation, checkpoints; the same for a CPU, a GPU and a mesh.

Losses, gradient norms and the non-finite flag remain on the device and are read together every `logging_steps`.
Whatever stops the loop (a signal, a non-finite step, missing data), the last good state is saved first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch

from trimtab.facts.errors import OutOfMemory, TrainingError, TrimtabError, release_frames
from trimtab.facts.phases import RunPhase
from trimtab.trainer.early_stopping import is_better
from trimtab.trainer.guards import FiniteGuard, locate_non_finite, non_finite_remedy
from trimtab.trainer.measured import Stopwatch
from trimtab.trainer.memory import StepMeter, persistent_bytes, process_bytes, process_memory
from trimtab.trainer.scaling import LossScaler
from trimtab.trainer.setup import Outcome, TrainingSetup, TrainState
from trimtab.trainer.signals import StopSignals
from trimtab.trainer.step import forward_backward

MEASURED_STEP = 1
"""Index of the step whose memory is measured, from the start or resume: step 0 also allocates one-time buffers."""

CALLBACK_STOP = 1 << 20
"""Encodes a callback's stop request in a sum over processes; larger than any number of processes."""


def train(setup: TrainingSetup, state: TrainState, scaler: LossScaler | None = None) -> Outcome:
    """Runs `setup` from `state` to its last step, or to the step at which early stopping ends it.

    Returns how it ended: finished, or interrupted by a signal or stopped by a callback with everything saved.
    """
    return _Loop(setup, state, scaler).run()


class _Loop:
    def __init__(self, setup: TrainingSetup, state: TrainState, scaler: LossScaler | None) -> None:
        self.setup = setup
        self.state = state
        self.scaler = scaler or (LossScaler(setup.loss_scale) if setup.loss_scale else None)
        self.guard = FiniteGuard(setup.device)
        self.pending: list[dict[str, Any]] = []
        self.clock = time.perf_counter()
        self.stopwatch = Stopwatch(state.step)
        self.reported_measurements = False
        self.saved_step = state.step
        self.session_steps = 0
        self.observers = list(setup.observers)
        self.callbacks = setup.callbacks if setup.mesh.is_main else None
        self.position = setup.loader.position()
        """Data position after the last complete step, for checkpoints; the loader may be ahead of it."""
        self.updating = False
        """While weights and optimizer states are being updated, they belong to no step and are not saved."""

    def run(self) -> Outcome:
        setup, state, cadence = self.setup, self.state, self.setup.cadence
        self.memory_record("before", persistent_bytes(setup))
        with StopSignals() as signals, self.saving_on_error():
            if self.callbacks is not None:
                self.callbacks.begin(state.step)
            if self.stops_before_training():
                return self.stopped(signals.received, by_callback=True)
            self.begin()
            if self.callbacks is not None:
                self.callbacks.deliver()
            self.clock = time.perf_counter()
            if self.stops_early():
                return self.stopped_early(set())
            if self.stops_before_training():
                return self.stopped(signals.received, by_callback=True)
            while state.step < cadence.total_steps:
                self.step()
                if self.session_steps == 1:
                    self.first_step_done()
                if cadence.due(cadence.logging_steps, state.step):
                    self.flush()
                evaluates = cadence.due(cadence.eval_steps, state.step)
                improved = evaluates and self.evaluate()
                last = state.step == cadence.total_steps
                tags = {"best"} if improved else set[str]()
                if evaluates and self.stops_early():
                    return self.stopped_early(tags)
                if improved or cadence.due(cadence.save_steps, state.step):
                    self.save(tags, wait=last)
                if setup.after_step:
                    setup.after_step(state.step)
                self.run_callbacks()
                requests = (
                    0
                    if last
                    else setup.mesh.sum_int(_stop_requests(signals.received is not None, self.stop_requested))
                )
                if requests:
                    return self.stopped(signals.received, by_callback=requests % CALLBACK_STOP == 0)
        return self.finished()

    def finished(self, reason: str | None = None) -> Outcome:
        """Writes the last records of a run whose state is saved."""
        setup = self.setup
        with setup.during(RunPhase.CHECKPOINT):
            setup.store.wait()
        self.report_measurements()
        self.memory_record("after", persistent_bytes(setup))
        self.compile_record(None)
        setup.log.sync()
        if self.callbacks is not None:
            self.callbacks.end()
        return Outcome("finished", self.state, reason=reason)

    def stops_early(self) -> bool:
        """Whether early stopping ends the run here; all processes of a mesh make the same decision."""
        setup, state = self.setup, self.state
        if setup.early_stopping is None or state.step >= setup.cadence.total_steps:
            return False
        return bool(setup.mesh.sum_int(int(setup.early_stopping.reached(state.stale))))

    def stopped_early(self, tags: set[str]) -> Outcome:
        """Writes the final records and saves; a run resumed after its early stop only reports that again."""
        setup, state = self.setup, self.state
        assert setup.early_stopping is not None
        reason = setup.early_stopping.reason(setup.best_of, state.stale, state.best)
        if state.ended == state.step:
            message = (
                f"stopped early at step {state.step}: {reason}; to continue training, "
                "raise early_stopping_patience"
            )
            self.report({"kind": "event", "step": state.step, "message": message})
            return Outcome("finished", state, reason=reason)
        with setup.during(RunPhase.EVALUATION):
            for record in setup.evaluate_end(state.step) if setup.evaluate_end else []:
                self.emit(record)
        message = f"stopped early at step {state.step} of {setup.cadence.total_steps}: {reason}"
        self.emit({"kind": "event", "step": state.step, "message": message})
        state.ended = state.step
        setup.log.sync()
        self.publish(tags, wait=True)
        if setup.after_step and self.session_steps:
            setup.after_step(state.step)
        if self.session_steps:
            self.run_callbacks()
        return self.finished(reason)

    @property
    def stop_requested(self) -> bool:
        return self.callbacks is not None and self.callbacks.stopping

    def stops_before_training(self) -> bool:
        """Whether a callback stopped the run before its first step; all processes of a mesh agree."""
        if self.state.step >= self.setup.cadence.total_steps:
            return False
        return bool(self.setup.mesh.sum_int(int(self.stop_requested)))

    def run_callbacks(self) -> None:
        """Calls the user's callbacks, which may stop the run or raise; the step itself is complete."""
        if self.callbacks is None:
            return
        began = time.perf_counter()
        if self.callbacks.saves_pending:
            self.setup.store.wait()
        self.callbacks.step_done(self.state.step)
        self.clock += time.perf_counter() - began  # callback time does not count as training time

    def begin(self) -> None:
        """Evaluates a new run's state, or a state that was saved because its evaluation failed."""
        state, cadence = self.state, self.setup.cadence
        if state.step == 0:
            if cadence.eval_on_start and state.measured < 0:
                self.evaluate()
        elif state.measured < state.step and cadence.due(cadence.eval_steps, state.step):
            self.publish({"best"} if self.evaluate() else set(), wait=True)

    @contextmanager
    def saving_on_error(self) -> Iterator[None]:
        """Saves the training state before an error propagates out of the loop."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemory):
                release_frames(error)  # saving needs memory too
            unsaved = self.state.step > self.saved_step and not self.updating
            # The log itself may have failed; saving the weights is more important than its records.
            with suppress(TrimtabError, OSError):
                if unsaved:
                    self.flush()
                self.report_measurements()
            if unsaved:
                self.publish(set(), wait=True)
            raise

    def step(self) -> None:
        setup, state = self.setup, self.state
        before = setup.optimizer.scalars()
        with setup.during(RunPhase.DATA):
            microbatches = setup.loader.next_step()
        num_targets = setup.mesh.sum_int(sum(b.num_targets for b in microbatches))
        if num_targets == 0:
            origin = next((o for b in microbatches for sequence in b.origins for o in sequence), "unknown")
            raise TrainingError(
                f"step {state.step + 1} has no target tokens (first document: {origin})",
                "check that labels are not all masked and documents have at least two tokens",
            )
        lr = setup.learning_rate(state.step)
        # On a CPU the meter sees individual operations; a compiled graph does not show any.
        visible = setup.compiled is None or setup.device.type == "cuda"
        measures_memory = visible and self.session_steps == MEASURED_STEP
        with StepMeter(setup) if measures_memory else nullcontext() as meter:
            self.updating = setup.in_backward is not None
            with setup.during(RunPhase.FORWARD):
                loss = forward_backward(
                    setup,
                    microbatches,
                    num_targets,
                    self.scaler.scale if self.scaler else 1.0,
                    self.before_backward(lr),
                    step=state.step,
                )
            if meter is not None:
                meter.backward_done()
            self.updating = True
            with setup.during(RunPhase.OPTIMIZER_STEP):
                norm = self.update(loss, lr)
        state.step += 1
        state.tokens += num_targets
        self.updating = False
        position, self.position = self.position, setup.loader.position()
        self.session_steps += 1
        self.pending.append(
            {
                "step": state.step,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "tokens": state.tokens,
                "num_targets": num_targets,
                "position": position,
                "optimizer": before,
            }
        )
        if meter is not None:  # writing may fail, so only after the step is counted
            self.stopwatch.buckets = dict(meter.buckets)
            self.flush()  # records stay in the order of their steps
            self.memory_record("peak", meter.buckets)

    def first_step_done(self) -> None:
        """Reports how long the first step took: it includes compilation and first allocations."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        self.compile_record(time.perf_counter() - self.clock)

    def compile_record(self, first_step: float | None) -> None:
        if self.setup.compiled is None:
            return
        count, seconds = self.setup.compiled.compilations()
        record = {"kind": "compile", "step": self.state.step, "count": count, "seconds": seconds}
        self.emit(record if first_step is None else {**record, "first_step_seconds": first_step})

    def before_backward(self, lr: float) -> Callable[[torch.Tensor], None] | None:
        """Returns a hook that passes the learning rate and the finite check to an optimizer step in backward."""
        steps = self.setup.in_backward
        if steps is None:
            return None
        return lambda loss: steps.begin(lr=lr, skip=self.guard.observe(self.state.step, loss, loss))

    def update(self, loss: torch.Tensor, lr: float) -> torch.Tensor:
        """Clip and step; returns the gradient's norm before clipping."""
        setup = self.setup
        if setup.in_backward is not None:  # the weights are updated already; a non-finite norm ends the run
            norm = setup.in_backward.norm()
            self.guard.observe(self.state.step, loss, norm)
            return norm
        norm = setup.global_norm(setup.parameters.values())
        inverse = 1.0
        if self.scaler is not None:
            inverse = 1.0 / self.scaler.scale
            norm = norm * inverse
            overflowed = bool(torch.isfinite(loss)) and not bool(torch.isfinite(norm))
            exhausted = overflowed and self.scaler.exhausted
            self.scaler.update(overflowed)
            if overflowed and not exhausted:
                # Expected in fp16 now and then: this step is skipped, and the next one uses a lower scale.
                self.clear_gradients()
                return norm
        skip = self.guard.observe(self.state.step, loss, norm)
        setup.optimizer.step(lr=lr, grad_scale=setup.clip_factor(norm) * inverse, skip=skip)
        self.clear_gradients()
        return norm

    def clear_gradients(self) -> None:
        for parameter in self.setup.parameters.values():
            parameter.grad = None

    def flush(self) -> None:
        """Reads the pending losses and norms from the device, checks them, writes one record per step."""
        if not self.pending:
            return
        bad = self.guard.first_bad()
        rows = torch.stack([torch.stack([p["loss"], p["grad_norm"]]) for p in self.pending]).tolist()
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        self.stopwatch.interval(elapsed, len(self.pending), one_time=self.one_time_work())
        rate = sum(p["num_targets"] for p in self.pending) / max(elapsed, 1e-9)
        before = self.state.seconds
        self.state.seconds += elapsed
        memory = self.memory_now()
        for number, (loss, norm) in enumerate(rows, 1):
            entry = self.pending[0]
            if bad is not None and entry["step"] - 1 >= bad:
                self.stop_before(entry)
            record = {
                "kind": "train",
                "step": entry["step"],
                "loss": loss,
                "lr": entry["lr"],
                "grad_norm": norm,
                "tokens": entry["tokens"],
                "tokens_per_second": float(f"{rate:.6g}"),
                "seconds": round(before + elapsed * number / len(rows), 3),
                "memory_bytes": memory,
            }
            self.write(record)
            del self.pending[0]  # between log and observers: no record is lost or written twice
            self.report(record)
            self.queue_event("on_log", record)
        if self.stopwatch.warm and not self.reported_measurements:
            self.report_measurements()

    def one_time_work(self) -> tuple[int, int]:
        """(CUDA graphs captured, graphs compiled) so far."""
        compiled = self.setup.compiled
        return self.setup.microstep.captures, 0 if compiled is None else compiled.compilations()[0]

    def report_measurements(self) -> None:
        """Passes on the measurements of this session; does nothing before its first step."""
        setup = self.setup
        trained = self.state.step > self.stopwatch.first_step  # a non-finite step does not count
        if setup.on_measured is None or not setup.mesh.is_main or not trained:
            return
        self.reported_measurements, began = True, time.perf_counter()
        setup.on_measured(self.stopwatch.measured(self.state.step, **process_memory(setup.device)))
        self.clock += time.perf_counter() - began

    def queue_event(self, hook: str, subject: Any) -> None:
        """Queues an event for the callbacks, which receive it when the step is complete."""
        if self.callbacks is not None:
            self.callbacks.queue(hook, subject)

    def stop_before(self, entry: dict[str, Any]) -> NoReturn:
        """Saves a checkpoint of the state before the non-finite step, then raises an error with the location."""
        setup, state = self.setup, self.state
        setup.loader.restore(entry["position"])
        setup.optimizer.restore_scalars(entry["optimizer"])
        self.position, self.guard, self.pending = entry["position"], FiniteGuard(setup.device), []
        state.step, state.tokens = entry["step"] - 1, entry["tokens"] - entry["num_targets"]
        saved = "no step was finished, so nothing needed saving"
        if state.step > 0:
            self.publish(set(), wait=True)
            saved = f"the state before it is saved as step {state.step}"
            if setup.in_backward is not None:
                saved += (
                    ", including updates that the backward pass made before the first non-finite gradient"
                )
        self.saved_step = state.step
        setup.microstep.release()
        location = locate_non_finite(
            setup, setup.loader.next_step(), max(1, entry["num_targets"]), state.step
        )
        where = (
            location or "each microbatch alone is finite, but the accumulated loss or gradient norm is not"
        )
        self.emit(
            {"kind": "event", "step": state.step, "message": f"not finite at step {entry['step']}: {where}"}
        )
        setup.log.sync()
        raise TrainingError(
            f"the loss or its gradient is not finite at step {entry['step']}: {where}; {saved}",
            non_finite_remedy(setup, state.step, documents=location is not None),
        )

    def evaluate(self) -> bool:
        """Runs the evaluation callable; True if the score that decides the best checkpoint improved."""
        setup, state = self.setup, self.state
        self.flush()
        if setup.evaluate is None:
            return False
        setup.microstep.release()  # evaluation memory must not add to a step's memory
        records, began = [], time.perf_counter()
        with setup.during(RunPhase.EVALUATION):
            for record in setup.evaluate(state.step):
                self.report(record)
                records.append(record)
        self.stopwatch.evaluated(time.perf_counter() - began)
        improved = False
        for record in records:  # all or nothing: a failed evaluation is repeated when the run resumes
            self.write(record)
            if record["kind"] == "eval":
                self.queue_event("on_eval", record)
            if record["kind"] == "eval" and record["name"] == setup.best_of:
                improved = self.score(record["loss"])
        state.measured = state.step
        self.restart_clock()
        return improved and state.step > 0

    def score(self, loss: float) -> bool:
        """Updates best checkpoint and early stopping with a loss; returns True if it is the lowest so far."""
        state, stopping = self.state, self.setup.early_stopping
        if state.step > 0:  # counted in every run: a resume may turn early stopping on
            threshold = 0.0 if stopping is None else stopping.threshold
            state.stale = 0 if is_better(loss, state.best, threshold) else state.stale + 1
        improved = is_better(loss, state.best)
        if improved:
            state.best = loss
        return improved

    def save(self, tags: set[str], *, wait: bool) -> None:
        """Saves a checkpoint of the current state after syncing the log to disk."""
        self.flush()
        self.setup.log.sync()
        if self.saved_step == self.state.step and self.state.step and not tags:
            self.setup.store.wait()
            return
        self.publish(tags, wait=wait)
        if wait:
            self.restart_clock()

    def restart_clock(self) -> None:
        """Starts timing the next step now."""
        self.clock, self.stopwatch.excluded = time.perf_counter(), 0.0

    def publish(self, tags: set[str], *, wait: bool) -> None:
        """Passes the state after the last complete step to the store."""
        setup, state = self.setup, self.state
        scalars = {
            "state": vars(state).copy(),
            "loader": self.position,
            "optimizer": setup.optimizer.scalars(),
            "scaler": self.scaler.to_dict() if self.scaler else None,
        }
        began = time.perf_counter()
        with setup.during(RunPhase.CHECKPOINT):
            setup.store.save(state.step, setup.tensors(), scalars, tags=tags, wait=wait)
        self.stopwatch.saved(time.perf_counter() - began, written=wait)
        self.saved_step = state.step
        self.queue_event("on_save", state.step)

    def stopped(self, signal: int | None, *, by_callback: bool) -> Outcome:
        """Saves everything, even before the first step, so that the run can be resumed."""
        self.flush()
        self.save(set(), wait=True)
        self.setup.store.wait()
        self.report_measurements()
        reason = None
        if by_callback and self.callbacks is not None:
            reason = self.callbacks.control.reason or None
            message = f"stopped by a callback: {reason or 'no reason given'}"
            self.emit({"kind": "event", "step": self.state.step, "message": message})
            self.setup.log.sync()
        if self.callbacks is not None:
            self.callbacks.end()
        return Outcome("stopped" if by_callback else "interrupted", self.state, signal, reason)

    def memory_now(self) -> int:
        if self.setup.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.setup.device))
        return process_bytes()

    def memory_record(self, when: str, buckets: dict[str, int]) -> None:
        self.emit({"kind": "memory", "step": self.state.step, "when": when, **buckets})

    def emit(self, record: dict[str, Any]) -> None:
        self.write(record)
        self.report(record)

    def write(self, record: dict[str, Any]) -> None:
        if self.setup.mesh.is_main:
            self.setup.log.append(record)

    def report(self, record: dict[str, Any]) -> None:
        """Passes a record to the observers; an observer that fails is not called again."""
        for observer in list(self.observers) if self.setup.mesh.is_main else []:
            try:
                observer.record(record)
            except OSError as error:  # a closed terminal, a full disk behind TensorBoard: training continues
                self.observers.remove(observer)
                for remaining in self.observers:
                    remaining.message(f"{type(observer).__name__} failed and gets no more records: {error}")


def _stop_requests(signal: bool, callback: bool) -> int:
    """Encodes both kinds of stop requests in one number to sum over processes; a signal has precedence."""
    return int(signal) + CALLBACK_STOP * int(callback)
