"""`trimtab bench attention`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.studying import Again, AsJson, Out, StudyDevice, run_study, study_device


def attention(
    backends: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BACKEND]...",
            help="reference (plain attention), sdpa_math, sdpa_flash, sdpa_efficient, sdpa_cudnn, varlen, flex, triton "
            "(trimtab's own), tiled (FlashAttention in plain PyTorch); all by default.",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a sequence, several times; 256 … 65536 by default, on a CPU 256 … 4096."
        ),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Several times; 16, 32, 64 and 128 by default.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="fp32, bf16 or fp16, several times; fp32 and bf16 by default, on a CPU fp32."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences, several times; 8 and 1 by default.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads of each sequence.")] = 1,
    compile: Annotated[
        str, typer.Option(help="Which backends to measure under torch.compile as well: plain, all or none.")
    ] = "plain",
    causal: Annotated[bool, typer.Option(help="Whether a query sees no later key.")] = True,
    repetitions: Annotated[int, typer.Option(help="Of each pass, unless the time is up before.")] = 100,
    seconds: Annotated[float, typer.Option(help="Of timing per cell, for both passes together.")] = 2.0,
    every: Annotated[
        bool, typer.Option("--every", help="Also try what needs more than all of the device's memory.")
    ] = False,
    weighted_sum: Annotated[
        bool, typer.Option(help="Also time the weighted sum, the kernel of the tutorial.")
    ] = True,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Time attention and its memory by backend, length, head dimension and dtype.

    The study shows where FlashAttention pays and where it does not, what torch.compile gains for plain attention, at
    which length each backend runs out of memory, and how far the formula for that is from what is measured. Each
    backend is compared with plain attention in fp64 before it is timed; one that is wrong gets no time.

    `trimtab bench attention` measures everything; on a CPU at most 4096 tokens, in fp32.

    `trimtab bench attention reference sdpa_flash --length 256 --length 1024 --head-dim 64` compares two backends.

    `trimtab bench attention triton --dtype bf16 --batch 1 --heads 32 --compile none` times one as a model uses it.

    Time and memory of forward and backward are apart; out of memory, predicted or met, is a result. Cells that are
    recorded already are not measured again.
    """
    from trimtab.lab.studies.attention.cells import Options, cells, compile_choice
    from trimtab.lab.studies.attention.settings import Visibility
    from trimtab.run.device import detect

    found = detect(device)
    options = Options(
        backends=backends or (),
        dtypes=dtype or (),
        head_dims=head_dim or (),
        lengths=length or (),
        batches=batch or (),
        heads=heads,
        compile=compile_choice(compile),
        visibility=Visibility.CAUSAL if causal else Visibility.FULL,
        repetitions=repetitions,
        seconds=seconds,
        every=every,
        weighted_sum=weighted_sum,
    )
    asked = cells(options, device=found.kind, memory_bytes=found.memory_bytes)
    run_study("attention", asked, device=study_device(device), out=out, again=again, as_json=as_json)
