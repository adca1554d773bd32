"""`trimtab numerics accumulate`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.numerics_output import AsJson, Out, show_study


def accumulate(
    value: Annotated[str, typer.Option(metavar="NUMBER", help="The addend: 0.01, 1e-8, 1/3.")] = "0.01",
    count: Annotated[int, typer.Option(help="Number of additions: 1 to 100000.")] = 1000,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Add one number many times, in every combination of dtypes.

    Shows why accumulators are fp32: a 16-bit sum loses digits with each addition and stops growing once the addend is
    half of the spacing between adjacent values. Also shows compensated summation and stochastic rounding, which work
    with 16 bits.

        trimtab numerics accumulate                        # 1000 × 0.01
        trimtab numerics accumulate --count 5000
        trimtab numerics accumulate --value 1e-4 --out sums
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.lab.numerics.accumulate import study_accumulation
    from trimtab.lab.numerics.accumulate_report import accumulation_document
    from trimtab.lab.numerics.writing import torch_facts

    study = study_accumulation(value, count)
    document = accumulation_document(study, torch_facts())
    show_study("accumulate", study.records(), document, out=out, as_json=as_json)
