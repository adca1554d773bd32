"""Answers planner questions with data from files: GPUs, prices, the models of a table. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.gpus import data_sheets, find_gpu, gpu_of_sheet
from trimtab.facts.prices import read_prices
from trimtab.facts.shapes import ModelShape
from trimtab.plan import (
    Answer,
    Cell,
    Plan,
    make_table,
    solve_batch_size,
    solve_cheapest,
    solve_fastest,
    solve_max_seq_length,
    solve_smallest_gpu,
)
from trimtab.plan.solve import Progress, check_question, find_longest
from trimtab.recipe import Recipe
from trimtab.run.target import PlanTarget, check_method, named_recipe, plan_shape, shape_of_recipe


def answer(
    target: PlanTarget, question: str, *, prices: Path | None = None, progress: Progress | None = None
) -> Answer:
    """The answer to one of `trimtab.plan.solve.QUESTIONS`.

    Args:
        target: a planned recipe or model.
        question: max_seq_length, batch_size, fastest, smallest_gpu or cheapest.
        prices: for cheapest: a file of prices; None for the one that ships with trimtab.
        progress: called for each candidate.
    """
    check_question(question)
    if question == "max_seq_length":
        return solve_max_seq_length(target.plan, target.plan_for)
    if question == "batch_size":
        return solve_batch_size(target.plan, target.plan_for)
    if question == "fastest":
        return solve_fastest(target.plan, target.plan_for, progress)
    if question == "smallest_gpu":
        return solve_smallest_gpu(target.plan, target.plan_for, _trainable_gpus(), progress)
    return solve_cheapest(target.plan, target.plan_for, priced_gpus(prices), progress)


def priced_gpus(prices: Path | None) -> list[tuple[DeviceFacts, float, str]]:
    """(GPU, dollars per hour, source of the price) of each GPU with a known price."""
    known = read_prices(prices)
    found = [(gpu, known.of(gpu)) for gpu in _trainable_gpus()]
    return [(gpu, price.usd_per_hour, price.source) for gpu, price in found if price is not None]


def _trainable_gpus() -> list[DeviceFacts]:
    """GPUs of the data sheets that trimtab trains on; for the others only a memory bound is known."""
    devices = [gpu_of_sheet(sheet) for sheet in data_sheets()]
    return [device for device in devices if device.bound is None]


def table(
    models: Sequence[str],
    gpus: Sequence[str],
    methods: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    longest: bool = False,
    progress: Progress | None = None,
) -> list[Cell]:
    """Plans every model with every method on every GPU.

    Args:
        models: recipes or models, as `trimtab plan` accepts them.
        gpus: GPUs of the data sheets or amounts of memory.
        methods: full, lora, qlora, int8.
        overrides: `key=value` settings for all recipes.
        longest: also find the longest sequence that fits.
        progress: called before each cell.

    Example:
        >>> [cell] = table(["Qwen/Qwen3-8B"], ["24GB"], ["qlora"])
        >>> cell.fits
        True
    """

    @cache
    def read(model: str, method: str) -> tuple[Recipe, ModelShape]:
        recipe = named_recipe(model, overrides, method)
        return recipe, shape_of_recipe(recipe)

    def plan(model: str, method: str, device: DeviceFacts) -> Plan:
        recipe, shape = read(model, method)
        return plan_shape(recipe, shape, device)

    for method in methods:
        check_method(method)
    named = [(name, find_gpu(name)) for name in gpus]

    def longest_of(found: Plan) -> int:
        return find_longest(found, lambda recipe, device: plan_shape(recipe, found.shape, device))

    return make_table(
        models, named, methods, plan, longest=longest_of if longest else None, progress=progress
    )
