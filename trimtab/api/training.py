"""Training and resuming from Python. The command line calls the same functions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.model import Model
from trimtab.api.results import RunResult
from trimtab.api.rows import DataArgument
from trimtab.facts.arguments import plain_value
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import described, path_of
from trimtab.trainer.callbacks import check_callbacks

if TYPE_CHECKING:
    from trimtab.recipe import Recipe
    from trimtab.report import LiveView
    from trimtab.run.lifecycle import FinishedRun


def train(
    recipe: str | Path | dict[str, Any] | None = None,
    *,
    data: Any = None,
    data_key: str | None = None,
    model: str | Path | dict[str, Any] | Model | None = None,
    callbacks: Sequence[Any] | None = None,
    view: LiveView | None = None,
    explain_memory: bool = False,
    **keys: Any,
) -> RunResult:
    """Trains with a recipe: a path to a YAML file, the recipe as a dict, or its keys as keyword arguments.

    Args:
        recipe: a YAML file or a dict; None if all keys are passed as keyword arguments.
        data: rows to train on: a list or an iterator of texts, of conversations (lists of messages) or of dicts by
            column, a `datasets.Dataset`, a DataFrame, or a function that returns an iterator; the name of a source, as
            in a recipe; or a mapping like the recipe's `data`, in which any source may be rows:
            `{"train": rows, "eval": rows}`.
        data_key: a name under which the rows are cached. Rows that are cached under it are not read again.
        model: the `model` of the recipe, or a loaded `Model`, from whose weights the run starts.
        callbacks: objects with methods such as `on_log` (`trimtab.Callback`).
        view: shows the run; by default on the terminal.
        explain_memory: record the source line of every tensor allocation for the out-of-memory report; steps are
            slower.
        keys: keys of the recipe to override.

    Returns:
        The run, even if it ended early and was saved: `status` is "finished", "stopped" (by a callback) or
        "interrupted". SIGINT (Ctrl-C) and SIGTERM end the training after the current step without an exception, and
        the program continues after this call: check `run.status` before using the model.

    Example:
        >>> run = trimtab.train("recipe.yaml", learning_rate=1e-4, max_steps=50)           # doctest: +SKIP
        >>> run = trimtab.train(model="starter", data=["a text", "another"], max_steps=5)  # doctest: +SKIP
        >>> run.final_loss                                                                 # doctest: +SKIP
        1.87
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab import launch
    from trimtab.run import RunFolder
    from trimtab.run.lifecycle import RunInputs

    callbacks = check_callbacks(callbacks)
    built, given = build_recipe_from_arguments(recipe, keys, data, model, data_key)
    loaded = model.opened if isinstance(model, Model) else None
    with _checked_view(view) as shown:
        if given.rows:
            RunFolder(Path(built.output_dir)).check_new()  # before reading rows, which may take long
        built, passed = given.store(built, shown)
        return _result(
            launch.train(built, shown, inputs=RunInputs(passed, callbacks, loaded, explain_memory))
        )


