"""Callbacks from Python: arguments and order of calls, stopping, exceptions, and unchanged losses."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from api_world import TEXTS, quiet, tiny_recipe

import trimtab


class RecordingCallback(trimtab.Callback):
    """Records every call, and modifies its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_train_begin(self, control: Any) -> None:
        self.calls.append(("begin", control.step, control.total_steps))

    def on_step_end(self, control: Any) -> None:
        self.calls.append(("step", control.step))

    def on_log(self, record: dict[str, Any], control: Any) -> None:
        self.calls.append(("log", record["step"], record["loss"]))
        record["loss"] = -1.0

    def on_eval(self, record: dict[str, Any], control: Any) -> None:
        self.calls.append(("eval", record["step"], record["name"]))

    def on_save(self, path: Path, control: Any) -> None:
        assert (path / "manifest.json").is_file()
        self.calls.append(("save", path.name))

    def on_train_end(self, control: Any) -> None:
        self.calls.append(("end", control.step))


def test_callback_arguments_and_unchanged_losses(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, logging_steps=2, eval_steps=2, save_steps=2)
    plain = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=4, output_dir=str(tmp_path / "plain"))
    noting = RecordingCallback()
    run = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=4, callbacks=[noting])
    assert run.losses == plain.losses
    assert run.evaluations == plain.evaluations
    logs = [("log", step, loss) for step, loss in enumerate(run.losses, 1)]
    assert noting.calls == [
        ("begin", 0, 4),
        ("eval", 0, "domain"),
        ("step", 1),
        *logs[:2],
        ("eval", 2, "domain"),
        ("save", "step-00000002"),
        ("step", 2),
        ("step", 3),
        *logs[2:],
        ("eval", 4, "domain"),
        ("save", "step-00000004"),
        ("step", 4),
        ("end", 4),
    ]


class StopAtTwo:
    """Not a subclass: any object with one of the methods is accepted."""

    def on_step_end(self, control: Any) -> None:
        if control.step == 2:
            control.stop("two are enough")


def test_a_stopped_run_is_saved_and_resumed_exactly(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    whole = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=5, output_dir=str(tmp_path / "whole"))
    noting = RecordingCallback()
    run = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=5, callbacks=[StopAtTwo(), noting])
    assert (run.status, run.step, run.losses) == ("stopped", 2, whole.losses[:2])
    assert run.reason == "two are enough"
    assert noting.calls[-2:] == [("save", "step-00000002"), ("end", 2)]
    assert run.data().of("event")[-1]["message"] == "stopped by a callback: two are enough"
    assert run.model().opened.step == 2
    again = RecordingCallback()
    (run.folder / "recipe.yaml").unlink()  # choices.json has it too
    assert trimtab.resume(run.folder, view=quiet(), callbacks=[again]).losses == whole.losses
    assert again.calls[0] == ("begin", 2, 5)


@pytest.mark.parametrize("hook", ["on_train_begin", "on_eval"])
def test_a_run_stopped_before_its_first_step_trains_nothing(tmp_path: Path, hook: str) -> None:
    recipe = tiny_recipe(tmp_path, eval_steps=2)
    whole = trimtab.train(recipe, data=TEXTS, view=quiet(), output_dir=str(tmp_path / "whole"))
    stop = type("Stop", (), {hook: staticmethod(lambda *given: given[-1].stop(None))})()
    run = trimtab.train(recipe, data=TEXTS, view=quiet(), callbacks=[stop])
    assert (run.status, run.step, run.losses, run.reason) == ("stopped", 0, [], None)
    assert run.data().of("event")[-1]["message"] == "stopped by a callback: no reason given"
    again = trimtab.resume(run.folder, view=quiet())
    assert (again.losses, again.evaluations) == (whole.losses, whole.evaluations)


@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_log", "on_eval", "on_save", "on_step_end", "on_train_end"]
)
def test_exceptions_of_callbacks_are_propagated(tmp_path: Path, hook: str) -> None:
    recipe = tiny_recipe(tmp_path, max_steps=2, save_steps=1)

    def fails(*told: Any) -> None:
        if told[-1].step > 0 or hook == "on_train_begin":
            raise LookupError("mine")

    callback = type("Failing", (), {hook: staticmethod(fails)})()
    with pytest.raises(LookupError, match="mine") as raised:
        trimtab.train(recipe, data=TEXTS, view=quiet(), callbacks=[callback])
    assert raised.value.__cause__ is None
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "fails"
    if hook == "on_train_begin":
        assert not (tmp_path / "run").exists()  # nothing was trained
    else:
        done = trimtab.resume(tmp_path / "run", view=quiet())
        assert (done.status, len(done.losses)) == ("finished", 2)


def test_a_raised_exception_does_not_lose_a_step(tmp_path: Path) -> None:
    """Between two saves: the saved state is the one that the callback saw."""
    recipe = tiny_recipe(tmp_path, save_steps=100)
    whole = trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=5, output_dir=str(tmp_path / "whole"))

    class Failing(trimtab.Callback):
        def on_step_end(self, control: Any) -> None:
            if control.step == 3:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trimtab.train(recipe, data=TEXTS, view=quiet(), max_steps=5, callbacks=[Failing()])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert trimtab.resume(tmp_path / "run", view=quiet()).losses == whole.losses


def misspelt(name: str) -> Any:
    return type("Misspelt", (trimtab.Callback,), {name: lambda self, record, control: None})()


def test_callbacks_may_be_none(tmp_path: Path) -> None:
    run = trimtab.train(tiny_recipe(tmp_path, max_steps=1), data=TEXTS, view=quiet(), callbacks=None)
    assert trimtab.resume(run.folder, view=quiet(), max_steps=2, callbacks=None).step == 2


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (RecordingCallback(), "callbacks is a RecordingCallback, not a list"),
        (5, "callbacks is an int, not a list"),
        ([5], "callbacks[0] is an int without callback methods"),
        (
            [RecordingCallback],
            "callbacks[0] is the class RecordingCallback; pass an instance: RecordingCallback()",
        ),
        (
            [RecordingCallback(), print],
            "callbacks[1] is a builtin_function_or_method without callback methods",
        ),
        (
            [misspelt("on_logs")],
            "callbacks[0] has a method on_logs, which is never called; did you mean on_log?",
        ),
        (
            [type("Short", (), {"on_log": lambda self, record: None})()],
            "callbacks[0].on_log cannot be called with (record, control): too many positional arguments; "
            "define it as on_log(self, record, control)",
        ),
        (
            [misspelt("on_step_end")],
            "missing a required argument: 'control'; define it as on_step_end(self, c",
        ),
        ([misspelt("on_epoch_begin")], "on_epoch_begin, which is never called; use one of on_train_begin, "),
    ],
)
def test_invalid_callbacks_are_refused(tmp_path: Path, callbacks: Any, said: str) -> None:
    with pytest.raises(trimtab.TrimtabError) as raised:
        trimtab.train(tiny_recipe(tmp_path), data=TEXTS, view=quiet(), callbacks=callbacks)
    assert said in str(raised.value)
