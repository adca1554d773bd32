"""`trimtab bench memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.studying import Again, AsJson, Out, StudyDevice, run_study, study_device


def memory(
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="small, medium, large, xl, 2.7B, or a recipe or model by name; all five by default, on a CPU small.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", help="Tokens per sequence; 128,256,512,1024 by default, on a CPU 128,256."
        ),
    ] = None,
    precisions: Annotated[
        str | None, typer.Option(metavar="A,B", help="fp32, tf32, bf16, fp16; fp32,bf16 by default.")
    ] = None,
    passes: Annotated[
        str | None, typer.Option(metavar="A,B", help="forward, full step; both by default.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    kernels: Annotated[
        str, typer.Option(help="reference: plain attention and torch's operations; fast: as trimtab trains.")
    ] = "reference",
    loss: Annotated[
        str, typer.Option(help="logits_sum, as the reference study, or cross_entropy.")
    ] = "logits_sum",
    snapshots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write every block of each cell as JSON there, and on a GPU torch's own snapshot (a pickle) for "
            "pytorch.org/memory_viz.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of a step goes: peaks by context, a timeline, the largest allocations with their lines.

    Each study model runs forward alone and as a full step, in fp32 and bf16. The report has the peak of each, what is
    in memory at that moment (weights, gradients, optimizer states, activations by part), a picture of memory over the
    step, the largest allocations with module, file and line, and the residual stream computed and found. Out of memory
    is a result: it is recorded, and the study continues.

        trimtab bench memory                                        everything
        trimtab bench memory --sizes small --contexts 128,1024      one model
        trimtab bench memory --kernels fast --loss cross_entropy    as trimtab trains, next to the plan
        trimtab bench memory --sizes small --snapshots snapshots    every block as a file

    On a CPU the same figures come from the allocation events of torch's profiler.
    """
    from trimtab.cli.studying import listed, listed_numbers
    from trimtab.lab.studies.memory.cells import Options, cells

    place = study_device(device)
    options = Options(
        sizes=listed(sizes),
        contexts=listed_numbers(contexts, "--contexts"),
        precisions=listed(precisions),
        passes=listed(passes),
        batch=batch,
        kernels=kernels,
        loss=loss,
        snapshots=snapshots,
    )
    asked = cells(options, device=place.partition(":")[0])
    run_study("memory", asked, device=place, out=out, again=again, as_json=as_json)
