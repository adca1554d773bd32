"""`trimtab merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.interrupts import begin_work
from trimtab.cli.options import Adapter, Checkpoint, Folder, Overwrite, Revision, SavedDtype
from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def merge(
    model: Annotated[
        str,
        typer.Argument(
            help="The folder of a run that was trained with `lora`, or a base model with --adapter."
        ),
    ],
    folder: Folder,
    adapter: Adapter = None,
    dtype: SavedDtype = "bf16",
    checkpoint: Checkpoint = "latest",
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge an adapter into its base model and write a Hugging Face folder that needs no adapter.

    The merged weights must be finite, differ from the base weights in the dtype in which they are saved, and produce
    the same logits as base and adapter; otherwise nothing is written.

        trimtab merge runs/my-lora my-model
        trimtab merge HuggingFaceTB/SmolLM2-135M my-model --adapter ./my-adapter

    The receipt of these checks is written to the run folder's `receipts/`, or next to the new folder.
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.api import check_saving, load
    from trimtab.facts.names import path_of
    from trimtab.facts.phases import RunPhase
    from trimtab.report.plain import plain
    from trimtab.run.folder import RunFolder
    from trimtab.run.out_of_memory import explaining_memory

    check_saving(folder, dtype=dtype, overwrite=overwrite)
    with explaining_memory(RunPhase.MERGE, run=RunFolder(path_of(model, "the model"))):
        loaded = load(
            model, revision=revision, checkpoint=checkpoint, adapter=adapter, device="cpu", dtype="fp32"
        )
    begin_work()
    receipt = loaded.merge(folder, dtype=dtype, overwrite=overwrite)
    print(plain(f"written: {folder} in {dtype}"))
    print(plain(f"receipt: {receipt}"))
