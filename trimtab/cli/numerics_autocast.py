"""`trimtab numerics autocast`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.numerics_output import AsJson, Out, show_study
from trimtab.cli.studying import StudyDevice, study_device


def autocast(
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    device: StudyDevice = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """List the dtype of every operation under autocast, as observed in torch.

    A toy model in plain torch shows where autocast keeps fp32. trimtab's decoder shows a real block: parameters,
    layers, norms, logits, loss and gradients, and each operation with its inputs and output. An RMSNorm in 16 bits,
    step by step, shows why norms are computed in fp32. `trimtab plan RECIPE --dtypes` lists the dtypes of a recipe.

        trimtab numerics autocast
        trimtab numerics autocast --dtype fp16
        trimtab numerics autocast --device cuda --out autocast
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.lab.numerics.autocast import study_autocast
    from trimtab.lab.numerics.autocast_report import autocast_document
    from trimtab.lab.numerics.writing import torch_facts
    from trimtab.run.device import current_gpu

    chosen = study_device(device)
    with current_gpu(chosen):
        study = study_autocast(dtype, chosen)
        document = autocast_document(study, torch_facts(chosen))
        show_study("autocast", study.records(), document, out=out, as_json=as_json, device=chosen)
