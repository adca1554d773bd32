"""User callbacks, called between optimizer steps. They can watch a run and stop it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import with_article


class Control:
    """A callback's view of the run, which can also stop it."""

    def __init__(self, folder: Path, total_steps: int) -> None:
        self.folder = folder
        """The run folder."""
        self.total_steps = total_steps
        self.step = 0
        """Optimizer steps done."""
        self.reason: str | None = None
        """Why the run should stop. Empty if no reason was given, None while the run continues."""

    def stop(self, reason: str | None = None) -> None:
        """Stop the run after this step. Everything is saved, its status is `stopped`, and it can be resumed.

        If it is called before the first step (in `on_train_begin`, or in `on_eval` of the first evaluation),
        no step is trained.

        Args:
            reason: recorded in metrics.jsonl and returned as `RunResult.reason`.
        """
        self.reason = "" if reason is None else str(reason)


class Callback:
    """Base class of callbacks; override what you need. Callbacks run between steps, after all due writes.

    If a callback raises, the state is saved, the run ends, and `trimtab.train` raises the same exception.

    Example:
        >>> class Patience(Callback):
        ...     def on_eval(self, record, control):
        ...         if record["loss"] < 2.0:
        ...             control.stop("good enough")
    """

    def on_train_begin(self, control: Control) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step_end(self, control: Control) -> None:
        """After each optimizer step; `control.step` is its number."""

    def on_log(self, record: dict[str, Any], control: Control) -> None:
        """Called for each step when it is logged: `step`, `loss`, `lr`, `grad_norm`, `tokens_per_second`, ….

        Losses are read from the device every `logging_steps`, so several steps may be logged at once.
        """

    def on_eval(self, record: dict[str, Any], control: Control) -> None:
        """Called for each evaluation set: `step`, `name` (`domain` or `general`), `loss`, `perplexity`."""

    def on_save(self, path: Path, control: Control) -> None:
        """Called with the checkpoint folder after the checkpoint is completely written."""

    def on_train_end(self, control: Control) -> None:
        """After the last step, or after a stop, when everything is saved."""


HOOKS = ("on_train_begin", "on_step_end", "on_log", "on_eval", "on_save", "on_train_end")


def check_callbacks(callbacks: Sequence[Any] | None) -> Sequence[Any]:
    """Validates callbacks; None means none. Raises RecipeError for an invalid object or method.

    Example:
        >>> check_callbacks(None)
        ()
    """
    if callbacks is None:
        return ()
    remedy = f"pass a list of objects with methods such as on_log (see trimtab.Callback): {', '.join(HOOKS)}"
    if not isinstance(callbacks, list | tuple):
        raise RecipeError(f"callbacks is {with_article(type(callbacks).__name__)}, not a list", remedy)
    for index, callback in enumerate(callbacks):
        if isinstance(callback, type):
            raise RecipeError(
                f"callbacks[{index}] is the class {callback.__name__}",
                f"pass an instance: {callback.__name__}()",
            )
        _refuse_misspelt(callback, index)
        _refuse_uncallable(callback, index)
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise RecipeError(
                f"callbacks[{index}] is {with_article(type(callback).__name__)} without callback methods",
                remedy,
            )
    return callbacks


def _refuse_misspelt(callback: Any, index: int) -> None:
    """Raises RecipeError for a method that begins with `on_` but is never called."""
    for name in dir(callback):
        if name.startswith("on_") and name not in HOOKS and callable(getattr(callback, name, None)):
            near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.7)
            raise RecipeError(
                f"callbacks[{index}] has a method {name}, which is never called",
                f"did you mean {near[0]}? Name your own methods without the prefix on_"
                if near
                else f"use one of {', '.join(HOOKS)}; name your own methods without the prefix on_",
            )


def _refuse_uncallable(callback: Any, index: int) -> None:
    """Raises RecipeError for a method that does not accept the arguments it is called with."""
    for hook in HOOKS:
        method = getattr(callback, hook, None)
        if not callable(method):
            continue
        expected = list(inspect.signature(getattr(Callback, hook)).parameters)
        try:
            signature = inspect.signature(method)
        except ValueError:  # a method written in C may have none
            continue
        try:
            signature.bind(*expected[1:])
        except TypeError as error:
            raise RecipeError(
                f"callbacks[{index}].{hook} cannot be called with ({', '.join(expected[1:])}): {error}",
                f"define it as {hook}({', '.join(expected)})",
            ) from None


class Callbacks:
    """The callbacks of a run. Collects the events of a step; calls the callbacks when the step is complete."""

    def __init__(self, callbacks: Sequence[Any], control: Control, saved: Callable[[int], Path]) -> None:
        self.control = control
        self._callbacks = list(callbacks)
        self._saved = saved
        """Maps a step to the folder of its checkpoint."""
        self._events: list[tuple[str, Any]] = []

    @property
    def stopping(self) -> bool:
        """Whether a callback asked to stop the run."""
        return self.control.reason is not None

    @property
    def handles_saves(self) -> bool:
        """Whether a callback overrides `on_save`, so that the loop must wait for checkpoints."""
        return any(
            callable(hook := getattr(callback, "on_save", None))
            and getattr(hook, "__func__", None) is not Callback.on_save
            for callback in self._callbacks
        )

    @property
    def saves_pending(self) -> bool:
        """Whether the queued events include a checkpoint."""
        return any(hook == "on_save" for hook, _ in self._events)

    def queue(self, hook: str, subject: Any) -> None:
        """Queues an event until the step is complete."""
        if hook != "on_save" or self.handles_saves:
            self._events.append((hook, subject))

    def begin(self, step: int) -> None:
        """Calls `on_train_begin`."""
        self.control.step = step
        self._call("on_train_begin")

    def step_done(self, step: int) -> None:
        """Calls the callbacks for a step and for every event in it."""
        self.control.step = step
        self.deliver()
        self._call("on_step_end")

    def deliver(self) -> None:
        """Calls the callbacks for the queued events."""
        events, self._events = self._events, []
        for hook, subject in events:
            self._call(hook, self._saved(subject) if hook == "on_save" else dict(subject))

    def end(self) -> None:
        """Calls the callbacks at the end of training."""
        self.deliver()
        self._call("on_train_end")

    def _call(self, hook: str, *subject: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if callable(method):
                method(*subject, self.control)
