"""`trimtab train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe (YAML). Not given when a run is continued.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys of the recipe to set from here: learning_rate=1e-4, data.train.0.first=500.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue this run folder from its last good checkpoint, or start it where it was not begun.",
            metavar="RUN",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Print messages, and at the end where the run is; no plan, progress or results.",
        ),
    ] = False,
    explain_memory: Annotated[
        bool,
        typer.Option(
            "--explain-memory",
            help="Record which line made each tensor, for the report of a run that runs out of memory; steps are "
            "slower.",
        ),
    ] = False,
) -> int:
    """Train what a recipe describes, or continue a run that stopped.

    Before anything is trained you see what will be trained, which attention and dtypes are used and
    why, and how much memory and disk it needs; a run that cannot fit is refused with what would make it fit. Of
    conversations one example is shown, what is trained on in colour.

        trimtab train own-text data.train=./my-texts
        trimtab train recipe.yaml learning_rate=1e-4 max_steps=200
        trimtab train --resume runs/smollm2-135m-math
        trimtab train --resume runs/smollm2-135m-math max_steps=400    (train it longer)

    Ctrl-C or SIGTERM saves and exits after the current step; a second one exits at once. Whatever stopped a
    run, kill -9 included, `--resume` continues from the last checkpoint with the same losses, bit-identical on a
    CPU; on a GPU set `deterministic: true` for it. The run folder gets the resolved recipe, the plan, metrics.jsonl,
    checkpoints and report.html, and `receipts/plan.json` with predicted and measured values.

    A run that runs out of memory all the same says in which phase, what fills the memory and which setting would have
    fitted; the rest is in the run folder's oom.txt. `--resume` continues with other memory settings, and with
    `--explain-memory` the report names the lines that allocated the tensors.
    """
    from trimtab.cli.training import train_and_report
    from trimtab.facts.errors import RecipeError
    from trimtab.facts.names import path_of

    words = list(overrides or [])
    if resume is not None and recipe is not None:
        words, recipe = [str(recipe), *words], None
        if "=" not in words[0]:
            raise RecipeError(
                f"both a recipe ({words[0]}) and --resume are given",
                "a continued run has its recipe in its folder; give only keys to change, as key=value",
            )
    if recipe is None and resume is None:
        raise RecipeError(
            "no recipe given", "write `trimtab train recipe.yaml`, or see `trimtab train --help`"
        )
    run = None if resume is None else path_of(resume, "--resume")
    return train_and_report(recipe, words, run, quiet=quiet, explain_memory=explain_memory)
