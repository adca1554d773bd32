"""Options of the verbs that write text: `generate` and `chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.facts.errors import RecipeError

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


def check_sampling(temperature: float | None, top_p: float, top_k: int) -> None:
    """RecipeError, in the words of the command line, for options that would have no effect."""
    limits = (("--top-p", top_p != 1.0), ("--top-k", top_k != 0))
    given = [name for name, is_given in limits if is_given]
    if temperature == 0 and given:
        raise RecipeError(
            f"{given[0]} has no effect at --temperature 0, which always takes the likeliest token",
            f"give --temperature 0.7, or leave {' and '.join(given)} out",
        )
