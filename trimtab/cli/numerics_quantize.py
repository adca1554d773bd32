"""`trimtab numerics quantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.numerics_output import AsJson, Out, parse_list, show_study


def quantize(
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="gauss, outliers, uniform, relu, or a tensor: FILE.safetensors:TENSOR."
        ),
    ] = "gauss",
    blocks: Annotated[
        str, typer.Option(metavar="N,N", help="Values that share a scale: some of 32, 64, 128, … 4096.")
    ] = "32,64,128,256",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Quantize values to INT8 and NF4 in every way, and see what is lost.

    Affine and absmax INT8 with a scale for the tensor, each row or each block; NF4 with scales in 32 and 8 bits; error
    and bytes of each, clipping against rounding error, and the cast to int8 that silently wraps around. The quantizers
    are those that trimtab trains with.

        trimtab numerics quantize
        trimtab numerics quantize --data outliers --blocks 32,4096
        trimtab numerics quantize --data model.safetensors:lm_head.weight --out lm-head
    """
    from trimtab.run.device import need_torch

    need_torch()
    from trimtab.lab.numerics.quantize import parse_blocks, study_quantization
    from trimtab.lab.numerics.quantize_report import quantization_document
    from trimtab.lab.numerics.writing import torch_facts

    study = study_quantization(data, parse_blocks(parse_list(blocks)))
    document = quantization_document(study, torch_facts())
    show_study("quantize", study.records(), document, out=out, as_json=as_json)
