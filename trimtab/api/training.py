"""Training, resuming and planning from Python. The command line calls the same functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.results import RunResult

if TYPE_CHECKING:
    from trimtab.launch import Finished
    from trimtab.report import LiveView


def train(
    recipe: str | Path | dict[str, Any], *, view: LiveView | None = None, **overrides: Any
) -> RunResult:
    """Trains a recipe: a path to a YAML file, or the recipe itself as a dict.

    Example:
        >>> run = trimtab.train("recipe.yaml", learning_rate=1e-4, max_steps=50)  # doctest: +SKIP
        >>> run.data().of("train")[-1]["loss"]                                    # doctest: +SKIP
        1.87
    """
    from trimtab import launch
    from trimtab.launch.device import need_torch
    from trimtab.report import LiveView

    need_torch()
    with view or LiveView() as shown:
        return _result(launch.train(_recipe(recipe, overrides), shown))


def resume(folder: str | Path, *, view: LiveView | None = None, **overrides: Any) -> RunResult:
    """Continues a run folder from its last good checkpoint; only keys that may change on resume are taken.

    Example:
        >>> trimtab.resume("runs/my-run", save_steps=50)  # doctest: +SKIP
    """
    from trimtab import launch
    from trimtab.launch.device import need_torch
    from trimtab.report import LiveView

    need_torch()
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()
    ]
    with view or LiveView() as shown:
        return _result(launch.resume(Path(folder), words, shown))


def plan_run(recipe: str | Path | dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """What a recipe will take on this machine, as plain data; nothing is trained, and torch is not needed.

    Not called `plan`: that name is the package's part that does it.
    """
    from trimtab import launch

    return launch.prepare(_recipe(recipe, overrides)).plan.to_dict()


def _result(finished: Finished) -> RunResult:
    from trimtab.report import read_run, write_page

    write_page(read_run(finished.folder), finished.folder / "report.html")
    return RunResult(finished.folder, finished.status, finished.step, finished.reason)


def _recipe(recipe: str | Path | dict[str, Any], overrides: dict[str, Any]) -> Any:
    from trimtab.recipe import build, load, to_dict
    from trimtab.recipe.loading import PAIRS

    data = to_dict(load(recipe)) if isinstance(recipe, str | Path) else dict(recipe)
    for first, second in PAIRS:
        for given, other in ((first, second), (second, first)):
            if given in overrides and other not in overrides:
                data.pop(other, None)
    return build({**data, **overrides})
