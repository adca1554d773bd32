"""`trimtab export`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.interrupts import begin_work
from trimtab.cli.options import Checkpoint, Folder, Overwrite, Revision, SavedDtype
from trimtab.cli.verb import new_app

app = new_app()


@app.callback()
def export() -> None:
    """Export a run or a model to files that other tools load, with a verification receipt."""


@app.command()
def hf(
    model: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a GGUF file, a hub id, or `starter`.")
    ],
    folder: Folder,
    dtype: SavedDtype = "bf16",
    checkpoint: Checkpoint = "latest",
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Export a Hugging Face folder (config.json, safetensors, tokenizer) that transformers and others load.

        trimtab export hf runs/demo my-model --checkpoint best

    The files are read back by an independent reader, and names, shapes, checksums and logits are compared with the
    model in memory. The receipt of this check is written to the run folder's `receipts/`, or next to the new folder.

    The default bf16 is the dtype that most tools use; fp32 weights are rounded to it, with a message. `--dtype fp32`
    saves them exactly.
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
    with explaining_memory(RunPhase.EXPORT, run=RunFolder(path_of(model, "the model"))):
        loaded = load(model, revision=revision, checkpoint=checkpoint, device="cpu", dtype="fp32")
    begin_work()
    receipt = loaded.save(folder, dtype=dtype, overwrite=overwrite)
    print(plain(f"written: {folder} in {dtype}{_rounding(loaded.opened.formats, dtype)}"))
    print(plain(f"receipt: {receipt}"))


@app.command()
def peft(
    model: Annotated[str, typer.Argument(help="The folder of a run that was trained with `lora`.")],
    folder: Folder,
    base: Annotated[
        str | None,
        typer.Option(help="The hub id or Hugging Face folder from which peft loads the base model."),
    ] = None,
    checkpoint: Checkpoint = "latest",
    overwrite: Overwrite = False,
) -> None:
    """Export a run's adapter as a folder (adapter_config.json, safetensors) that the peft library loads.

        trimtab export peft runs/my-lora my-adapter --checkpoint best

    The files are read back by an independent reader and compared byte for byte; applied to the same base model they
    must produce the same logits. The receipt of this check is written to the run folder's `receipts/`. To export
    adapter and base as one model, use `trimtab merge`.

    `adapter_config.json` names the base model that peft loads. This cannot be a GGUF file or `starter`: export such a
    base with `trimtab export hf`, and pass that folder, or a hub id, as --base.
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.adapt.peft_files import CONFIG
    from trimtab.api import check_saving, load
    from trimtab.facts.names import path_of
    from trimtab.facts.phases import RunPhase
    from trimtab.report.plain import plain
    from trimtab.run.folder import RunFolder
    from trimtab.run.out_of_memory import explaining_memory

    check_saving(folder, overwrite=overwrite, holds=CONFIG)
    with explaining_memory(RunPhase.EXPORT, run=RunFolder(path_of(model, "the model"))):
        loaded = load(model, checkpoint=checkpoint, device="cpu", dtype="fp32")
    begin_work()
    receipt = loaded.save_adapter(folder, base_name=base, overwrite=overwrite)
    print(plain(f"written: {folder}"))
    print(plain(f"receipt: {receipt}"))


def _rounding(stored: tuple[str, ...], dtype: str) -> str:
    """Describes the rounding from the stored dtypes to the exported one, and names a dtype without rounding."""
    # fp32 represents every bf16 and fp16 value exactly, and GGUF quantizations are dequantized to it.
    exact = {dtype} if dtype != "fp32" else {*stored} - {"fp64"}
    if {*stored} <= exact:
        return ""
    if "fp64" in stored:
        return ", rounded from fp64"
    lossless = stored[0] if stored in (("bf16",), ("fp16",)) else "fp32"
    return f", rounded from {', '.join(sorted(stored))}; --dtype {lossless} avoids rounding"
