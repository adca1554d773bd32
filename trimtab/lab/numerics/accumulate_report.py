"""The report on sums whose accumulator and addends differ in dtype."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.numerics.accumulate import SEEDS, AccumulateStudy, Method, SumRow
from trimtab.lab.numerics.number_text import short_decimal
from trimtab.report.document import Block, Document, LineChart, Section, Series, Table, Text

HEAD = ("sum += addend", "result", "error", "relative error", "from the addend", "from adding")
FOUR_CASES = (
    ("fp32", "fp32", Method.PLAIN),
    ("fp16", "fp16", Method.PLAIN),
    ("fp32", "fp16", Method.PLAIN),
    ("fp32", "fp16", Method.CAST),
)
CHARTED = (
    ("fp32", "fp32", Method.PLAIN),
    ("fp16", "fp16", Method.PLAIN),
    ("bf16", "bf16", Method.PLAIN),
    ("bf16", "bf16", Method.KAHAN),
    ("bf16", "fp32", Method.STOCHASTIC),
)


def accumulation_document(
    study: AccumulateStudy, facts: Sequence[str] = (), command: str = "trimtab numerics accumulate"
) -> Document:
    """The report.

    Example:
        >>> from trimtab.lab.numerics.accumulate import study_accumulation
        >>> accumulation_document(study_accumulation("0.1", 10)).title
        'Adding 0.1 10 times'
    """
    sections = (_sums(study), _stagnation(study), _better_ways(study), _running(study))
    return Document(f"Adding {study.text} {study.count} times", tuple(facts), sections, command)


def _find(study: AccumulateStudy, sum_format: str, addend: str, method: Method) -> SumRow:
    return next(
        row
        for row in study.rows
        if (row.sum_format, row.addend_format, row.method) == (sum_format, addend, method)
    )


def _name(row: SumRow) -> str:
    name = f"{row.sum_format} += {row.addend_format}"
    word = {
        Method.CAST: f" cast to {row.sum_format}",
        Method.KAHAN: ", Kahan",
        Method.STOCHASTIC: ", stochastic",
    }
    return name + word.get(row.method, "")


def _cells(row: SumRow) -> tuple[str, ...]:
    parts = (row.addend_error, row.adding_error)
    return (
        _name(row),
        f"{row.result:.9g}",
        f"{row.error:.3g}",
        f"{row.relative_error:.2g}",
        *("" if part is None else f"{part:.3g}" for part in parts),
    )


def _sums(study: AccumulateStudy) -> Section:
    exact = short_decimal(study.value * study.count, 9)
    four = [_find(study, *case) for case in FOUR_CASES]
    plain = [row for row in study.rows if row.method is Method.PLAIN]
    blocks: list[Block] = [
        Text(
            f"The exact sum is {exact}. An error has two parts: the addend was rounded to its dtype once, and the "
            "sum was rounded to its own after every addition."
        ),
        Table("Four combinations of fp32 and fp16", HEAD, tuple(map(_cells, four))),
        Text(_lesson(four)),
        Table("Every mixture", HEAD, tuple(map(_cells, plain)), note=_mixture_note(plain)),
    ]
    return Section("Sums", tuple(blocks))


def _lesson(four: Sequence[SumRow]) -> str:
    """Summarizes the four cases, from the computed rows."""
    narrow, mixed, cast = four[1], four[2], four[3]
    sentences = []
    if None not in (mixed.addend_error, mixed.adding_error):
        before, after = abs(mixed.addend_error or 0.0), abs(mixed.adding_error or 0.0)
        where = "there before anything is added" if before >= after else "made while adding"
        sentences.append(f"With an fp32 sum of fp16 addends, most of the error is {where}.")
    if mixed.result == cast.result:
        sentences.append("Casting the addend first changes nothing: torch adds in the wider dtype by itself.")
    if abs(narrow.error) > abs(mixed.error):
        sentences.append(
            "The sum in fp16 is further off than the fp32 sum of the same addends: an accumulator needs more bits "
            "than its addends."
        )
    return " ".join(sentences)


def _mixture_note(rows: Sequence[SumRow]) -> str:
    wide = max((row.relative_error for row in rows if row.sum_format in ("fp64", "fp32")), default=0.0)
    narrow = max((row.relative_error for row in rows if row.sum_format in ("fp16", "bf16")), default=0.0)
    return f"Largest relative error of fp64 and fp32 sums: {wide:.2g}; of fp16 and bf16 sums: {narrow:.2g}."


def _stagnation(study: AccumulateStudy) -> Section:
    rows = [row for row in study.rows if row.method is Method.PLAIN and row.sum_format != "fp64"]
    cells = []
    for row in rows:
        stagnation = row.stagnation
        if stagnation is None:
            cells.append((_name(row), "never: it overflows first", "", "", ""))
            continue
        reached = f"addition {stagnation.step}" if stagnation.step else f"not in {study.count} additions"
        cells.append(
            (
                _name(row),
                short_decimal(stagnation.total, 9),
                short_decimal(stagnation.spacing, 4),
                short_decimal(stagnation.spacing / 2, 4),
                reached,
            )
        )
    table = Table(
        "Where a sum stops growing",
        ("sum += addend", "at a total of", "spacing there", "half of it", "reached at"),
        tuple(cells),
    )
    text = (
        "A sum stops growing where the addend is at most half of the distance to the next number: the result is "
        f"rounded back to the old sum, however often {study.text} is added."
    )
    stuck = [_name(row) for row in rows if row.stagnation is not None and row.stagnation.step]
    seen = f" That happened here to {', '.join(stuck)}." if stuck else " None of these sums got that far."
    return Section("Stagnation", (Text(text + seen), table))


def _better_ways(study: AccumulateStudy) -> Section:
    rows = [row for row in study.rows if row.method in (Method.KAHAN, Method.STOCHASTIC)]
    plain = [_find(study, row.sum_format, row.addend_format, Method.PLAIN) for row in rows]
    table = Table(
        "",
        (*HEAD[:4], "plain sum's error"),
        tuple((*_cells(a)[:4], f"{b.error:.3g}") for a, b in zip(rows, plain, strict=True)),
    )
    spread = next(row.spread for row in rows if row.spread is not None)
    text = (
        "Kahan summation keeps the rounding error of each addition in a second variable of the same dtype and adds "
        "it to the next addend. Stochastic rounding goes up or down with a probability proportional to the distance, "
        "so that the sum is right on average; trimtab's optimizers round bf16 weights this way. Its result is the "
        f"mean of {SEEDS} sums, which ranged from {spread[0]:.6g} to {spread[1]:.6g}."
    )
    return Section("Better sums in 16 bits", (Text(text), table))


def _running(study: AccumulateStudy) -> Section:
    rows = [_find(study, *case) for case in CHARTED]
    exact = tuple((float(step), float(study.value * step)) for step, _ in rows[0].curve)
    series = [Series("exact", exact)]
    series += [
        Series(_name(row), tuple((float(step), _finite(total)) for step, total in row.curve)) for row in rows
    ]
    chart = LineChart("running-sum", "Running sums", "additions", "sum", tuple(series))
    return Section("Running sums", (chart,))


def _finite(total: float) -> float | None:
    return total if abs(total) < float("inf") else None
