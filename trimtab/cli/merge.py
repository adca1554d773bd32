"""`trimtab merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def merge(
    model: Annotated[
        str, typer.Argument(help="A run folder that was trained with `lora`, or a base model with --adapter.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist yet.")],
    adapter: Annotated[
        str | None, typer.Option(help="A folder with an adapter, of peft's or of `trimtab export peft`.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the saved weights: fp32, bf16 or fp16.")
    ] = "bf16",
    checkpoint: Annotated[
        str, typer.Option(help="Of a run folder: latest, best or a step number.")
    ] = "latest",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder that holds a model.")
    ] = False,
) -> None:
    """Merge an adapter into the weights it was trained on, as a Hugging Face folder that needs no adapter.

        trimtab merge runs/my-lora my-model
        trimtab merge HuggingFaceTB/SmolLM2-135M my-model --adapter ./my-adapter

    The merged weights must be finite and differ from the base's in the format they are saved in, and their logits
    must be those of base and adapter; otherwise nothing is written. The receipt goes where that of `export hf` goes.
    """
    from trimtab.launch.device import need_torch

    need_torch()
    from trimtab.api import load
    from trimtab.report.plain import plain

    loaded = load(
        model, revision=revision, checkpoint=checkpoint, adapter=adapter, device="cpu", dtype="fp32"
    )
    receipt = loaded.merge(folder, dtype=dtype, overwrite=overwrite)
    print(plain(f"written: {folder} in {dtype}"))
    print(plain(f"receipt: {receipt}"))
