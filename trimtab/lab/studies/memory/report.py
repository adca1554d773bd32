"""The report of the memory study: peaks by context, their buckets, timelines, allocations, the residual stream.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.facts.dtypes import BYTES
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.facts.units import format_bytes
from trimtab.lab.memory_sections import bucket_cells, largest_table, peak_sentence, timeline_chart
from trimtab.lab.step_settings import Precision
from trimtab.lab.studies.memory.results import MemoryResult
from trimtab.lab.studies.memory.settings import MeasuredPass, MemorySettings
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Block, LineChart, Section, Series, Table, Text

MIB = 2**20
NOTHING = "–"
PERSISTENT_BYTES = 4 * BYTES["fp32"]
"""Bytes per parameter of weights, gradients and AdamW's two moments in fp32."""


@dataclass(frozen=True)
class Reading:
    """A cell with its outcome."""

    settings: MemorySettings
    outcome: CellOutcome
    message: str
    result: MemoryResult | None

    @property
    def text(self) -> str:
        """The peak or, where there is none, the outcome."""
        return self.outcome.value if self.result is None else format_bytes(self.result.measured_peak)

    @property
    def name(self) -> str:
        """The name in tables and charts."""
        step = self.settings.step
        return f"{step.size}, {step.context} tokens, {step.precision.value}, {self.settings.part.value}"

    @property
    def id(self) -> str:
        """The id of its chart."""
        step = self.settings.step
        words = f"memory-{step.size}-{step.context}-{step.precision.value}-{self.settings.part.value}"
        return "".join(letter if letter.isalnum() else "-" for letter in words).lower()


Measured = tuple[Reading, MemoryResult]


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """Tables and charts of all cells."""
    readings = [_reading(measurement) for measurement in measurements]
    measured = [(reading, reading.result) for reading in readings if reading.result is not None]
    report_sections = [Section("Peak memory by context", tuple(_peak_blocks(readings, measured)))]
    if measured:
        shown = _shown(measured)
        report_sections += [
            Section("What is in memory at the peak", tuple(_bucket_blocks(measured))),
            Section("Memory over time", tuple(_timeline_blocks(shown))),
            Section("The largest allocations", tuple(_largest_blocks(shown))),
            Section("The residual stream", tuple(_residual_blocks(measured))),
        ]
    if any(result.allocator is not None for _, result in measured):
        report_sections.append(Section("The allocator", tuple(_allocator_blocks(measured))))
    return report_sections


def _reading(measurement: Measurement) -> Reading:
    result = (
        MemoryResult.from_dict(measurement.result) if measurement.outcome is CellOutcome.MEASURED else None
    )
    return Reading(
        MemorySettings.from_dict(measurement.cell.settings), measurement.outcome, measurement.message, result
    )


def _peak_blocks(readings: Sequence[Reading], measured: Sequence[Measured]) -> Iterator[Block]:
    batches = sorted({reading.settings.step.batch for reading in readings})
    kinds = {(reading.settings.step.kernels.value, reading.settings.step.loss.label) for reading in readings}
    kernels = "; ".join(f"{kernels} kernels, the loss is {loss}" for kernels, loss in sorted(kinds))
    yield Text(
        "Peak memory of all tensors, in a run without the recorder. Forward is inference: nothing is saved for a "
        "backward pass, and there is no optimizer. A full step is forward, backward and AdamW. Weights are fp32 in "
        f"every precision; bf16 and fp16 run under autocast. Batch {', '.join(map(str, batches))}; {kernels}."
    )
    contexts = sorted({reading.settings.step.context for reading in readings})
    for part in MeasuredPass:
        rows = _peak_rows([reading for reading in readings if reading.settings.part is part], contexts)
        if rows:
            head = ("model", "precision", *(f"{context} tokens" for context in contexts))
            yield Table(f"Peak of a {part.value}".replace("forward", "forward pass"), head, rows)
    for part in MeasuredPass:
        chart = _peak_chart([reading for reading in readings if reading.settings.part is part], part)
        if chart is not None:
            yield chart
    yield from (Text(text) for text in _growth(measured))
    ended = [
        reading
        for reading in readings
        if reading.message and reading.outcome is not CellOutcome.OUT_OF_MEMORY
    ]
    yield from (Text(f"{reading.name}: {reading.outcome.value}: {reading.message}") for reading in ended)


