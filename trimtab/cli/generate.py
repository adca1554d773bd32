"""`trimtab generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.input import standard_input
from trimtab.cli.interrupts import begin_work
from trimtab.cli.options import Adapter, Checkpoint, Device, Dtype, Revision
from trimtab.cli.sampling import Model, Seed, Stop, Temperature, TopK, TopP, flag, sampling_options
from trimtab.cli.verb import new_app
from trimtab.facts.errors import RecipeError

if TYPE_CHECKING:
    from trimtab import api
    from trimtab.generate import SamplingKeywords, SamplingOptions

app = new_app()


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; read from standard input if left out.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: .txt (one per line), .jsonl (`prompt` or `messages`) or .csv (`prompt`)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --prompts: the JSON lines file to write, or to continue.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --prompts: number of prompts per batch; 16 by default.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --prompts: replace the --output file.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum tokens to generate; by default 128, or what fits into the model's context."
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
    seed: Seed = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message in the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    checkpoint: Checkpoint = "latest",
    adapter: Adapter = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Generate text from one prompt, streaming, or from a file of prompts.

    Without a prompt argument, the prompt is read from standard input. For a conversation, use `trimtab chat`.

        trimtab generate runs/demo "The derivative of x^2 is"
        trimtab generate HuggingFaceTB/SmolLM2-135M-Instruct --chat "What is a trim tab?"
        echo "Once upon a time" | trimtab generate starter --temperature 0.8 --top-p 0.95 --seed 7
        trimtab generate runs/demo --prompts questions.txt --output answers.jsonl

    With --prompts, the output has one row per prompt, in the same order, and is written batch by batch. Repeat an
    interrupted command to continue it. The text sampled for a prompt depends on the seed and the prompt's row number,
    not on --batch-size.

    Control characters in generated text are escaped, never sent to the terminal.
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.api import load
    from trimtab.api.model import BATCH_SIZE

    options = sampling_options(max_new_tokens, temperature, top_p, top_k, stop, seed)
    _check_files(prompt, prompts, output, batch_size=batch_size, overwrite=overwrite)
    text = ""
    if prompts is None:
        text = standard_input().read() if prompt is None else prompt
        if not text.strip() and prompt is None:
            raise RecipeError("no prompt given", "write it after the model, or pipe it to standard input")
        if system is not None and not chat:
            raise RecipeError("--system is given without --chat", "add --chat, or put it into the prompt")
    loaded = load(
        model, revision=revision, checkpoint=checkpoint, adapter=adapter, dtype=dtype, device=device
    )
    if prompts is not None and output is not None:
        more = {
            "chat": chat,
            "system": system,
            "batch_size": BATCH_SIZE if batch_size is None else batch_size,
            "overwrite": overwrite,
        }
        return _write_file(loaded, prompts, output, options, more)
    messages = [{"role": "system", "content": system}] if system else []
    return _stream(
        loaded, [*messages, {"role": "user", "content": text}] if chat else text, options.keywords()
    )


def _check_files(
    prompt: str | None, prompts: Path | None, output: Path | None, *, batch_size: int | None, overwrite: bool
) -> None:
    if prompts is None:
        flags = {
            "--output": output is not None,
            "--batch-size": batch_size is not None,
            "--overwrite": overwrite,
        }
        for name in (name for name, is_given in flags.items() if is_given):
            raise RecipeError(f"{name} is given without --prompts", f"add --prompts FILE, or omit {name}")
        return
    if prompt is not None:
        raise RecipeError("both a prompt and --prompts are given", "leave one of them out")
    if output is None:
        raise RecipeError("--prompts is given without --output", "add --output answers.jsonl")


def _stream(loaded: api.Model, asked: Any, options: SamplingKeywords) -> int:
    from trimtab.facts.units import format_rate
    from trimtab.report.plain import plain

    def show(piece: str) -> None:
        sys.stdout.write(plain(piece))
        sys.stdout.flush()

    completion = loaded.complete(asked, stream=show, **options)
    print()
    rate = f" {format_rate(completion.tokens_per_second)} tokens/s," if completion.ids else ""
    print(f"[{len(completion.ids)} tokens,{rate} ended by {completion.finish_reason}]", file=sys.stderr)
    return 0


def _write_file(
    loaded: api.Model, prompts: Path, output: Path, options: SamplingOptions, more: dict[str, Any]
) -> int:
    from trimtab.api.batches import generate_file
    from trimtab.report import LiveView
    from trimtab.report.console import new_console
    from trimtab.report.plain import plain

    begin_work()
    before: list[int] = []
    with LiveView(console=new_console(stderr=True)) as view:

        def progress(done: int, total: int) -> None:
            if not before:
                before.append(done)
                if done:
                    view.message(f"{output} already contains {done} of {total} rows; continuing after them")
            view.progress("generating", done, total, "prompts")

        try:
            rows = generate_file(
                loaded.opened, prompts, output, options, on_progress=progress, argument_name=flag, **more
            )
        except KeyboardInterrupt:
            if before:
                view.message(f"the finished rows are in {output}; repeat the command to continue")
            raise
    print(plain(f"written: {output}, {rows} rows ({rows - before[0]} new)"))
    return 0
