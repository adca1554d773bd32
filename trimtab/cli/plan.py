"""`trimtab plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.verb import new_app

if TYPE_CHECKING:
    from trimtab.plan.longest import Longest
    from trimtab.plan.policies import PolicyCost
    from trimtab.run.prepare import Prepared

app = new_app()


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set from here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON instead of drawing it.")
    ] = False,
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="List which module and operation runs in which number format.")
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Say how long a window could be within the memory there is.")
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="List what each recompute policy would save and cost.")
    ] = False,
) -> None:
    """Say what a recipe will take on this machine, without training anything.

    Shows what would be trained, the four memory buckets (weights, gradients, optimizer states, activations)
    before the first step and at the peak, disk space, and the attention and number formats that would be used.
    A run that does not fit ends with exit code 6 and says what would make it fit.

        trimtab plan recipes/qwen3-0.6b-math.yaml per_device_train_batch_size=8
        trimtab plan recipe.yaml dtype=bf16 --dtypes

    Weights and texts are not read for it; a text that is not there is only mentioned.

    `--dtypes` runs one layer of the model's kind with the recipe's formats and lists what was seen. `--longest` looks
    for the longest `max_seq_length` that `memory_limit`, or the free memory, has room for, and says how it would run.
    `--recompute` lists the policies with the memory that each would save in all layers and the arithmetic it repeats.
    """
    from trimtab.plan import check_fits, policy_costs
    from trimtab.recipe import load
    from trimtab.report import LiveView
    from trimtab.report.plain import plain
    from trimtab.run.device import has_torch
    from trimtab.run.locate import missing_sources
    from trimtab.run.prepare import prepare

    if not has_torch():
        print(
            "torch is not installed, so this is the plan for the CPU in fp32; "
            "a GPU is seen after: pip install 'trimtab[train]'",
            file=sys.stderr,
        )
    wanted = load(recipe, overrides or [])
    prepared = prepare(wanted)
    for name in missing_sources(wanted):
        print(
            f"note: {plain(name)} does not exist here, so that training would stop at once", file=sys.stderr
        )
    for note in prepared.plan.notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    windows = _longest(prepared) if longest else {}
    costs = policy_costs(prepared.plan.job, prepared.device) if recompute else []
    if as_json:
        said: dict[str, Any] = {}
        if longest:
            said["longest"] = {batch: found.to_dict() for batch, found in windows.items()}
        if recompute:
            said["recompute"] = [row.to_dict() for row in costs]
        print(json.dumps(prepared.plan.to_dict() | said, indent=2))
    else:
        LiveView(detail="full").plan(prepared.plan.to_dict())
        _print_longest(prepared, windows)
        _print_costs(costs, prepared.shape.num_layers)
    if dtypes:
        _print_dtypes(prepared)
    check_fits(prepared.plan, prepared.device)


def _longest(prepared: Prepared) -> dict[int, Longest]:
    """By rows of a batch: as many as the recipe has, and one."""
    from trimtab.plan import longest_context
    from trimtab.plan.limits import limit_of

    job, limit = prepared.plan.job, limit_of(prepared.recipe, prepared.device)[0]
    return {
        batch: longest_context(job.changed(batch=batch), prepared.device, limit)
        for batch in dict.fromkeys((job.batch, 1))
    }


def _print_longest(prepared: Prepared, windows: dict[int, Longest]) -> None:
    from trimtab.facts.units import format_bytes
    from trimtab.plan.limits import limit_of
    from trimtab.plan.longest import STEP
    from trimtab.plan.resolved import MemoryPlan

    words = limit_of(prepared.recipe, prepared.device)[1]
    for batch, found in windows.items():
        name = f"longest window, per_device_train_batch_size: {batch}"
        if found.setting is None:
            print(f"{name}: not even {STEP} tokens fit {words}")
            continue
        positions = prepared.shape.max_positions
        beyond = f"; the model itself has {positions} positions" if found.tokens > positions else ""
        memory = MemoryPlan(found.setting.policies, found.setting.mlp_tiles)
        host = f" and {format_bytes(found.setting.host)} of the host's" if found.setting.host else ""
        print(
            f"{name}: {found.tokens} tokens in {format_bytes(found.setting.needed)}{host} "
            f"({memory.description}); {words}{beyond}"
        )


def _print_costs(costs: list[PolicyCost], num_layers: int) -> None:
    """Of all layers together, for one microbatch."""
    from rich.table import Table

    from trimtab.facts.units import format_bytes, format_seconds
    from trimtab.report.console import new_console

    if not costs:
        return
    columns = {
        "recompute": [row.policy for row in costs],
        "keeps": [format_bytes(row.kept * num_layers) for row in costs],
        "saves": [format_bytes(row.saved * num_layers) if row.saved else "" for row in costs],
        "on the host": [format_bytes(row.host * num_layers) if row.host else "" for row in costs],
        "arithmetic": [f"+ {row.arithmetic:.1%}" if row.arithmetic else "" for row in costs],
        "time": [f"+ {format_seconds(row.seconds * num_layers)}" if row.seconds else "" for row in costs],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(*columns, box=None, padding=(0, 3, 0, 0))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console = new_console()
    console.print("Each policy in all layers, for one microbatch:", table)
    if costs[0].seconds is None:
        console.print("Times are left out: what this device computes in a second is not known.")


def _print_dtypes(prepared: Prepared) -> None:
    from rich.table import Table

    from trimtab.report.console import new_console
    from trimtab.run.device import need_torch

    need_torch()
    from trimtab.run.dtypes import list_dtypes

    found = list_dtypes(prepared.shape, prepared.resolved)
    modules = Table("module", "weight", "output", "gradient", box=None, padding=(0, 3, 0, 0))
    for row in found.modules:
        modules.add_row(row.name, row.weight or "", row.output, row.gradient or "")
    operations = Table("operation", "formats", box=None, padding=(0, 3, 0, 0))
    for name, formats in sorted(found.operations.items()):
        operations.add_row(name, "; ".join(formats))
    console = new_console()
    console.print(modules, "", operations, "", f"loss: {found.loss}", sep="\n")
