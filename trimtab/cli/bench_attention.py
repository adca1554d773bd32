"""`trimtab bench attention`."""

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


def attention(
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="reference (unfused attention), sdpa_math, sdpa_flash, sdpa_efficient, sdpa_cudnn, varlen, flex, "
            "triton (trimtab's kernel), tiled (FlashAttention in plain PyTorch). All by default.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(metavar="N,M", help="Tokens per sequence. 256 … 65536 by default, 256 … 4096 on a CPU."),
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(metavar="N,M", help="Head dimensions. 16,32,64,128 by default.")
    ] = None,
    precisions: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="fp32, bf16, fp16. fp32,bf16 by default, fp32 on a CPU."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,M", help="Sequences per pass. 8,1 by default.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 1,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="eager, compiled (torch.compile). By default eager, and for unfused attention both.",
        ),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Apply a causal mask.")] = True,
    repetitions: Annotated[
        int, typer.Option(help="Timed repetitions of each pass, unless --budget ends first.")
    ] = 100,
    budget: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Time limit per cell, for forward and backward together."),
    ] = 2.0,
    oversized: Annotated[
        bool,
        typer.Option(
            "--oversized", help="Also try configurations predicted to need more than the device's memory."
        ),
    ] = False,
    weighted_sum: Annotated[
        bool, typer.Option(help="Also time the weighted sum, the kernel from the tutorial.")
    ] = True,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Measure the time and memory of attention by backend, sequence length, head dimension and dtype.

    The study shows where FlashAttention is faster and where it is not, what torch.compile gains for unfused attention,
    at which length each backend runs out of memory, and how accurately the memory formula predicts it. Each backend is
    compared with unfused attention in fp64 before it is timed; a backend with wrong results is not timed.

    Forward and backward are reported separately. Out of memory, predicted or observed, is recorded as a result. Cells
    with a record are not measured again.

        trimtab bench attention                                              everything
        trimtab bench attention --backends reference,sdpa_flash --head-dims 64
        trimtab bench attention --backends triton --precisions bf16 --batch 1 --heads 32
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.attention.cells import Options, cells
    from trimtab.lab.studies.attention.settings import Visibility
    from trimtab.run.device import detect, require_torch

    require_torch()
    found = detect(device)
    options = Options(
        backends=split_words(backends),
        dtypes=split_words(precisions),
        head_dims=parse_counts(head_dims or "", "--head-dims"),
        lengths=parse_counts(contexts or "", "--contexts"),
        batches=parse_counts(batch or "", "--batch"),
        heads=heads,
        modes=split_words(modes),
        visibility=Visibility.CAUSAL if causal else Visibility.FULL,
        repetitions=repetitions,
        seconds=budget,
        oversized=oversized,
        weighted_sum=weighted_sum,
    )
    asked = cells(options, device=found.kind, memory_bytes=found.memory_bytes)
    run_study(
        "attention",
        asked,
        device=study_device(device),
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
