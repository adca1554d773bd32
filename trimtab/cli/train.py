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
        Path | None,
        typer.Argument(help="A YAML file or a bundled recipe, such as own-text; omitted with --resume."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Recipe keys to override: learning_rate=1e-4, data.train.0.first=500.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume this run folder from its last valid checkpoint, or start its recipe if it was stopped before "
            "the first step.",
            metavar="RUN",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Print only messages and, at the end, the run folder; no plan, progress or results.",
        ),
    ] = False,
    explain_memory: Annotated[
        bool,
        typer.Option(
            "--explain-memory",
            help="Record the source line of every tensor allocation for the out-of-memory report; steps are slower.",
        ),
    ] = False,
) -> int:
    """Train with a recipe, or resume a run.

    Before training starts, the plan shows the model, the trainable parameters, the attention backend and dtypes with
    the reasons, and the memory and disk space needed. A run that cannot fit is refused with settings that would fit.
    For conversations, one example is shown with the trained tokens in colour.

        trimtab train own-text data.train=./my-texts
        trimtab train recipe.yaml learning_rate=1e-4 max_steps=200
        trimtab train --resume runs/smollm2-135m-math
        trimtab train --resume runs/smollm2-135m-math max_steps=400

    Ctrl-C or SIGTERM saves a checkpoint and exits after the current step; a second one exits immediately. After any
    interruption, including kill -9, `--resume` continues from the last checkpoint. The losses are bitwise identical to
    those of an uninterrupted run on a CPU, and on a GPU with `deterministic: true`. The run folder contains the
    resolved recipe, the plan, metrics.jsonl, checkpoints, report.html, and `receipts/plan.json` with predicted and
    measured values.

    If a run still runs out of memory, the error names the phase, what used the memory and a setting that would have
    fitted; details are in the run folder's oom.txt. `--resume` accepts other memory settings, and with
    `--explain-memory` the details include the source lines that allocated the tensors.
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
                "a resumed run uses the recipe in its folder; give only keys to override, as key=value",
            )
    if recipe is None and resume is None:
        raise RecipeError(
            "no recipe given", "write `trimtab train recipe.yaml`, or see `trimtab train --help`"
        )
    run = None if resume is None else path_of(resume, "--resume")
    return train_and_report(recipe, words, run, quiet=quiet, explain_memory=explain_memory)