def resume(
    folder: str | Path,
    *,
    data: Any = None,
    data_key: str | None = None,
    callbacks: Sequence[Any] | None = None,
    view: LiveView | None = None,
    explain_memory: bool = False,
    **keys: Any,
) -> RunResult:
    """Continues a run folder from its last valid checkpoint; accepts only keys that may change on resume.

    Returns the same as `train`, also after a signal.

    Args:
        folder: the run folder.
        data: the rows with which the run was started, from the first row on. Needed if they were streamed, or are no
            longer in the cache; different rows are refused.
        data_key: the key with which the run was started, if any.
        callbacks: as in `train`.
        view: shows the run; by default on the terminal.
        explain_memory: as in `train`.
        keys: keys of the recipe to override.

    Example:
        >>> trimtab.resume("runs/my-run", save_steps=50)  # doctest: +SKIP
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab import launch
    from trimtab.run import RunFolder
    from trimtab.run.lifecycle import RunInputs, recipe_of

    callbacks = check_callbacks(callbacks)
    values = {key: plain_value(value, key) for key, value in keys.items()}
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()
    ]
    given = DataArgument.of(data, data_key)
    with _checked_view(view) as shown:
        run = RunFolder(path_of(folder, "the run folder"))
        run.open()
        passed = given.store_for_resume(recipe_of(run, words), shown, run.path)
        extra = RunInputs(passed, callbacks, explain_memory=explain_memory)
        return _result(launch.resume(run.path, words, shown, inputs=extra))


def _checked_view(view: LiveView | None) -> LiveView:
    from trimtab.report import LiveView

    if view is None:
        return LiveView()
    if not isinstance(view, LiveView):
        raise RecipeError(
            f"view is {described(view)}", "give a trimtab.report.LiveView, or None for the terminal"
        )
    return view


def _result(finished: FinishedRun) -> RunResult:
    from trimtab.report import read_run, write_page

    write_page(read_run(finished.folder), finished.folder / "report.html")
    return RunResult(finished.folder, finished.status, finished.step, finished.reason)


def build_recipe_from_arguments(
    recipe: str | Path | dict[str, Any] | None,
    keys: dict[str, Any],
    data: Any,
    model: Any,
    data_key: str | None = None,
) -> tuple[Recipe, DataArgument]:
    """Returns the recipe with the passed keys, data and model; rows have preliminary names in it."""
    from trimtab.recipe import build, load
    from trimtab.recipe.loading import PAIRS
    from trimtab.recipe.problems import is_default_null

    if isinstance(recipe, str | os.PathLike):
        given = DataArgument.of(data, data_key)
        where = "data" if given.whole else "data.train"
        section = given.section if given.whole else given.section.get("train")
        words = [f"{where}={json.dumps(section)}"] if given.section else []
        words += _model_words(model)
        plain = load(recipe, words).model_dump(mode="json", exclude_unset=True)
    elif recipe is not None and not isinstance(recipe, Mapping):
        raise RecipeError(
            f"the recipe is {described(recipe)}",
            "give the path of a YAML file, the name of a recipe that ships with trimtab, or a dict",
        )
    else:
        plain = dict(recipe or {})
        own = plain.get("data")
        _refuse_objects(plain)
        if data is None and isinstance(own, Mapping) and "train" in own:
            data, own = own, None  # the recipe's own section may contain rows too
        given = DataArgument.of(data, data_key)
        if given.section:
            plain["data"] = given.merged(own)
        if model is not None:
            plain["model"] = _model_section(model, plain.get("model"))
    keys = {key: plain_value(value, key) for key, value in keys.items()}
    for pair in PAIRS:
        passed = [key for key in pair if keys.get(key) is not None]
        if len(passed) == 1:
            plain.pop(next(key for key in pair if key not in passed), None)
    for key, value in keys.items():
        if value is None and is_default_null((key,)):
            plain.pop(key, None)
        else:
            plain[key] = value
    _refuse_missing(plain)
    return build(plain), given


def _model_name(model: Model) -> str:
    """Returns the source of a loaded model; for a run's model the folder with its config."""
    opened = model.opened
    return str(opened.folder) if opened.step is not None else opened.name


def _model_words(model: Any) -> list[str]:
    """Returns the `model` argument as overrides of a recipe file; a loaded model replaces only name and revision."""
    if model is None:
        return []
    if isinstance(model, Model):
        return [f"model.name={_model_name(model)}", "model.revision=null"]
    return [
        f"model={model if isinstance(model, str | Path) else json.dumps(plain_value(_checked_model(model), 'model'))}"
    ]


def _model_section(model: Any, own: Any) -> Any:
    """Returns the `model` argument as the section of a recipe that is a dict."""
    if isinstance(model, Model):
        options = (
            {key: value for key, value in own.items() if key != "revision"}
            if isinstance(own, Mapping)
            else {}
        )
        return {**options, "name": _model_name(model)}
    return str(model) if isinstance(model, Path) else plain_value(_checked_model(model), "model")


def _checked_model(model: Any) -> Any:
    """Returns the model if it is valid in a recipe; raises a RecipeError for any other object."""
    if isinstance(model, RunResult):
        raise RecipeError(f"model is the result of a run ({model.folder})", "give run.model()")
    if not isinstance(model, str | Mapping):
        raise RecipeError(
            f"model= is {described(model)}",
            "give a name or a path, a dict like the recipe's `model`, or the result of trimtab.load",
        )
    return model


def _refuse_missing(recipe: Mapping[str, Any]) -> None:
    """Raises a RecipeError for missing model or data that names the arguments; misspelt keys are reported instead."""
    from trimtab.recipe import Recipe

    if not set(recipe) <= set(Recipe.model_fields):
        return
    if recipe.get("model") is None:
        raise RecipeError("there is no model to train", "pass model=, such as model='starter'")
    if recipe.get("data") is None:
        raise RecipeError(
            "there is no data to train on",
            "pass data=, such as data=['a text', 'another'] or data='texts.jsonl'",
        )


def _refuse_objects(recipe: Mapping[str, Any]) -> None:
    """Raises a RecipeError for rows or a loaded model inside a recipe dict: they must be keyword arguments."""
    data, model = recipe.get("data"), recipe.get("model")
    if data is not None and not isinstance(data, Mapping):
        raise RecipeError(
            f"'data' of the recipe is {described(data)}, not a mapping",
            "pass rows or the name of a source by keyword: trimtab.train(recipe, data=rows)",
        )
    if model is not None and not isinstance(model, str | os.PathLike | Mapping):
        raise RecipeError(
            f"'model' of the recipe is {described(model)}",
            "give a model name or folder, or pass a loaded model by keyword: trimtab.train(recipe, model=model)",
        )
