"""`trimtab bench step`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import Again, AsJson, Out, StudyDevice, run_study, study_device


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
            metavar="A,B", help="reference (plain attention, torch's own operations), fast (as in training)."
        ),
    ] = "reference",
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="logits_sum, cross_entropy; of several, all but the first are timed for forward + backward alone. "
            "Both by default.",
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="forward, backward, both, full (with the optimizer). All by default."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    warm_up: Annotated[
        str,
        typer.Option(
            metavar="N,M",
            help="Steps before the timed ones. Several numbers, or 0, make a warm-up study: each in a fresh process.",
        ),
    ] = "5",
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Begin no further step when the timed ones of a cell took so long; two are always timed. No limit by "
            "default.",
        ),
    ] = None,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Time forward, backward, both, and a whole step with the optimizer, over sizes and context lengths.

    Every step is synchronized and timed by two clocks, the host's and the device's; every time is kept. The report has
    mean and standard deviation, tokens/s, model FLOPs utilization and the share of what this device was measured to
    reach; what a precision, compiling, CUDA graphs or faster kernels bring; and how far the two clocks are apart. A
    configuration that does not fit is a result, "out of memory", and the study continues. The loss is the sum of the
    logits, as in the study that this one repeats, and forward + backward is also timed with the real one.

        trimtab bench step --sizes small --contexts 128,256     a first look
        trimtab bench step --precisions fp32,bf16               what bf16 brings, all sizes
        trimtab bench step --sizes small --modes eager,compiled what torch.compile brings
        trimtab bench step --warm-up 0,1,2,5                    why timing needs a warm-up
        trimtab bench step --sizes recipe.yaml --kernels fast   your own model
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.step.cells import cells
    from trimtab.run.device import need_torch

    need_torch()
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
    run_study("step", asked, device=found, out=out, again=again, as_json=as_json)
