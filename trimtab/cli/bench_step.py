"""`trimtab bench step`."""

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


def step(
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="small, medium, large, xl, 2.7B; or recipes, hub ids, folders, config.json or GGUF files. "
            "All five by default on a GPU, small on a CPU.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Tokens per sequence. 128,256,512,1024 by default, 128,256 on a CPU."
        ),
    ] = None,
    precisions: Annotated[
        str, typer.Option(metavar="A,B", help="fp32, tf32, bf16, fp16. Weights are fp32 in all of them.")
    ] = "fp32",
    modes: Annotated[
        str, typer.Option(metavar="A,B", help="eager, compiled (the whole model), graphs (CUDA graphs).")
    ] = "eager",
    kernels: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="reference (unfused attention, plain torch operations), fast (as in training).",
        ),
    ] = "reference",
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="logits_sum, cross_entropy. The first one given is timed for every part, the other only for "
            "forward + backward. Both by default.",
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="forward, backward, both, full (including the optimizer). All by default."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    warm_up: Annotated[
        str,
        typer.Option(
            metavar="N,M",
            help="Warm-up steps, which are not timed. Several numbers, or 0, make a warm-up study, each in a new "
            "process.",
        ),
    ] = "5",
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time limit for the timed steps of a cell; at least two steps are timed. No limit by default.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Time forward, backward, both, and a full step with the optimizer, over model sizes and sequence lengths.

    Every step is synchronized and timed by the host's and the device's clock, and every time is recorded. The report
    has mean and standard deviation, tokens/s, model FLOPs utilization and the share of this device's measured matmul
    rate; the speed-up from a precision, torch.compile, CUDA graphs or faster kernels; and the difference between the
    two clocks. Out of memory is recorded as a result, and the study continues. The loss is the sum of the logits;
    forward + backward is also timed with cross-entropy.

        trimtab bench step --sizes small --contexts 128,256     a first look
        trimtab bench step --precisions fp32,bf16               gain from bf16
        trimtab bench step --sizes small --modes eager,compiled gain from compile
        trimtab bench step --warm-up 0,1,2,5                    effect of warm-up
        trimtab bench step --sizes recipe.yaml --kernels fast   your own model
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.step.cells import cells
    from trimtab.run.device import require_torch

    require_torch()
    found = study_device(device)
    asked = cells(
        device=found,
        sizes=split_words(sizes),
        contexts=parse_counts(contexts or "", "--contexts"),
        precisions=split_words(precisions),
        modes=split_words(modes),
        kernels=split_words(kernels),
        losses=split_words(loss),
        parts=split_words(parts),
        batch=batch,
        warm_up=parse_counts(warm_up, "--warm-up", least=0),
        steps=steps,
        budget_s=budget,
    )
    run_study(
        "step",
        asked,
        device=found,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
