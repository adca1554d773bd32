"""`trimtab generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trimtab.cli.options import Adapter, Checkpoint, Device, Dtype, Revision
from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a GGUF file, a hub id, or `starter`.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; read from standard input if left out.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop after so many tokens; by default 128, or what the model has room for."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this mass.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the so many likeliest tokens; 0 for all.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    checkpoint: Checkpoint = "latest",
    adapter: Adapter = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Write text with a model, streaming it as it comes.

    Without a prompt it reads one from standard input.

        trimtab generate runs/demo "The derivative of x^2 is"
        trimtab generate HuggingFaceTB/SmolLM2-135M-Instruct --chat "What is a trim tab?"
        echo "Once upon a time" | trimtab generate starter --temperature 0.8 --top-p 0.95 --seed 7

    Control characters in what a model writes are shown, never sent to the terminal.
    """
    from trimtab.launch.device import need_torch

    need_torch()
    from trimtab.api import load
    from trimtab.facts.errors import RecipeError
    from trimtab.report.plain import plain

    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip() and prompt is None:
        raise RecipeError("no prompt given", "write it behind the model, or pipe it in")
    if system is not None and not chat:
        raise RecipeError("--system is given without --chat", "add --chat, or put it into the prompt")
    loaded = load(
        model, revision=revision, checkpoint=checkpoint, adapter=adapter, dtype=dtype, device=device
    )

    def show(piece: str) -> None:
        sys.stdout.write(plain(piece))
        sys.stdout.flush()

    messages = [{"role": "system", "content": system}] if system else []
    completion = loaded.complete(
        [*messages, {"role": "user", "content": text}] if chat else text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop or [],
        seed=seed,
        stream=show,
    )
    print()
    print(
        f"[{len(completion.ids)} tokens, {completion.tokens_per_second:.0f} a second, "
        f"ended by {completion.finish_reason}]",
        file=sys.stderr,
    )
    return 0
