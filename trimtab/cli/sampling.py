"""Options of the verbs that write text: `generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.generate import SamplingOptions

Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="0 always takes the likeliest token; by default 0, or 1 with --top-p or --top-k.",
        show_default=False,
    ),
]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from the so many likeliest tokens; 0 for all.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
Seed = Annotated[int, typer.Option(help="The same seed draws the same text.")]
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
    """The flags as one object; its errors name the flags."""
    from trimtab.generate import SamplingOptions

    return SamplingOptions(max_new_tokens, temperature, top_p, top_k, stop or (), seed, spelled=flag)


def flag(name: str) -> str:
    """How the command line writes an argument's name.

    Example:
        >>> flag("top_p")
        '--top-p'
    """
    return "--" + name.replace("_", "-")
