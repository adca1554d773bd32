"""`trimtab plan`: what a run will take on this machine or another, and the questions around it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.verb import new_app

if TYPE_CHECKING:
    from trimtab.run.target import Target

app = new_app()

_QUESTIONS = "max_seq_length, batch_size, fastest, smallest_gpu or cheapest"


@app.command()
def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A recipe (YAML), or a model: a hub id, a config.json, a folder or a GGUF file.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to set from here."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MEMORY", help="Plan for this GPU (rtx4090, h200, 24GB, …), not for this machine."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="full, lora, qlora or int8, in place of what the recipe says.")
    ] = None,
    solve: Annotated[
        str | None, typer.Option(metavar="QUESTION", help=f"Search instead: {_QUESTIONS}.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="List what each technique saves in memory and costs in time.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Plan many at once: models × methods × GPUs.")
    ] = False,
    models: Annotated[str | None, typer.Option(metavar="A,B", help="Of --table: hub ids or paths.")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="A,B", help="Of --table: names or memory sizes.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Of --table: lora, qlora, …")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="Of --solve cheapest: your own prices, a file like the one that ships."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="Free memory of the host of a GPU named with --gpu.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine once (under a minute) and keep the result."),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write the plan as one HTML page to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON instead of drawing it.")
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="List what each recompute policy would save and cost.")
    ] = False,
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="List which module and operation runs in which number format.")
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", hidden=True, help="Former name of --solve max_seq_length.")
    ] = False,
) -> None:
    """Say what a run will take, in memory, time and disk, without training or downloading anything.

    TARGET is a recipe or, with the recipe's defaults, a model by name. The first line says whether it fits; a run
    that does not fit ends with exit code 6 and says what would make it fit.

        trimtab plan r.yaml                                     on this machine
        trimtab plan r.yaml max_seq_length=4096                 with another key
        trimtab plan Qwen/Qwen3-8B --gpu 24GB --method qlora    a model by name
        trimtab plan r.yaml --gpu rtx4090 --what-if             savings, costs
        trimtab plan r.yaml --gpu 24GB --solve max_seq_length   longest that fits
        trimtab plan r.yaml --gpu 24GB --solve batch_size       largest that fits
        trimtab plan r.yaml --gpu rtx4090 --solve fastest       most tokens/s
        trimtab plan r.yaml --solve smallest_gpu                least GPU
        trimtab plan r.yaml --solve cheapest                    lowest price
        trimtab plan --table --gpus rtx4090,h100-sxm            many at once
        trimtab plan r.yaml --gpu h200 --page plan.html         as a page
        trimtab plan --calibrate                                measure this machine

    Neither weights nor texts are read. `--dtypes` runs one layer of the model's kind with the recipe's formats and
    lists what was seen; it needs torch.
    """
    from trimtab.cli import plan_questions as questions
    from trimtab.facts.errors import RecipeError

    words = list(overrides or [])
    if target is not None and "=" in target and not Path(target).exists():
        words = [target, *words]
        target = None
    if longest:
        print("note: --longest is now --solve max_seq_length", file=sys.stderr)
        solve = solve or "max_seq_length"
    if calibrate:
        questions.calibrate(as_json=as_json)
        if target is None:
            return
    if table:
        lists = questions.TableLists.parse(target, models, gpus or gpu, methods or method)
        questions.print_table(lists, words, longest=solve == "max_seq_length", as_json=as_json, page=page)
        return
    if target is None:
        raise RecipeError(
            "nothing to plan is named",
            "give a recipe or a model: `trimtab plan Qwen/Qwen3-8B --gpu 24GB --method qlora`; "
            "see `trimtab plan --help`",
        )
    found = _read(target, words, gpu, method, host_memory)
    if solve is not None:
        questions.print_answer(found, solve, prices, as_json=as_json)
        return
    _print(found, what_if=what_if, recompute=recompute, dtypes=dtypes, as_json=as_json, page=page)


def _read(target: str, words: list[str], gpu: str | None, method: str | None, host: str | None) -> Target:
    from trimtab.report.plain import plain
    from trimtab.run.device import has_torch
    from trimtab.run.target import read_target

    if gpu is None and not has_torch():
        print(
            "torch is not installed, so this is the plan for the CPU in fp32; "
            "a GPU is seen after: pip install 'trimtab[train]', or named with --gpu",
            file=sys.stderr,
        )
    found = read_target(target, words, gpu=gpu, method=method, host_memory=host)
    for note in (*found.notes, *found.plan.notes):
        print(f"note: {plain(note)}", file=sys.stderr)
    return found


def _print(
    found: Target, *, what_if: bool, recompute: bool, dtypes: bool, as_json: bool, page: Path | None
) -> None:
    """The plan, and the lists that were asked for besides; a ResourceError at the end if it does not fit."""
    from trimtab.cli import plan_questions as questions
    from trimtab.plan import check_fits, list_effects, policy_costs
    from trimtab.plan.detail import detailed
    from trimtab.report.console import new_console
    from trimtab.report.plan_panel import plan_view
    from trimtab.report.plan_tables import what_if_view

    plain = detailed(found.plan)
    effects = [effect.to_dict() for effect in list_effects(found.plan)] if what_if or page else []
    costs = policy_costs(found.plan.job, found.device) if recompute else []
    if page is not None:
        questions.write_plan_page(found, effects, page)
    if as_json:
        said: dict[str, Any] = dict(plain)
        if what_if:
            said["what_if"] = effects
        if recompute:
            said["recompute"] = [row.to_dict() for row in costs]
        print(json.dumps(said, indent=2))
    else:
        console = new_console()
        console.print(plan_view(plain, console.width))
        if what_if:
            console.print("", what_if_view(effects))
        questions.print_costs(costs, found.shape.num_layers)
    if dtypes:
        questions.print_dtypes(found)
    check_fits(found.plan, found.device)
