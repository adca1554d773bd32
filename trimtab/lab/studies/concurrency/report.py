"""The report of the concurrency study: threads, coroutines, processes and batches compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.facts.units import format_bytes
from trimtab.lab.studies.concurrency.cells import ConcurrencySettings
from trimtab.lab.studies.concurrency.generated import Generated
from trimtab.lab.studies.concurrency.ways import Way
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Bar, BarChart, Block, Section, Table, Text

MISSING = "–"
WHY = {
    Way.THREADS: (
        "Python runs the bytecode of one thread at a time (the global interpreter lock, GIL); torch releases it inside "
        "its kernels. Threads therefore overlap only where kernels are long, and a small model spends much of its "
        "time between kernels. Threads share one model, so memory hardly grows."
    ),
    Way.ASYNCIO: (
        "Coroutines switch only where they await something. Generation awaits nothing, so coroutines that call the "
        "model directly run one after the other; asyncio helps where a model is behind a network."
    ),
    Way.ASYNCIO_THREADS: (
        "Coroutines that hand each call to a pool of threads and await it (`run_in_executor`) are threads again, with "
        "an event loop that stays free for other work."
    ),
    Way.PROCESSES: (
        "Each process has its own interpreter and GIL, so processes overlap fully, but each loads the model: memory "
        "and startup work are multiplied by their number."
    ),
    Way.BATCH: (
        "A batch needs no concurrency at all: one pass through the model adds a token to every row. Reading the "
        "weights and running Python code costs the same for one row as for many, so the cost per token falls."
    ),
}
"""Properties of each way that hold on any machine."""


@dataclass(frozen=True)
class _Group:
    """Ways over the same prompts with the same model."""

    job: ConcurrencySettings
    results: Mapping[Way, Generated]
    failures: Mapping[Way, Measurement]

    @property
    def ways(self) -> list[Way]:
        return [way for way in Way if way in self.results or way in self.failures]

    def speed_up(self, way: Way) -> float | None:
        """Speed-up over one by one; None where one of the two is missing."""
        first, generated = self.results.get(Way.ONE_BY_ONE), self.results.get(way)
        return None if first is None or generated is None else first.seconds / generated.seconds

    def different(self, way: Way) -> int:
        """Number of completions that differ from those of the first way."""
        first = next(iter(self.results.values())).digests
        return sum(a != b for a, b in zip(first, self.results[way].digests, strict=True))


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """One section per model, file and settings."""
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for measurement in measurements:
        key = tuple(value for name, value in measurement.cell.settings.items() if name != "way")
        groups.setdefault(key, []).append(measurement)
    return [_section(_group(members)) for members in groups.values()]


def _group(measurements: Sequence[Measurement]) -> _Group:
    results, failures = {}, {}
    for measurement in measurements:
        way = Way(measurement.cell.settings["way"])
        if measurement.outcome is CellOutcome.MEASURED:
            results[way] = Generated(**measurement.result)
        else:
            failures[way] = measurement
    ordered = {way: results[way] for way in Way if way in results}
    return _Group(ConcurrencySettings(**measurements[0].cell.settings), ordered, failures)


def _section(group: _Group) -> Section:
    job = group.job
    source = job.file or "the built-in problems of mathematics"
    blocks: list[Block] = [
        Text(
            f"Model {job.model} on {job.device}, prompts from {source}, at most {job.max_new_tokens} new tokens each, "
            f"greedy decoding; {job.workers} workers on {job.cores} CPU cores. Each way was timed once, after loading "
            "the model and one warm-up prompt."
        ),
        _table(group),
    ]
    if group.results:
        blocks += [_chart(group), Text(_compare_completions(group))]
        blocks += [Text(f"{_measured(group, way)} {why}") for way, why in WHY.items() if way in group.results]
        blocks.append(Text(_conclusion(group)))
    return Section(f"{job.model}: {len(group.results)} ways to generate one file", tuple(blocks))


def _table(group: _Group) -> Table:
    on_gpu = any(generated.device_bytes is not None for generated in group.results.values())
    head = (
        "way",
        "seconds",
        "tokens/s",
        "speed-up",
        "start, s",
        "processes",
        "peak memory",
        *(("GPU memory",) if on_gpu else ()),
        "same completions",
    )
    rows = []
    for way in group.ways:
        generated = group.results.get(way)
        if generated is None:
            failed = group.failures[way]
            rows.append((way.value, failed.outcome.value, *(MISSING for _ in head[2:])))
            continue
        factor = group.speed_up(way)
        same = len(generated.digests) - group.different(way)
        rows.append(
            (
                way.value,
                f"{generated.seconds:.2f}",
                f"{generated.tokens / generated.seconds:,.0f}",
                MISSING if factor is None else f"{factor:.2f}×",
                f"{generated.start_seconds:.1f}",
                str(generated.processes),
                format_bytes(generated.host_bytes),
                *((_device_bytes(generated),) if on_gpu else ()),
                f"{same} of {len(generated.digests)}",
            )
        )
    note = (
        "Speed-up over one by one. Start: until all processes have loaded the model; not part of the seconds. Peak "
        "memory: resident memory of all processes; shared libraries are counted in each."
    )
    return Table("", head, tuple(rows), note)


def _device_bytes(generated: Generated) -> str:
    return MISSING if generated.device_bytes is None else format_bytes(generated.device_bytes)


def _chart(group: _Group) -> BarChart:
    bars = tuple(
        Bar(way.value, (("generating", generated.seconds),), f"{generated.seconds:.2f} s")
        for way, generated in group.results.items()
    )
    return BarChart(f"concurrency-{group.job.digest}", "Seconds for all prompts", "s", bars)


def _compare_completions(group: _Group) -> str:
    different = {way: group.different(way) for way in group.results if group.different(way)}
    if not different:
        return "All ways returned the same completions, character by character."
    first = next(iter(group.results)).value
    listed = ", ".join(f"{way.value} {count}" for way, count in different.items())
    return (
        f"Completions that differ from those of {first}: {listed}. Other batch shapes or thread counts add in another "
        "order; where two tokens are almost equally likely, rounding decides."
    )


def _measured(group: _Group, way: Way) -> str:
    """The measured speed-up and memory of a way."""
    factor, generated = group.speed_up(way), group.results[way]
    name = f"{way.value[0].upper()}{way.value[1:]}"
    if factor is None:
        return f"{name}: {generated.seconds:.2f} s."
    text = f"{name}: {factor:.2f}× the speed of one by one"
    first = group.results[Way.ONE_BY_ONE]
    if generated.processes > 1:
        text += f", with {generated.host_bytes / first.host_bytes:.1f}× the memory"
    return f"{text}."


def _conclusion(group: _Group) -> str:
    best = min(group.results, key=lambda way: group.results[way].seconds)
    text = f"Fastest here: {best.value}, {group.results[best].seconds:.2f} s."
    if best is not Way.BATCH and Way.BATCH in group.results:
        ratio = group.results[Way.BATCH].seconds / group.results[best].seconds
        text += f" A batch took {ratio:.2f}× as long, in one process."
    return text + " Batches and processes can be combined where one process does not fill the machine."
