"""Sampling options of `generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.generate import SamplingOptions

Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Sampling temperature; 0 is greedy decoding. By default 0, or 1 with --top-p or --top-k.",
        show_default=False,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Sample from the most likely tokens with this cumulative probability."
    ),
]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0 for all.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed samples the same text.")]
Model = Annotated[
    str, typer.Argument(help="A run folder, a model folder, a GGUF file, a hub id, or `starter`.")
]


def sampling_options(
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float,
    top_k: int,
    stop: list[str] | None,
    seed: int,
) -> SamplingOptions:
    """Returns the flags as SamplingOptions, whose errors name the flags."""
    from trimtab.generate import SamplingOptions

    return SamplingOptions(max_new_tokens, temperature, top_p, top_k, stop or (), seed, argument_name=flag)


def flag(name: str) -> str:
    """Returns the command-line flag of an argument.

    Example:
        >>> flag("top_p")
        '--top-p'
    """
    return "--" + name.replace("_", "-")
