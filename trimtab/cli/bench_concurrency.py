"""`trimtab bench concurrency`."""

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
    check_models,
    run_study,
    study_device,
)


def concurrency(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            help="A file of prompts: .txt with one per line, or .jsonl or .csv with `prompt`. By default 32 "
            "mathematics problems.",
            show_default=False,
        ),
    ] = None,
    ways: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="one-by-one, batch, threads, asyncio, asyncio-threads, processes. All by default.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A run folder, a model folder, a GGUF file, a hub id, or `starter`.")
    ] = "starter",
    workers: Annotated[
        int | None, typer.Option(help="Number of threads or processes; by default one per core, from 2 to 4.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per prompt.")] = 48,
    device: StudyDevice = "auto",
    out: Out = None,
    remeasure: Remeasure = False,
    minutes: Minutes = None,
    listed: ListCells = False,
    as_json: AsJson = False,
) -> None:
    """Compare ways to generate a file of prompts: one by one, batched, threads, asyncio, processes.

    Decoding is greedy, so all ways must produce the same completions, which is checked. The table has seconds, tokens
    per second, the speed-up over one by one, and the peak memory of all processes together, with the reasons: Python's
    global interpreter lock, which torch releases inside its kernels; one model per process; and batching, which needs
    no concurrency at all.

        trimtab bench concurrency
        trimtab bench concurrency questions.txt --workers 4 --max-new-tokens 100
        trimtab bench concurrency --ways batch,processes --model runs/my-run
    """
    from trimtab.lab.choices import split_words
    from trimtab.lab.studies.concurrency.cells import cells
    from trimtab.run.device import require_torch

    require_torch()
    used = study_device(device)
    chosen = cells(
        split_words(ways),
        file=prompts,
        model=model,
        max_new_tokens=max_new_tokens,
        workers=workers,
        device=used,
    )
    check_models([model])
    run_study(
        "concurrency",
        chosen,
        device=used,
        out=out,
        remeasure=remeasure,
        as_json=as_json,
        minutes=minutes,
        listed=listed,
    )
