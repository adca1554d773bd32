"""`trimtab eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from trimtab.cli.interrupts import begin_work
from trimtab.cli.options import Adapter, Checkpoint, Device, Dtype, Revision
from trimtab.cli.verb import new_app
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import path_of
from trimtab.report.console import new_console

app = new_app()


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a GGUF file, a hub id, or `starter`.")
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to measure the loss on: files, folders, globs, hub datasets or `starter:general`."
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Score grammar, transitivity and arithmetic by likelihood.")
    ] = True,
    answers: Annotated[int, typer.Option(min=0, help="Number of held-out problems to answer.")] = 0,
    max_seq_length: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Sequence length in tokens; by default 512, or the model's context length if that is shorter.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Maximum number of sequences per text.")] = 64,
    windows: Annotated[
        int | None, typer.Option(min=1, hidden=True, help="Former name of --sequences.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 8,
    checkpoint: Checkpoint = "latest",
    adapter: Adapter = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the tokenized texts; ~/.cache/trimtab/tokens by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON lines.")] = False,
) -> None:
    """Evaluate a model: loss and perplexity on text, a probe of grammar and reasoning, exact answers.

    Loss is in nats per token, averaged over all predicted tokens. Documents are packed and do not attend to each other.
    Intervals are 95% confidence intervals for text or problems of this kind. Two models measured on the same items can
    differ significantly even if their intervals overlap.

        trimtab eval runs/demo starter:general ./my-notes --answers 60
        trimtab eval HuggingFaceTB/SmolLM2-135M data/*.txt --json

    Texts are written like the data sources of a recipe.
    """
    from trimtab.run.device import require_torch

    if not (texts or probe or answers):
        raise RecipeError(
            "--no-probe without a text leaves nothing to measure", "name a text, or omit --no-probe"
        )
    if windows is not None:
        print("note: --windows is now --sequences", file=sys.stderr)
        sequences = windows
    require_torch()
    from trimtab.api import load
    from trimtab.report import LiveView
    from trimtab.run.evaluation import evaluate_model

    opened = load(
        model, revision=revision, checkpoint=checkpoint, adapter=adapter, dtype=dtype, device=device
    ).opened
    console = new_console(stderr=as_json)
    begin_work()
    with LiveView(console=console) as view:
        records = evaluate_model(
            opened,
            texts or [],
            view,
            probe=probe,
            answers=answers,
            max_seq_length=max_seq_length,
            max_sequences=sequences,
            batch_size=batch_size,
            cache_dir=None if cache_dir is None else path_of(cache_dir, "--cache-dir"),
        )
    if as_json:
        for record in records:
            print(json.dumps(record))
    else:
        console.print(_table(records))


def _table(records: list[dict[str, Any]]) -> Table:
    from trimtab.report.plain import as_text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("measured", overflow="fold")
    table.add_column("result", justify="right", no_wrap=True)
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for record in records:
        if record["kind"] == "eval":
            table.add_row(
                as_text(f"loss on {record['name']}"),
                f"{record['loss']:.4f} (perplexity {record['perplexity']:.2f})",
                _loss_interval(record["units"]),
                f"{record['tokens']} tokens",
            )
        elif record["kind"] == "answers":
            table.add_row("exact answers", *_share(record["exact"], record["total"]))
        elif record["kind"] == "probe":
            results = record["right"]
            whole = "".join(results.values())
            for kind, right in {"all": whole, **results}.items() if len(results) > 1 else results.items():
                table.add_row(as_text(f"probe: {kind}"), *_share(right.count("1"), len(right)))
    return table


def _share(right: int, total: int) -> tuple[str, str]:
    """Returns `17 of 18` and the exact confidence interval of the share, in percent."""
    from trimtab.report.distributions import exact_share_interval

    low, high = exact_share_interval(right, total)
    return f"{right} of {total}", f"{100 * low:.0f}% to {100 * high:.0f}%"


def _loss_interval(units: dict[str, Any]) -> str:
    """Returns the confidence interval of the loss over documents; empty if there are too few documents."""
    from trimtab.report.paired import weighted_mean

    mean = weighted_mean(units["losses"], units["tokens"])
    if mean is None:
        return ""
    low, high = mean.interval()
    return f"{low:.3f} to {high:.3f}"
