"""`trimtab bench memory`."""

from __future__ import annotations

from pathlib import Path
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


def memory(
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="small, medium, large, xl, 2.7B, or a recipe or model; all five by default, small on a CPU.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Tokens per sequence; 128,256,512,1024 by default, 128,256 on a CPU."
        ),
    ] = None,
    precisions: Annotated[
        str | None, typer.Option(metavar="A,B", help="fp32, tf32, bf16, fp16; fp32,bf16 by default.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="forward, full (forward, backward and optimizer). Both by default."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    kernels: Annotated[
        str,
        typer.Option(help="reference (unfused attention, plain torch operations) or fast (as in training)."),
    ] = "reference",
    loss: Annotated[
        str, typer.Option(help="logits_sum (sum of the logits) or cross_entropy.")
    ] = "logits_sum",
    snapshots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write every allocation of each cell to this folder as JSON, and on a GPU torch's memory "
            "snapshot (a pickle) for pytorch.org/memory_viz.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of a step goes: peak by sequence length, timeline, largest allocations with source lines.

    Each study model runs the forward pass alone and a full step, in fp32 and bf16. The report has the peak of each, its
    composition (weights, gradients, optimizer states, activations by part), memory over the step, the largest
    allocations with module, file and line, and the residual stream, computed and measured. Out of memory is recorded
    as a result, and the study continues.

        trimtab bench memory                                        everything
        trimtab bench memory --sizes small --contexts 128,1024      one model
        trimtab bench memory --kernels fast --loss cross_entropy    as in training, next to the plan
        trimtab bench memory --sizes small --snapshots snapshots    every allocation as a file

    On a CPU the same values come from the allocation events of torch's profiler.
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.memory.cells import Options, cells
    from trimtab.run.device import require_torch

    require_torch()
    place = study_device(device)
    options = Options(
        sizes=split_words(sizes),
        contexts=parse_counts(contexts or "", "--contexts"),
        precisions=split_words(precisions),
        parts=split_words(parts),
        batch=batch,
        kernels=kernels,
        loss=loss,
        snapshots=snapshots,
    )
    asked = cells(options, device=place.partition(":")[0])
    run_study(
        "memory",
        asked,
        device=place,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
