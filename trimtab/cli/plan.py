"""`trimtab plan`: predicts memory, time and disk space of a run, and searches for settings that fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.verb import new_app

if TYPE_CHECKING:
    from trimtab.run.target import PlanTarget

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
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MEMORY", help="Plan for this GPU (rtx4090, h200, 24GB, …) instead of this machine."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="full, lora, qlora or int8; overrides the recipe.")
    ] = None,
    solve: Annotated[
        str | None, typer.Option(metavar="QUESTION", help=f"Search for one of: {_QUESTIONS}.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="List what each technique saves in memory and costs in time.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Plan every combination of models × methods × GPUs.")
    ] = False,
    models: Annotated[str | None, typer.Option(metavar="A,B", help="With --table: hub ids or paths.")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="A,B", help="With --table: names or memory sizes.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="With --table: lora, qlora, …")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="With --solve cheapest: a file of GPU prices; trimtab's own by default."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="MEMORY", help="With --gpu: free memory of the host.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine once (under a minute) and save the result."),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write the plan as an HTML page to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="List what each activation checkpointing policy saves and costs."),
    ] = False,
    dtypes: Annotated[
        bool, typer.Option("--dtypes", help="List the dtype of every module and operation.")
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", hidden=True, help="Former name of --solve max_seq_length.")
    ] = False,
) -> None:
    """Predict memory, time and disk space of a run, without training.

    TARGET is a recipe, or a model, which is planned with the recipe defaults. The first line tells whether the run
    fits. If it does not fit, the exit code is 6, and the error lists settings that would fit.

        trimtab plan r.yaml                                     on this machine
        trimtab plan r.yaml max_seq_length=4096                 override a key
        trimtab plan Qwen/Qwen3-8B --gpu 24GB --method qlora    plan a model
        trimtab plan r.yaml --gpu rtx4090 --what-if             savings, costs
        trimtab plan r.yaml --gpu 24GB --solve max_seq_length   longest that fits
        trimtab plan r.yaml --gpu 24GB --solve batch_size       largest that fits
        trimtab plan r.yaml --gpu rtx4090 --solve fastest       most tokens/s
        trimtab plan r.yaml --solve smallest_gpu                smallest that fits
        trimtab plan r.yaml --solve cheapest                    lowest price
        trimtab plan --table --gpus rtx4090,h100-sxm            many combinations
        trimtab plan r.yaml --gpu h200 --page plan.html         as an HTML page
        trimtab plan --calibrate                                measure this machine
        trimtab plan r.yaml --calibrate                         with its num_threads

    Neither weights nor training data are read or downloaded. The hub is asked only for config and tokenizer, of a
    recipe's model that is neither local nor in the catalogue, or that has its own revision, tokenizer or tokens.
    `--dtypes` runs one layer of the model with the recipe's dtypes and lists the observed dtypes; it needs torch.
    """
    from trimtab.cli import plan_questions as questions
    from trimtab.facts.errors import RecipeError
    from trimtab.run.target import named_recipe

    words = list(overrides or [])
    if target is not None and "=" in target and not Path(target).exists():
        words = [target, *words]
        target = None
    if longest:
        print("note: --longest is now --solve max_seq_length", file=sys.stderr)
        solve = solve or "max_seq_length"
    if calibrate:
        questions.calibrate(None if target is None else named_recipe(target, words, method), as_json=as_json)
        if target is None:
            return
    questions.check_options(
        {
            "--what-if": what_if,
            "--recompute": recompute,
            "--dtypes": dtypes,
            "--host-memory": host_memory is not None,
            "--prices": prices is not None,
            "--models": models is not None,
            "--gpus": gpus is not None,
            "--methods": methods is not None,
        },
        table=table,
        solve=solve,
    )
    if table:
        lists = questions.TableLists.parse(target, models, gpus or gpu, methods or method)
        questions.print_table(lists, words, longest=solve == "max_seq_length", as_json=as_json, page=page)
        return
    if target is None:
        raise RecipeError(
            "no recipe or model given",
            "give a recipe or a model: `trimtab plan Qwen/Qwen3-8B --gpu 24GB --method qlora`; "
            "see `trimtab plan --help`",
        )
    found = _read(target, words, gpu, method, host_memory)
    if solve is not None:
        if page is not None or what_if or recompute or dtypes:
            raise RecipeError(
                "--solve prints an answer only, without --page, --what-if, --recompute or --dtypes",
                "add the answer's lines to the command and repeat it without --solve",
            )
        questions.print_answer(found, solve, prices, as_json=as_json)
        return
    _print(found, what_if=what_if, recompute=recompute, dtypes=dtypes, as_json=as_json, page=page)


def _read(target: str, words: list[str], gpu: str | None, method: str | None, host: str | None) -> PlanTarget:
    from trimtab.report.plain import plain
    from trimtab.run.device import has_torch
    from trimtab.run.target import read_target

    if gpu is None and not has_torch():
        print(
            "torch is not installed, so this plan is for the CPU in fp32; "
            "to plan for a GPU, run: pip install 'trimtab[train]', or name the GPU with --gpu",
            file=sys.stderr,
        )
    found = read_target(target, words, gpu=gpu, method=method, host_memory=host)
    for note in (*found.notes, *found.plan.notes):
        print(f"note: {plain(note)}", file=sys.stderr)
    return found


def _print(
    found: PlanTarget, *, what_if: bool, recompute: bool, dtypes: bool, as_json: bool, page: Path | None
) -> None:
    """Prints the plan and the requested lists; raises a ResourceError at the end if the run does not fit."""
    from trimtab.cli import plan_questions as questions
    from trimtab.plan import check_fits, list_effects, policy_costs
    from trimtab.plan.detail import detailed_dict
    from trimtab.report.console import new_console
    from trimtab.report.plan_panel import plan_view
    from trimtab.report.plan_tables import what_if_view

    plain = detailed_dict(found.plan)
    effects = [effect.to_dict() for effect in list_effects(found.plan)] if what_if or page else []
    costs = policy_costs(found.plan.job, found.device) if recompute else []
    if page is not None:
        questions.write_plan_page(found, effects, page)
    if as_json:
        result: dict[str, Any] = dict(plain)
        if what_if:
            result["what_if"] = effects
        if recompute:
            result["recompute"] = [row.to_dict() for row in costs]
        print(json.dumps(result, indent=2))
    else:
        console = new_console()
        console.print(plan_view(plain, console.width))
        if what_if:
            console.print("", what_if_view(effects))
        questions.print_costs(costs, found.shape.num_layers)
    if dtypes:
        questions.print_dtypes(found)
    check_fits(found.plan, found.device)