def _peak_rows(readings: Sequence[Reading], contexts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for reading in readings:
        step = reading.settings.step
        lines.setdefault((step.size, step.precision.value), {})[step.context] = reading.text
    return tuple((*key, *(cells.get(c, NOTHING) for c in contexts)) for key, cells in lines.items())


def _peak_chart(readings: Sequence[Reading], part: MeasuredPass) -> LineChart | None:
    if len({reading.settings.step.context for reading in readings}) < 2 or not any(
        reading.result for reading in readings
    ):
        return None
    lines: dict[str, dict[int, float | None]] = {}
    for reading in readings:
        step = reading.settings.step
        peak = None if reading.result is None else float(reading.result.measured_peak)
        lines.setdefault(f"{step.size}, {step.precision.value}", {})[step.context] = peak
    series = tuple(Series(name, tuple(sorted(values.items()))) for name, values in lines.items())
    words = part.value.replace(" ", "-")
    title = f"Peak memory over context length, {part.value}"
    x_label = "context length, tokens"
    return LineChart(f"memory-peak-{words}", title, x_label, "bytes", series, log_x=True, log_y=True)


def _growth(measured: Sequence[Measured]) -> Iterator[str]:
    """How peaks grow with the context, and how much memory 16 bits save."""
    groups: dict[tuple[str, Precision, MeasuredPass], list[Measured]] = {}
    for cell in measured:
        step = cell[0].settings.step
        groups.setdefault((step.size, step.precision, cell[0].settings.part), []).append(cell)
    for (size, precision, part), cells in groups.items():
        first, last = (
            min(cells, key=lambda cell: cell[0].settings.step.context),
            max(cells, key=lambda cell: cell[0].settings.step.context),
        )
        before, after = first[0].settings.step.context, last[0].settings.step.context
        if part is not MeasuredPass.FULL or before == after:
            continue
        activations = [cell[1].memory.buckets[TensorKind.ACTIVATIONS.value] for cell in (first, last)]
        yield (
            f"{size} in {precision.value}: from {before} to {after} tokens, {after / before:g} times as many, the "
            f"activations of a full step grow {activations[1] / max(activations[0], 1):.1f}-fold and its peak "
            f"{last[1].measured_peak / first[1].measured_peak:.1f}-fold."
        )
    yield from _saved_by_precision(groups)


def _saved_by_precision(groups: dict[tuple[str, Precision, MeasuredPass], list[Measured]]) -> Iterator[str]:
    for (size, precision, part), cells in groups.items():
        wide = {cell[0].settings.step.context: cell for cell in groups.get((size, Precision.FP32, part), [])}
        if not precision.is_mixed or part is not MeasuredPass.FULL:
            continue
        both = [
            (cell, wide[cell[0].settings.step.context])
            for cell in cells
            if cell[0].settings.step.context in wide
        ]
        if not both:
            continue
        narrow, full = max(both, key=lambda pair: pair[0][0].settings.step.context)
        activations = [cell[1].memory.buckets[TensorKind.ACTIVATIONS.value] for cell in (narrow, full)]
        persistent = [
            sum(cell[1].memory.buckets[kind.value] for kind in (TensorKind.WEIGHTS, TensorKind.OPTIMIZER))
            for cell in (narrow, full)
        ]
        yield (
            f"{narrow[0].name}: {format_bytes(narrow[1].measured_peak)} against "
            f"{format_bytes(full[1].measured_peak)} in fp32. Activations, copies of weights in 16 bits included, take "
            f"{format_bytes(activations[0])} against {format_bytes(activations[1])}; weights and optimizer states take "
            f"{format_bytes(persistent[0])} against {format_bytes(persistent[1])}."
        )


def _bucket_blocks(measured: Sequence[Measured]) -> Iterator[Block]:
    predicted = any(result.predicted_peak is not None for _, result in measured)
    head = ("cell", *(kind.value for kind in TensorKind), "peak", "reached in")
    head += ("predicted", "error") if predicted else ()
    rows = []
    for reading, result in measured:
        row = (reading.name, *bucket_cells(result.memory), reading.text, result.memory.phase)
        rows.append(row + (_predicted_cells(result) if predicted else ()))
    yield Text(
        "The same run, repeated with every block recorded. Gradients are those that exist at the moment of the peak, "
        "so that a peak at the start of the backward pass has few of them."
    )
    yield Table("", head, tuple(rows))
    for reading, result in measured:
        difference = result.memory.peak_bytes - result.measured_peak
        if abs(difference) > MIB:
            yield Text(
                f"{reading.name}: the recorded run peaks {format_bytes(abs(difference))} "
                f"{'above' if difference > 0 else 'below'} the run without the recorder."
            )
    full = [(reading, result) for reading, result in measured if reading.settings.part is MeasuredPass.FULL]
    if full:
        reading, result = full[-1]
        persistent = result.parameters * PERSISTENT_BYTES
        yield Text(
            f"Weights, gradients and AdamW's two moments in fp32 take {PERSISTENT_BYTES} bytes per parameter: "
            f"{format_bytes(persistent)} for the {result.parameters:,} parameters of {reading.settings.step.size}, at "
            "any context."
        )


def _predicted_cells(result: MemoryResult) -> tuple[str, str]:
    if result.predicted_peak is None:
        return NOTHING, NOTHING
    error = result.predicted_peak / result.measured_peak - 1
    return format_bytes(result.predicted_peak), f"{error:+.1%}".replace("%", " %")


def _shown(measured: Sequence[Measured]) -> list[Measured]:
    """Selects the cells to draw: the longest measured context of each model, precision and pass."""
    longest: dict[tuple[str, Precision, MeasuredPass], Measured] = {}
    for cell in measured:
        step = cell[0].settings.step
        key = (step.size, step.precision, cell[0].settings.part)
        if key not in longest or step.context > longest[key][0].settings.step.context:
            longest[key] = cell
    return list(longest.values())


def _timeline_blocks(shown: Sequence[Measured]) -> Iterator[Block]:
    yield Text(
        "Stacked from the bottom: persistent memory, then gradients, then activations by part. The axis counts "
        "allocations and releases, not time, which recording distorts; small ones count in the levels, but not on the "
        "axis. The chart shows the longest measured context of each model, precision and pass."
    )
    for reading, result in shown:
        yield timeline_chart(result.memory, id=reading.id, title=f"Memory of {reading.name}")
        yield Text(peak_sentence(reading.name, result.memory))


def _largest_blocks(shown: Sequence[Measured]) -> Iterator[Block]:
    yield Text(
        "Equal allocations that are live at the peak share a row; * stands for the layer index. The line is the "
        "innermost one in trimtab that ran the operation; a block of the backward pass has the line of its forward "
        "operation."
    )
    for reading, result in shown:
        yield largest_table(reading.name, result.memory.largest, result.memory.peak_bytes)


def _residual_blocks(measured: Sequence[Measured]) -> Iterator[Block]:
    yield Text(
        "One tensor of the residual stream has batch × context × d_model × bytes per element: the stream is in fp32, "
        "under autocast too, because the weights are. The embedding makes the first such tensor and each layer two "
        "more, after attention and after the feed-forward: 1 + 2 × layers. Norms, projections and gradients of the "
        "stream have the same size, so that the run makes many more allocations of exactly that size."
    )
    head = (
        "cell",
        "computed",
        "bytes",
        "the stream itself",
        "1 + 2 × layers",
        "all of that size",
        "most by module",
    )
    rows = []
    for reading, result in measured:
        stream = result.residual
        makers: dict[str, int] = {}
        for size in stream.found:
            makers[size.module] = makers.get(size.module, 0) + size.count
        first = max(makers, key=lambda module: makers[module], default=None)
        rows.append(
            (
                reading.name,
                f"{stream.batch} × {stream.context} × {stream.width:,} × {stream.element_bytes}",
                format_bytes(stream.nbytes),
                f"{stream.own:,}",
                f"{1 + 2 * stream.layers:,}",
                f"{stream.count:,}",
                NOTHING if first is None else f"{first or 'outside of modules'} ({makers[first]})",
            )
        )
    yield Table("", head, tuple(rows))


def _allocator_blocks(measured: Sequence[Measured]) -> Iterator[Block]:
    yield Text(
        "torch's caching allocator reserves GPU memory in segments, cuts blocks from them and caches released blocks. "
        "Memory reserved beyond the peak of the tensors is rounding, fragmentation and cached blocks."
    )
    head = (
        "cell",
        "tensors at the peak",
        "reserved at the peak",
        "beyond tensors",
        "segments",
        "largest free block",
    )
    rows = []
    for reading, result in measured:
        if result.allocator is not None:
            reserved = result.allocator.reserved_peak
            rows.append(
                (
                    reading.name,
                    reading.text,
                    format_bytes(reserved),
                    format_bytes(reserved - result.measured_peak),
                    f"{result.allocator.segments:,}",
                    format_bytes(result.allocator.largest_free_block),
                )
            )
    yield Table("", head, tuple(rows))
