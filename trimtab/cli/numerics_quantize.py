"""`trimtab numerics quantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.numerics_output import AsJson, Out, parse_list, show_study


def quantize(
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="gauss, outliers, uniform, relu, activations, or a tensor as FILE.safetensors:TENSOR.",
        ),
    ] = "gauss",
    blocks: Annotated[
        str,
        typer.Option(metavar="N,N", help="Block sizes (values per scale): powers of two from 32 to 4096."),
    ] = "32,64,128,256",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Quantize values to INT8 and NF4 with several schemes and show the error of each.

    Affine and absmax INT8 with one scale per tensor, row or block; NF4 with 32-bit and 8-bit scales; error and size of
    each, clipping error vs. rounding error, the cast to int8 that silently wraps around, and static vs. dynamic scales
    of activations. These are the quantizers that trimtab trains with.

        trimtab numerics quantize
        trimtab numerics quantize --data outliers --blocks 32,4096
        trimtab numerics quantize --data model.safetensors:lm_head.weight --out lm-head
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.lab.numerics.quantize import parse_blocks, study_quantization
    from trimtab.lab.numerics.quantize_report import quantization_document
    from trimtab.lab.numerics.writing import torch_facts

    study = study_quantization(data, parse_blocks(parse_list(blocks)))
    document = quantization_document(study, torch_facts())
    show_study("quantize", study.records(), document, out=out, as_json=as_json)
