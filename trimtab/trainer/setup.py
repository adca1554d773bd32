"""The inputs of the loop: plain data and a few callables, so that a test can pass something tiny."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trimtab.facts.phases import During, no_phase
from trimtab.parallel import Mesh
from trimtab.trainer.callbacks import Callbacks
from trimtab.trainer.early_stopping import EarlyStopping
from trimtab.trainer.measured import Measured
from trimtab.trainer.microstep import MicroStep


class Batch(Protocol):
    """The part of a microbatch that the loop reads; the loss callable reads the rest."""

    num_targets: int
    origins: list[list[str]]


class Loader(Protocol):
    """Yields the microbatches of each step; its position can be saved and restored."""

    def next_step(self) -> Sequence[Any]: ...
    def position(self) -> dict[str, Any]: ...
    def restore(self, position: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Optimizer(Protocol):
    """An optimizer whose state is named tensors and a few scalars."""

    def step(self, *, lr: float, grad_scale: torch.Tensor, skip: torch.Tensor) -> None: ...
    def tensors(self) -> dict[str, torch.Tensor]: ...
    def scalars(self) -> dict[str, Any]: ...
    def restore_scalars(self, scalars: dict[str, Any]) -> None: ...


class OptimizerInBackward(Protocol):
    """An optimizer's step inside the backward pass."""

    def begin(self, *, lr: float, skip: torch.Tensor) -> None: ...
    def norm(self) -> torch.Tensor: ...
    def paused(self) -> AbstractContextManager[None]: ...


class CheckpointStore(Protocol):
    """Saves checkpoints."""

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        scalars: dict[str, Any],
        *,
        tags: Any = (),
        wait: bool = False,
    ) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Log(Protocol):
    """Appends metrics records to a file, one per line."""

    def append(self, record: dict[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Compiled(Protocol):
    """A model with compiled parts."""

    def compilations(self) -> tuple[int, float]: ...
    def paused(self) -> AbstractContextManager[None]: ...


class Observer(Protocol):
    """An observer of the run: the terminal, TensorBoard, a test."""

    def record(self, record: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...


@dataclass(frozen=True)
class Cadence:
    """Intervals of logging, evaluation and checkpoints in optimizer steps; 0 means only at the end."""

    total_steps: int
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    eval_on_start: bool = True

    def due(self, every: int, step: int) -> bool:
        """Whether an action with an interval of `every` steps is due after this step."""
        return step == self.total_steps or (every > 0 and step % every == 0)


@dataclass
class TrainState:
    """The progress of a run; all fields go into a checkpoint's scalars."""

    step: int = 0
    tokens: int = 0
    best: float | None = None
    seconds: float = 0.0
    measured: int = -1
    """The last step with a finished evaluation, or -1."""
    stale: int = 0
    """Evaluations in a row that did not improve, for early stopping."""
    ended: int = -1
    """The step at which early stopping ended the run and its final records were written, or -1."""


@dataclass
class Outcome:
    """How a run ended."""

    status: str
    """`finished`, `interrupted` after a signal, or `stopped` by a callback (the state is saved)."""
    state: TrainState
    signal: int | None = None
    reason: str | None = None
    """Why a run ended before its last step (early stopping, or a callback's reason), or None."""


@dataclass
class TrainingSetup:
    """The arguments of the training loop."""

    model: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    """The trainable parameters, by name; the model may have others."""
    microstep: MicroStep
    """Forward and backward of a microbatch."""
    optimizer: Optimizer
    learning_rate: Callable[[int], float]
    """Maps a step (from 0) to its learning rate."""
    global_norm: Callable[[Any], torch.Tensor]
    """Maps parameters to their global gradient norm, on the device."""
    clip_factor: Callable[[torch.Tensor], torch.Tensor]
    """Maps that norm to the factor by which gradients are multiplied, on the device."""
    loader: Loader
    store: CheckpointStore
    log: Log
    mesh: Mesh
    cadence: Cadence
    device: torch.device
    evaluate: Callable[[int], list[dict[str, Any]]] | None = None
    """Maps a step to metric records; the record named `best_of` with kind `eval` decides the best checkpoint."""
    best_of: str | None = None
    evaluate_end: Callable[[int], list[dict[str, Any]]] | None = None
    """Maps a step to the final records (completions, exact answers) of a run that early stopping ends; at the last step
    `evaluate` returns them itself."""
    early_stopping: EarlyStopping | None = None
    """Decides when the score of `best_of` ends the run; None trains to the last step."""
    loss_scale: float | None = None
    """The first loss scale for fp16; None trains without one."""
    in_backward: OptimizerInBackward | None = None
    """If set, the backward pass updates the weights itself and leaves no gradients."""
    compiled: Compiled | None = None
    """If the model is compiled: (number, seconds) of compilations in this process, and how to pause compiled code."""
    observers: Sequence[Observer] = field(default_factory=list)
    before_microbatch: Callable[[int, int, Any], None] | None = None
    """Called with the step (from 0), the index of the microbatch in it, and the microbatch: random numbers in
    the model depend only on them."""
    after_step: Callable[[int], None] | None = None
    """Called with the finished step, for demonstrations and tests."""
    callbacks: Callbacks | None = None
    """The user's callbacks, called between steps."""
    on_measured: Callable[[Measured], None] | None = None
    """Called with the measurements once steps are representative, and at the end."""
    workspace_bytes: Callable[[], int] = lambda: 0
    """Bytes of buffers that stay allocated between steps and are neither weights, gradients nor optimizer states."""
    during: During = no_phase
    """Called with each phase of a step and of the run; the context manager that it returns explains out-of-memory
    errors raised inside."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint, by name."""
        named = {f"parameters.{name}": p.detach() for name, p in self.parameters.items()}
        named.update({f"optimizer.{name}": t for name, t in self.optimizer.tensors().items()})
        return named
