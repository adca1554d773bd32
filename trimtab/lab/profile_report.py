"""The report of a recipe's profile. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.facts.tensor_kinds import TensorKind
from trimtab.facts.units import format_bytes, format_count, format_rate
from trimtab.lab.memory_sections import largest_table, peak_sentence, timeline_chart
from trimtab.lab.profile_result import Details, OperationRow, ProfileResult
from trimtab.lab.profile_tables import kernel_sections, ms, percent
from trimtab.lab.suggestions import Goal, Suggestion
from trimtab.report.document import Block, Document, Section, Table, Text

NOTHING = "–"
SMALL = 0.005
"""Operations below this share of the time are summed in the last row."""


def profile_document(result: ProfileResult, title: str, facts: tuple[str, ...]) -> Document:
    """The whole report.

    Args:
        result: the measurements and predictions.
        title: the recipe's name, with the keys that were set on the command line.
        facts: device, versions, date.
    """
    sections = tuple(profile_sections(result))
    return Document(f"Profile of {title}", facts, sections, f"trimtab profile {title}")


def profile_sections(result: ProfileResult) -> list[Section]:
    """All sections, the summary first."""
    sections = [
        Section("At a glance", tuple(_glance(result))),
        Section("What would help most", tuple(_suggestions(result))),
    ]
    if result.details is not None:
        sections += kernel_sections({"full step": result.details.kernels}, id="profile")
        sections += [
            Section("Time by operation", tuple(_operations(result, result.details))),
            Section("Memory", tuple(_memory(result, result.details))),
        ]
    sections.append(Section("What was profiled", tuple(_job(result))))
    return sections


def _glance(result: ProfileResult) -> Iterator[Block]:
    predicted, peak = result.predicted_step, result.predicted_peak
    step = NOTHING if predicted is None else f"{ms(predicted.seconds)} ms"
    rows = [
        (
            "optimizer step",
            f"{ms(result.step_seconds)} ms",
            step,
            _error(result.step_seconds, _seconds(result)),
        ),
        ("tokens per second", format_rate(result.tokens_per_second), _rate(result), ""),
    ]
    if result.update is not None:
        measured = result.update.host.median_ms / 1e3
        planned = None if predicted is None else predicted.update_seconds
        shown = NOTHING if planned is None else f"{ms(planned)} ms"
        rows.append(("optimizer alone", f"{ms(measured)} ms", shown, _error(measured, planned)))
    rows.append((_ceiling_words(result)[0], percent(result.ceiling_share), "", ""))
    if result.peak_bytes:
        rows.append(
            (
                "tensors at the peak",
                format_bytes(result.peak_bytes),
                format_bytes(peak.total),
                _error(result.peak_bytes, peak.total),
            )
        )
    yield Table("", ("", "measured", "predicted", "error of the prediction"), tuple(rows))
    yield Text(_step_text(result))
    yield Text(f"Predicted times: {result.time_basis}.")
    yield from (Text(f"Note: {note}.") for note in result.notes)


def _ceiling_words(result: ProfileResult) -> tuple[str, str]:
    """The name of the share of the device's peak rate, in a table and at the beginning of a sentence."""
    if result.ceiling.is_data_sheet:
        return "MFU", "MFU"
    product = f"of a large {result.ceiling.dtype} matrix product"
    return f"FLOP/s, share {product}", f"The share {product}"


def _step_text(result: ProfileResult) -> str:
    times, ceiling = result.times.host, result.ceiling
    text = (
        f"The step is the median of {times.repetitions}, synchronized before and after each; 10th to 90th percentile "
        f"{ms(times.low_ms / 1e3)} to {ms(times.high_ms / 1e3)} ms. {_ceiling_words(result)[1]} is the FLOPs of "
        f"forward and backward ({result.model_flops:.3g} per step, without recomputation) divided by those that the "
        f"device could do in that time: {ceiling.flops_per_second:.3g} FLOP/s, {ceiling.source}."
    )
    if ceiling.dtype != result.job.dtype:
        text += (
            f" This run computes in {result.job.dtype}, the large product in {ceiling.dtype}: the share compares "
            "two dtypes and is no utilization."
        )
    return text


def _seconds(result: ProfileResult) -> float | None:
    return None if result.predicted_step is None else result.predicted_step.seconds


def _rate(result: ProfileResult) -> str:
    seconds = _seconds(result)
    return NOTHING if seconds is None else format_rate(result.job.tokens_per_step / seconds)


def _error(measured: float, predicted: float | None) -> str:
    """The error of the prediction, relative to the measurement."""
    if predicted is None or not measured:
        return NOTHING
    return f"{predicted / measured - 1:+.1%}".replace("%", " %")


