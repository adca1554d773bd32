"""`trimtab bench compile`."""

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


def compile(
    sizes: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="small, medium, large, xl, 2.7B; or recipes, hub ids, folders, config.json or GGUF files.",
        ),
    ] = "small",
    methods: Annotated[
        str, typer.Option(metavar="A,B", help="full, qlora; ignored for recipes, which set it themselves.")
    ] = "full,qlora",
    scopes: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="regions (each block, as `torch_compile: true` does), whole (model and loss)."
        ),
    ] = "regions,whole",
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="dynamic, static, auto (torch's default; whole model only). By default dynamic,static for regions "
            "and auto for the whole model.",
        ),
    ] = None,
    contexts: Annotated[
        str,
        typer.Option(metavar="N,M", help="Sequence lengths in the order they are run; the first is timed."),
    ] = "256,192,320,128",
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 1,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; fp32 on a CPU and bf16 on a GPU by default."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="inductor; or aot_eager or eager, which only show graph breaks and recompilations."
        ),
    ] = "inductor",
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 5,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Show what torch.compile costs and gains: graph breaks, recompilations, compile time and step time.

    Shows where graphs break and why; how many graphs several sequence lengths need, with the failed guard of each
    recompilation; compile time with a cold and a warm cache; whether loss and gradients equal those of eager mode; and
    after how many steps compilation pays off.

        trimtab bench compile                             full training and QLoRA
        trimtab bench compile --methods qlora --scopes regions
        trimtab bench compile --sizes recipe.yaml --backend aot_eager
    """
    from trimtab.lab.choices import parse_counts, split_words
    from trimtab.lab.studies.compile.cells import cells
    from trimtab.run.device import require_torch

    require_torch()
    chosen = study_device(device)
    asked = cells(
        device=chosen,
        sizes=split_words(sizes),
        methods=split_words(methods),
        scopes=split_words(scopes),
        shapes=split_words(shapes),
        lengths=parse_counts(contexts, "--contexts"),
        batch=batch,
        precision=precision,
        backend=backend,
        steps=steps,
    )
    run_study(
        "compile",
        asked,
        device=chosen,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
