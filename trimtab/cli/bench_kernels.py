"""`trimtab bench kernels`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import (
    DEFAULT_FOLDER,
    AsJson,
    ListCells,
    Minutes,
    Out,
    Remeasure,
    StudyDevice,
    run_study,
    study_device,
)


def kernels(
    sizes: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="small, medium, large, xl, 2.7B; or recipes, hub ids, folders, config.json or GGUF files.",
        ),
    ] = "small",
    contexts: Annotated[str, typer.Option(metavar="N,M", help="Tokens per sequence.")] = "128,1024",
    precisions: Annotated[str, typer.Option(metavar="A,B", help="fp32, tf32, bf16, fp16.")] = "fp32",
    implementations: Annotated[
        str,
        typer.Option(
            "--kernels",
            metavar="A,B",
            help="reference (unfused attention, plain torch operations), fast (as in training).",
        ),
    ] = "reference,fast",
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    loss: Annotated[
        str, typer.Option(help="logits_sum (sum of the logits) or cross_entropy.")
    ] = "logits_sum",
    rounds: Annotated[
        int, typer.Option(help="Profiles of each pass; the fastest is reported. Fewer if a pass is slow.")
    ] = 3,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Also write a trace of each full step for ui.perfetto.dev."),
    ] = False,
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx", help="Do not profile; only emit NVTX ranges named after modules, for nsys and ncu."
        ),
    ] = False,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Show where a step spends its time: by kernel and by kind of kernel, for forward pass and full step.

    Shows the most expensive kernel with its calls and share; how the share of matmuls changes from the forward pass to
    the full step; the most expensive kernels that are not matmuls; softmax vs. matmuls in unfused attention, next to
    their FLOPs; and whether device time agrees with wall time. On a CPU, torch operators are shown instead of kernels.
    CUDA graphs and torch.compile are off while profiling.

        trimtab bench kernels                             small at 128 and 1024
        trimtab bench kernels --sizes medium --kernels fast
        trimtab bench kernels --contexts 128 --trace      and a trace for Perfetto
        nsys profile trimtab bench kernels --nvtx         for Nsight Systems
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.kernels.cells import cells
    from trimtab.run.device import require_torch

    require_torch()
    chosen = study_device(device)
    asked = cells(
        device=chosen,
        sizes=split_words(sizes),
        contexts=parse_counts(contexts, "--contexts"),
        precisions=split_words(precisions),
        kernels=split_words(implementations),
        loss=loss,
        batch=batch,
        rounds=rounds,
        trace=(out or DEFAULT_FOLDER / "kernels") if trace else None,
        nvtx=nvtx,
    )
    run_study(
        "kernels",
        asked,
        device=chosen,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