def _suggestions(result: ProfileResult) -> Iterator[Block]:
    peak = result.predicted_peak
    used = (peak.total + peak.outside) / peak.limit if peak.limit else 0.0
    yield Text(
        f"The run is predicted to need {percent(used, 0)} of its memory limit, {format_bytes(peak.limit)}, memory "
        "outside tensors included. Changes that save time come first; where the recipe fixes the recomputation and "
        "memory is tight, those that save memory. The planner predicts each change alone, for the same number of "
        "tokens per step: `trimtab plan --what-if` lists all of them. None was measured."
    )
    if not result.suggestions:
        yield Text("No change of the recipe is predicted to save 1 % of the time or of the memory.")
        return
    rows = tuple(_suggestion_row(result, suggestion) for suggestion in result.suggestions)
    head = ("change", "recipe", "step, predicted", "memory, predicted", "same training")
    yield Table("", head, rows)
    if result.predicted_step is None:
        yield Text(
            "Without rates of this device only memory is predicted; `trimtab plan --calibrate` measures them in a "
            "minute, and the next profile predicts times as well."
        )
    elif all(suggestion.goal is Goal.MEMORY for suggestion in result.suggestions):
        yield Text("No change is predicted to make the step faster: these save memory.")


def _suggestion_row(result: ProfileResult, suggestion: Suggestion) -> tuple[str, ...]:
    step = _seconds(result)
    time = NOTHING
    if suggestion.seconds is not None and step:
        time = f"{1e3 * suggestion.seconds:+,.3g} ms ({suggestion.seconds / step:+.0%})".replace("%", " %")
    memory = (
        f"{'−' if suggestion.saved > 0 else '+'}{format_bytes(abs(suggestion.saved))}"
        if suggestion.saved
        else "±0"
    )
    return (
        suggestion.name,
        ", ".join(suggestion.lines),
        time,
        memory,
        "yes" if suggestion.same_training else "no: trains differently",
    )


def _operations(result: ProfileResult, details: Details) -> Iterator[Block]:
    rows = details.operations
    total = sum(row.measured for row in rows)
    shown = [row for row in rows if max(row.measured, row.predicted or 0.0) >= SMALL * total]
    rest = [row for row in rows if row not in shown]
    yield Text(
        "Forward and backward of one microbatch, all layers together, by the operations that the planner predicts. "
        f"{percent(details.attributed)} of the measured time belongs to one of them. torch.compile and CUDA graphs "
        "are off for this measurement, and the profiler slows short operations down."
    )
    predicted = any(row.predicted is not None for row in rows)
    head: tuple[str, ...] = (
        "operation",
        "forward, ms",
        "recompute, ms",
        "backward, ms",
        "total, ms",
        "share",
    )
    head += ("predicted, ms", "error of the prediction") if predicted else ()
    table = [(*_operation_cells(row, total), *(_predicted_cells(row) if predicted else ())) for row in shown]
    if rest:
        measured, planned = sum(row.measured for row in rest), sum(row.predicted or 0.0 for row in rest)
        others = (f"{len(rest)} others", "", "", "", ms(measured), percent(measured / total))
        table.append((*others, *((ms(planned), "") if predicted else ())))
    yield Table("", head, tuple(table))


def _operation_cells(row: OperationRow, total: float) -> tuple[str, ...]:
    parts = (row.forward, row.recompute, row.backward, row.measured)
    return (row.name, *(ms(part) if part else NOTHING for part in parts), percent(row.measured / total))


def _predicted_cells(row: OperationRow) -> tuple[str, str]:
    return NOTHING if row.predicted is None else ms(row.predicted), _error(row.measured, row.predicted)


def _memory(result: ProfileResult, details: Details) -> Iterator[Block]:
    memory, peak = details.memory, result.predicted_peak
    rows = tuple(
        (
            kind.value,
            format_bytes(memory.buckets[kind.value]),
            format_bytes(peak.buckets[kind.value]),
        )
        for kind in TensorKind
    )
    rows += (("total", format_bytes(memory.peak_bytes), format_bytes(peak.total)),)
    yield Text(peak_sentence("The recorded step", memory))
    yield Table("At the peak", ("bucket", "measured", "predicted"), rows)
    recorded = "one microbatch" if details.microbatches == 1 else f"{details.microbatches} microbatches"
    yield Text(
        f"The prediction is for {peak.moment}, and includes all gradients, which exist throughout every microbatch "
        f"but the first of a step. The recorded step had {recorded}."
    )
    limit = peak.limit if peak.limit < 2 * memory.peak_bytes else None
    yield timeline_chart(memory, id="profile-memory", title="Memory over one step", limit=limit)
    yield largest_table("The largest allocations at the peak", memory.largest, memory.peak_bytes)


def _job(result: ProfileResult) -> Iterator[Block]:
    job = result.job
    rows = [
        (
            "model",
            f"{job.model}, {format_count(job.parameters)} parameters, {format_count(job.trained)} trainable",
        ),
        *job.settings.items(),
    ]
    yield Table("", ("", "value"), tuple(rows))
    yield Text(
        "Built by the functions that `trimtab train` calls, with random tokens at the recipe's sequence length: no "
        "training data is read. Gradient clipping, evaluation and checkpoints are not part of the step."
    )
