"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Adapter = Annotated[
    str | None, typer.Option(help="A folder with a LoRA adapter (as peft saves it) to apply to the model.")
]
Checkpoint = Annotated[str, typer.Option(help="Checkpoint of a run folder: latest, best or a step number.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:1 for the second GPU.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto for the best dtype on this device.")]
Folder = Annotated[Path, typer.Argument(help="The folder to write; it must not exist yet.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a folder that contains a model or an adapter.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
SavedDtype = Annotated[str, typer.Option(help="Dtype of the saved weights: fp32, bf16 or fp16.")]
