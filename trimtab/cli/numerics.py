"""`trimtab numerics`: values that dtypes store, and the error of sums, casts and quantization."""

from __future__ import annotations

from trimtab.cli.numerics_accumulate import accumulate
from trimtab.cli.numerics_autocast import autocast
from trimtab.cli.numerics_bits import bits
from trimtab.cli.numerics_quantize import quantize
from trimtab.cli.verb import new_app

app = new_app()


@app.callback()
def numerics() -> None:
    """Show the rounding errors of dtypes: storage, sums, casts and quantization.

    Each study takes seconds, prints tables and, with `--out FOLDER`, writes records and a report with charts.
    """


app.command(context_settings={"ignore_unknown_options": True})(bits)
app.command()(accumulate)
app.command()(autocast)
app.command()(quantize)
