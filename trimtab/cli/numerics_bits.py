"""`trimtab numerics bits`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from trimtab.cli.numerics_output import AsJson, Out, parse_list, show_study

_OPTION = re.compile(r"--?[a-z]", re.IGNORECASE)
_NEGATIVE_WORD = re.compile(r"-(inf|nan)", re.IGNORECASE)


def bits(
    values: Annotated[
        list[str],
        typer.Argument(metavar="VALUE", help="3.14, 1e-8, 1/3, 0x1.8p3, inf, nan, or bits as fp16:0x3c00."),
    ],
    formats: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Any of fp64, fp32, tf32, fp16, bf16, fp8_e4m3, fp8_e5m2, nf4 and int8."
        ),
    ] = "fp32,tf32,fp16,bf16,fp8_e4m3,fp8_e5m2,nf4,int8",
    absmax: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Largest magnitude of the block for nf4 and int8; by default 1, or that of the largest value.",
        ),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Show how each dtype stores a number, bit by bit.

    Prints sign, exponent and mantissa; the exact stored value, its neighbours and their distance; the rounding error;
    range and overflow of every format. Everything is computed exactly from the formats' definitions, without torch.

        trimtab numerics bits 3.14
        trimtab numerics bits 65519 65520 --formats fp16,bf16    # edge of a range
        trimtab numerics bits fp8_e4m3:0x7e                      # bits to a number
        trimtab numerics bits 0.02 --formats nf4 --absmax 0.1    # in its block
    """
    from trimtab.facts.errors import RecipeError
    from trimtab.lab.numerics.bits import study_bits
    from trimtab.lab.numerics.bits_report import bits_document

    for word in values:  # negative numbers look like options, so unknown options arrive here too
        if _OPTION.match(word) and not _NEGATIVE_WORD.match(word):
            raise RecipeError(f"no such option: {word}", "see `trimtab numerics bits --help`")
    study = study_bits(values, parse_list(formats), absmax)
    show_study("bits", study.records(), bits_document(study), out=out, as_json=as_json)
