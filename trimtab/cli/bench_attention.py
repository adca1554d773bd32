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
            help="reference (unfused attention), sdpa_math, sdpa_flash, sdpa_efficient, sdpa_cudnn, varlen, flex, "
            "triton (trimtab's kernel), tiled (FlashAttention in plain PyTorch); all by default.",
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Sequence length in tokens; repeatable. 256 … 65536 by default, 256 … 4096 on a CPU."
        ),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dimension; repeatable. 16, 32, 64 and 128 by default.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="fp32, bf16 or fp16; repeatable. fp32 and bf16 by default, fp32 on a CPU."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch size in sequences; repeatable. 8 and 1 by default.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 1,
    compile: Annotated[
        str, typer.Option(help="Which backends to measure under torch.compile as well: plain, all or none.")
    ] = "plain",
    causal: Annotated[bool, typer.Option(help="Apply a causal mask.")] = True,
    repetitions: Annotated[
        int, typer.Option(help="Timed repetitions of each pass, unless --seconds ends first.")
    ] = 100,
    seconds: Annotated[
        float, typer.Option(help="Time limit per cell in seconds, for forward and backward together.")
    ] = 2.0,
    every: Annotated[
        bool,
        typer.Option(
            "--every", help="Also try configurations predicted to need more than the device's memory."
        ),
    ] = False,
    weighted_sum: Annotated[
        bool, typer.Option(help="Also time the weighted sum, the kernel from the tutorial.")
    ] = True,
    device: StudyDevice = "auto",
    out: Out = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure the time and memory of attention by backend, sequence length, head dimension and dtype.

    The study shows where FlashAttention is faster and where it is not, what torch.compile gains for unfused attention,
    at which length each backend runs out of memory, and how accurately the memory formula predicts it. Each backend is
    compared with unfused attention in fp64 before it is timed; a backend with wrong results is not timed.

    `trimtab bench attention` measures everything; on a CPU at most 4096 tokens, in fp32.

    `trimtab bench attention reference sdpa_flash --length 256 --length 1024 --head-dim 64` compares two backends.

    `trimtab bench attention triton --dtype bf16 --batch 1 --heads 32 --compile none` times a realistic shape.

    Forward and backward are reported separately. Out of memory, predicted or observed, is recorded as a result. Cells
    with a record are not measured again.
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
