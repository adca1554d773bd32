"""The report of the compile study: graph breaks, recompilations, compile time, speed-up. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.lab.profile_tables import ms, percent
from trimtab.lab.studies.compile.results import CompileResult
from trimtab.lab.studies.compile.settings import Backend
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Bar, BarChart, Block, Section, Table, Text

MOST_PROGRAMS = 30
"""Programs that a QLoRA model may need over many lengths before compiling costs more than it gains."""
SHOWN_REASONS = 12
"""Reasons shown for each cell; the others are only counted."""


@dataclass(frozen=True)
class Row:
    """One measured cell."""

    name: str
    measurement: Measurement
    result: CompileResult

    @property
    def traces_only(self) -> bool:
        """Whether the backend generates no code, so that there is nothing to gain."""
        return Backend(self.measurement.cell.settings["backend"]) is not Backend.INDUCTOR


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """All tables of the study; cells that were not measured are listed with their outcome."""
    rows = [
        Row(cell_name(m), m, CompileResult.from_dict(m.result))
        for m in measurements
        if m.outcome is CellOutcome.MEASURED
    ]
    report_sections = [Section("What was compiled", _what_was_compiled(measurements))]
    if not rows:
        return report_sections
    report_sections += [
        _programs_section(rows),
        _breaks_section(rows),
        _reasons_section(rows),
        _lengths_section(rows),
    ]
    timed = [row for row in rows if not row.traces_only]
    if timed:
        report_sections += [_seconds_section(timed), _gain_section(timed)]
    return report_sections


def cell_name(measurement: Measurement) -> str:
    """The name of a cell in the report: "small qlora, regions, dynamic"."""
    settings = measurement.cell.settings
    model = " ".join(str(word) for word in (settings["size"], settings["method"]) if word)
    return f"{model}, {settings['scope']}, {settings['shapes']}"


def _what_was_compiled(measurements: Sequence[Measurement]) -> tuple[Block, ...]:
    first = measurements[0].cell.settings
    lengths = ", ".join(str(tokens) for tokens in first["lengths"])
    text = (
        "A training step (forward and backward pass, cross entropy, random weights and tokens), built as `trimtab "
        "train` builds it and then compiled. Scope `regions` compiles each block, as `torch_compile: true` does, and "
        "`whole` the model with its loss as one program. Shapes: `dynamic` requests programs that serve every length, "
        "`static` one per length, `auto` is torch's default. Each cell runs the lengths "
        f"{lengths}, in this order, at batch size {first['batch']}, in its own process. Backend: "
        f"{first['backend']}."
    )
    blocks: list[Block] = [Text(text)]
    others = [m for m in measurements if m.outcome is not CellOutcome.MEASURED]
    if others:
        table = tuple((cell_name(m), m.outcome.value, m.message) for m in others)
        blocks.append(Table("Not measured", ("cell", "outcome", "reason"), table))
    return tuple(blocks)


def _programs_section(rows: Sequence[Row]) -> Section:
    table = tuple(
        (
            row.name,
            str(len(row.result.cold.breaks)),
            str(row.result.cold.graphs),
            str(len(row.result.cold.recompilations)),
            str(len(row.result.lengths)),
            f"{row.result.loss_difference:.1e}",
            f"{row.result.gradient_difference:.1e}",
        )
        for row in rows
    )
    head = (
        "cell",
        "graph breaks",
        "programs",
        "recompilations",
        "lengths",
        "loss: largest difference to eager",
        "gradient norm: largest difference to eager",
    )
    whole = [row.name for row in rows if not row.result.cold.breaks]
    many = [row.name for row in rows if row.result.cold.graphs > MOST_PROGRAMS]
    text = (
        f"{len(whole)} of {len(rows)} cells are traced without a graph break. "
        + (
            f"More than {MOST_PROGRAMS} programs are needed by: {'; '.join(many)}. "
            if many
            else f"None needs more than {MOST_PROGRAMS} programs. "
        )
        + "Differences are relative to the eager values; fused operations round at other places than eager mode does."
    )
    return Section("Graph breaks, programs and agreement", (Table("", head, table), Text(text)))


def _breaks_section(rows: Sequence[Row]) -> Section:
    table = tuple(
        (row.name, graph_break.place, graph_break.reason, str(graph_break.count))
        for row in rows
        for graph_break in row.result.cold.breaks
    )
    if not table:
        return Section("Where graphs break", (Text("No graph breaks in any cell."),))
    text = (
        "At each of these places a graph ends and Python takes over: intermediate results go through memory, and "
        "nothing is fused across the break."
    )
    return Section("Where graphs break", (Table("", ("cell", "place", "reason", "times"), table), Text(text)))


def _reasons_section(rows: Sequence[Row]) -> Section:
    """Every recompilation by function and reason; equal ones are counted."""
    table: list[tuple[str, ...]] = []
    for row in rows:
        recompilations = row.result.cold.recompilations
        counted = Counter(
            (compilation.function, compilation.place, compilation.reason) for compilation in recompilations
        )
        for key, count in list(counted.items())[:SHOWN_REASONS]:
            function, place, reason = key
            seconds = sum(
                compilation.seconds
                for compilation in recompilations
                if (compilation.function, compilation.place, compilation.reason) == key
            )
            table.append((row.name, f"{function} ({place})", reason, str(count), f"{seconds:.1f}"))
        if len(counted) > SHOWN_REASONS:
            table.append((row.name, f"{len(counted) - SHOWN_REASONS} more reasons", "", "", ""))
    title = "Recompilations and their reasons"
    if not table:
        return Section(title, (Text("No recompilation in any cell."),))
    text = (
        "A compiled program is valid while its guards hold: the assumptions that were made during tracing. The reason "
        "names the guard that failed. A size mismatch means that the length was treated as a constant."
    )
    head = ("cell", "function", "reason: the guard that failed", "times", "seconds")
    return Section(title, (Text(text), Table("", head, tuple(table))))


def _lengths_section(rows: Sequence[Row]) -> Section:
    """Seconds of the first step at each length."""
    lengths = list(dict.fromkeys(length.tokens for row in rows for length in row.result.lengths))
    table = []
    for row in rows:
        seconds = {length.tokens: f"{length.first_seconds:.2f}" for length in row.result.lengths}
        table.append((row.name, *(seconds.get(tokens, "–") for tokens in lengths)))
    head = ("cell", *(f"{tokens} tokens, s" for tokens in lengths))
    each = [r for r in rows if len(r.result.cold.recompilations) >= len(r.result.lengths) - 1 > 0]
    once = [row for row in rows if not row.result.cold.recompilations]
    text = "The first step at each length, in the order in which they run, compilation included. "
    if once:
        text += f"One compilation serves all lengths in: {'; '.join(row.name for row in once)}. "
    if each:
        text += f"Each new length is recompiled in: {'; '.join(row.name for row in each)}."
    return Section("The first step at each length", (Table("", head, tuple(table)), Text(text.strip())))


def _seconds_section(rows: Sequence[Row]) -> Section:
    table, bars = [], []
    for row in rows:
        cold, warm = row.result.cold, row.result.warm
        saved = "–" if warm is None or not cold.seconds else percent(1 - warm.seconds / cold.seconds, 0)
        table.append(
            (
                row.name,
                str(cold.graphs),
                f"{cold.seconds:.1f}",
                "–" if warm is None else f"{warm.seconds:.1f}",
                saved,
                "–" if warm is None else str(warm.cached),
            )
        )
        bars.append(Bar(f"{row.name}: cold", (("seconds", cold.seconds),), f"{cold.seconds:.1f} s"))
        if warm is not None:
            bars.append(Bar(f"{row.name}: warm", (("seconds", warm.seconds),), f"{warm.seconds:.1f} s"))
    head = ("cell", "programs", "cold cache, s", "warm cache, s", "saved", "graphs from the cache")
    text = (
        "Cold starts with an empty cache folder. Warm is a second process with the first one's cache, like a second "
        "run of the same recipe: it traces and builds guards again, but generates no code."
    )
    chart = BarChart("compile-seconds", "Seconds of compilation", "s", tuple(bars))
    return Section("Seconds of compilation", (Table("", head, tuple(table)), chart, Text(text)))


def _gain_section(rows: Sequence[Row]) -> Section:
    table = tuple(
        (
            row.name,
            str(row.result.timed_tokens),
            ms(row.result.eager_ms / 1e3),
            ms(row.result.compiled_ms / 1e3),
            f"{row.result.speedup:.2f} ×",
            _steps(row.result.steps_to_break_even(row.result.cold.seconds)),
            "–"
            if row.result.warm is None
            else _steps(row.result.steps_to_break_even(row.result.warm.seconds)),
        )
        for row in rows
    )
    head = (
        "cell",
        "tokens",
        "eager, ms",
        "compiled, ms",
        "speed-up",
        "steps to break even, cold",
        "steps to break even, warm",
    )
    best = max(rows, key=lambda row: row.result.speedup)
    text = (
        "Forward and backward pass at the first length, by the host's clock, synchronized; the optimizer is compiled "
        f"in neither. The largest speed-up is {best.result.speedup:.2f} × ({best.name}). Compiling breaks even "
        "after the number of steps in the last columns; “never” where a compiled step is not faster."
    )
    return Section("What compiling gains", (Table("", head, table), Text(text)))


def _steps(count: float | None) -> str:
    return "never" if count is None else f"{count:,.0f}"
