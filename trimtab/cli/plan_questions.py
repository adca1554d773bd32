"""Searches, tables, calibration and lists of `trimtab plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import RecipeError, ResourceError

if TYPE_CHECKING:
    from trimtab.plan import PolicyCost
    from trimtab.plan.solve import Progress
    from trimtab.recipe import Recipe
    from trimtab.run.target import PlanTarget

TABLE_MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B")
TABLE_GPUS = ("rtx4060ti-16gb", "rtx4090", "a100-80gb", "h200")
TABLE_METHODS = ("full", "lora", "qlora")
LISTS = ("--models", "--gpus", "--methods")
"""Options of `--table` only."""


@dataclass(frozen=True)
class TableLists:
    """The combinations that `--table` plans: every model with every method on every GPU."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    methods: tuple[str, ...]

    @staticmethod
    def parse(target: str | None, models: str | None, gpus: str | None, methods: str | None) -> TableLists:
        """Parses the options; the target is the only model, or the recipe that all cells share."""
        listed = _listed(models) or (TABLE_MODELS if target is None else (target,))
        return TableLists(listed, _listed(gpus) or TABLE_GPUS, _listed(methods) or TABLE_METHODS)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def check_options(given: dict[str, bool], *, table: bool, solve: str | None) -> None:
    """Raises a RecipeError for an option that would be ignored.

    Args:
        given: option → whether it is given.
        table: whether a table is requested.
        solve: the question; None if there is none.
    """
    used = [name for name, is_given in given.items() if is_given]
    lists = [name for name in used if name in LISTS]
    if table and solve not in (None, "max_seq_length"):
        raise RecipeError(
            f"--table does not answer --solve {solve}", "use --solve max_seq_length, or no --table"
        )
    if table and used != lists:
        other = next(name for name in used if name not in LISTS)
        raise RecipeError(f"--table does not use {other}", f"leave {other} or --table out")
    if lists and not table:
        raise RecipeError(f"{lists[0]} is an option of --table", "add --table")
    if given.get("--prices") and solve != "cheapest":
        raise RecipeError("--prices is an option of --solve cheapest", "add --solve cheapest")


def print_answer(found: PlanTarget, question: str, prices: Path | None, *, as_json: bool) -> None:
    """Search and print the answer; raise a ResourceError if nothing fits."""
    from trimtab.report.console import new_console
    from trimtab.report.plan_tables import answer_view
    from trimtab.run.questions import answer as ask

    with searching() as progress:
        answer = ask(found, question, prices=prices, progress=progress)
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2))
    else:
        new_console().print(answer_view(answer.to_dict()))
    if answer.plan is None:
        raise ResourceError(
            answer.sentence,
            "choose a smaller model or a larger GPU, or list ways to save memory with --what-if",
        )


def print_table(
    lists: TableLists, overrides: list[str], *, longest: bool, as_json: bool, page: Path | None
) -> None:
    """Plan every cell and print the table."""
    from trimtab.report.console import new_console
    from trimtab.report.plan_tables import table_view
    from trimtab.run.questions import table

    with searching() as progress:
        cells = table(lists.models, lists.gpus, lists.methods, overrides, longest=longest, progress=progress)
    plain = [cell.to_dict() for cell in cells]
    if page is not None:
        from trimtab.report.plan_page import write_table_page

        write_table_page(plain, page)
    if as_json:
        print(json.dumps({"table": plain}, indent=2))
    else:
        new_console().print(table_view(plain))


def write_plan_page(found: PlanTarget, effects: list[dict[str, Any]], page: Path) -> None:
    """Write the plan and its what-if table as an HTML file."""
    from trimtab.plan.detail import detailed_dict
    from trimtab.report.plan_page import write_plan_page as write

    write(detailed_dict(found.plan, timeline=True), effects, page)
    print(f"wrote {page}", file=sys.stderr)


def calibrate(recipe: Recipe | None, *, as_json: bool) -> None:
    """Measure the device of a recipe, with its number of threads, or this machine's default; save and print it."""
    from trimtab.report.console import new_console
    from trimtab.report.plain import plain
    from trimtab.report.plan_tables import calibration_view
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.facts.calibration_file import write_calibration
    from trimtab.lab.calibrate import calibrate as measure

    print("measuring this machine for up to a minute; do not run anything else on it", file=sys.stderr)
    with status_line() as update:
        device, threads = ("auto", None) if recipe is None else (recipe.device, recipe.num_threads)
        found = measure(device, threads, progress=lambda what, share: update(f"{share:.0%} {plain(what)}"))
    path = write_calibration(found)
    for warning in found.warnings:
        print(f"note: {plain(warning)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"path": str(path), "calibration": found.to_dict()}, indent=2))
    else:
        new_console().print(calibration_view(found.to_dict(), str(path)))


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Shows a status line on standard error; nothing if that is not a terminal."""
    from trimtab.report.console import new_console

    console = new_console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update


@contextmanager
def searching() -> Iterator[Progress]:
    """Shows on standard error which candidate a search is evaluating."""
    from trimtab.report.plain import plain

    with status_line() as update:
        yield lambda what, done, total: update(f"{done + 1} of {total}: {plain(what)}")


def print_costs(costs: list[PolicyCost], num_layers: int) -> None:
    """Print the costs of the policies over all layers, for one microbatch."""
    from rich.table import Table

    from trimtab.facts.units import format_bytes, format_seconds
    from trimtab.report.console import new_console

    if not costs:
        return
    columns = {
        "recompute": [row.policy for row in costs],
        "activations": [format_bytes(row.kept * num_layers) for row in costs],
        "memory saved": [format_bytes(row.saved * num_layers) if row.saved else "" for row in costs],
        "host memory": [format_bytes(row.host * num_layers) if row.host else "" for row in costs],
        "FLOPs": [f"+ {row.arithmetic:.1%}" if row.arithmetic else "" for row in costs],
        "time": [f"+ {format_seconds(row.seconds * num_layers)}" if row.seconds else "" for row in costs],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(*columns, box=None, padding=(0, 3, 0, 0))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console = new_console()
    console.print("Each policy applied to all layers, for one microbatch:", table)
    if costs[0].seconds is None:
        console.print("No times are shown: the device's speed is not known.")


def print_dtypes(found: PlanTarget) -> None:
    """Run one layer with the recipe's dtypes and list the observed dtypes."""
    from rich.table import Table

    from trimtab.report.console import new_console
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.run.dtypes import list_dtypes

    listed = list_dtypes(found.shape, found.plan.resolved)
    modules = Table("module", "weight", "output", "gradient", box=None, padding=(0, 3, 0, 0))
    for row in listed.modules:
        modules.add_row(row.name, row.weight or "", row.output, row.gradient or "")
    operations = Table("operation", "dtypes", box=None, padding=(0, 3, 0, 0))
    for name, formats in sorted(listed.operations.items()):
        operations.add_row(name, "; ".join(formats))
    console = new_console()
    console.print(modules, "", operations, "", f"loss: {listed.loss}", sep="\n")
