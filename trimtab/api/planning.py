"""The planner's Python API: resource use of a run, cost of techniques, searches and tables. Does not need torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.training import build_recipe_from_arguments
from trimtab.facts.arguments import plain_value

if TYPE_CHECKING:
    from trimtab.api.model import Model
    from trimtab.run.target import PlanTarget

RecipeArgument = str | Path | dict[str, Any] | None


def plan_run(
    recipe: RecipeArgument = None,
    *,
    data: Any = None,
    model: str | Path | dict[str, Any] | Model | None = None,
    gpu: str | None = None,
    method: str | None = None,
    host_memory: str | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Predicts memory, time and disk space of a run, as plain data, without training and without torch.

    It is not called `plan` because that is the name of the package.

    Args:
        recipe: a YAML file, a dict, or a model (a hub id of the catalogue, a config.json, a folder, a GGUF file);
            None if all keys are passed as keyword arguments.
        data: as in `train`; rows are not read, and the default without data is to plan without a dataset.
        model: as in `train`.
        gpu: plan for this GPU, by name or memory, instead of this machine.
        method: full, lora, qlora or int8; overrides the recipe.
        host_memory: free memory of the host of that GPU, such as "64GB".
        keys: keys of the recipe to override.

    Example:
        >>> plan = plan_run("Qwen/Qwen3-8B", gpu="24GB", method="qlora")
        >>> plan["fits"], plan["job"]["method"]
        (True, 'qlora')
    """
    from trimtab.plan.detail import detailed_dict

    return detailed_dict(_target(recipe, data, model, gpu, method, host_memory, keys).plan)


def what_if(
    recipe: RecipeArgument = None,
    *,
    data: Any = None,
    model: str | Path | dict[str, Any] | Model | None = None,
    gpu: str | None = None,
    method: str | None = None,
    host_memory: str | None = None,
    **keys: Any,
) -> list[dict[str, Any]]:
    """Returns what each technique saves in bytes and costs in seconds per step, cheapest first; then those in use.

    Takes the arguments of `plan_run`.

    Example:
        >>> rows = what_if("Qwen/Qwen3-8B", gpu="rtx4090", method="lora")
        >>> next(row["recipe"] for row in rows if row["technique"] == "NF4 weights")
        {'load_in_4bit': True}
    """
    from trimtab.plan import list_effects

    target = _target(recipe, data, model, gpu, method, host_memory, keys)
    return [effect.to_dict() for effect in list_effects(target.plan)]


def solve(
    question: str,
    recipe: RecipeArgument = None,
    *,
    data: Any = None,
    model: str | Path | dict[str, Any] | Model | None = None,
    gpu: str | None = None,
    method: str | None = None,
    host_memory: str | None = None,
    prices: str | Path | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Searches for `max_seq_length`, `batch_size`, `fastest`, `smallest_gpu` or `cheapest`.

    The other arguments are those of `plan_run`; `prices` is a file of GPU prices for `cheapest`.

    Returns:
        `answer` as a sentence, `recipe` with the keys to set, `plan` with these keys (None if nothing fits), and
        `options`, the compared candidates.

    Example:
        >>> found = solve("max_seq_length", "Qwen/Qwen3-8B", gpu="24GB", method="qlora")
        >>> found["recipe"]["max_seq_length"] > 8192
        True
    """
    from trimtab.run.questions import answer

    target = _target(recipe, data, model, gpu, method, host_memory, keys)
    return answer(target, question, prices=None if prices is None else Path(prices)).to_dict()


def plan_table(
    models: Sequence[str],
    gpus: Sequence[str],
    methods: Sequence[str] = ("full", "lora", "qlora"),
    **keys: Any,
) -> list[dict[str, Any]]:
    """Returns a row for each model, method and GPU: whether it fits, peak memory, tokens per second.

    Example:
        >>> [row["fits"] for row in plan_table(["Qwen/Qwen3-8B"], ["24GB"], ["full", "qlora"])]
        [False, True]
    """
    from trimtab.run.questions import table

    values = {key: plain_value(value, key) for key, value in keys.items()}
    words = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in values.items()]
    return [cell.to_dict() for cell in table(models, gpus, methods, words)]


def _target(
    recipe: RecipeArgument,
    data: Any,
    model: Any,
    gpu: str | None,
    method: str | None,
    host_memory: str | None,
    keys: dict[str, Any],
) -> PlanTarget:
    from trimtab.run.target import NO_DATA, is_recipe, plan_recipe

    if isinstance(recipe, str | os.PathLike) and model is None and not is_recipe(os.fspath(recipe)):
        model = os.fspath(recipe)
        recipe = None
    without = recipe is None or (isinstance(recipe, Mapping) and recipe.get("data") is None)
    if (
        data is None
        and without
        and (model is not None or (isinstance(recipe, Mapping) and "model" in recipe))
    ):
        data = NO_DATA
    built, _ = build_recipe_from_arguments(recipe, keys, data, model)
    return plan_recipe(built, gpu=gpu, method=method, host_memory=host_memory)
