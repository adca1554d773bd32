"""`trimtab bench sizes`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import (
    AsJson,
    ListCells,
    Minutes,
    Out,
    Remeasure,
    StudyDevice,
    run_study,
    study_device,
)


def sizes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="small, medium, large, xl, 2.7B; a recipe; a hub id, a folder, a config.json or a GGUF file.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Count the parameters of the study models, or of any other model, exactly and by part.

    Shows embedding, attention, feed-forward, norms and head; the formula that is usually quoted, and the parameters it
    leaves out; and the size of weights, gradients and AdamW states in fp32 and bf16. Nothing is measured or downloaded,
    and torch is not needed.

        trimtab bench sizes                             the five study models
        trimtab bench sizes small Qwen/Qwen3-0.6B       a study model and another
        trimtab bench sizes recipe.yaml                 the model of a recipe
    """
    from trimtab.lab.studies.sizes.cells import cells

    run_study(
        "sizes",
        cells(names or ()),
        device=study_device(device),
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
