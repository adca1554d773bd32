"""Compares steps that differ in one setting: precision, mode or kernels. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from trimtab.lab.step_settings import Kernels, Mode, Precision, TimedPart
from trimtab.lab.studies.step.entries import NOTHING, Entry, between, differ, digits_of, grouped
from trimtab.report.document import Block, Section, Table, Text


def comparison_sections(entries: Sequence[Entry]) -> list[Section]:
    """A section for each setting of which several values were timed."""
    sections = [
        _section("Precision", entries, lambda e: e.timed.step.precision, Precision.FP32),
        _section("torch.compile and CUDA graphs", entries, _mode, Mode.EAGER, _compiling(entries)),
        _section("Kernels", entries, lambda e: e.timed.step.kernels, Kernels.REFERENCE),
    ]
    return [section for section in sections if section is not None]


def _section(
    title: str,
    entries: Sequence[Entry],
    axis: Callable[[Entry], enum.Enum],
    base: enum.Enum,
    more: Sequence[Block] = (),
) -> Section | None:
    values = [value for value in dict.fromkeys(map(axis, entries)) if value is not base]
    pairs = _pairs(entries, axis, base)
    if not values or not pairs:
        return Section(title, tuple(more)) if more else None
    parts = [part for part in TimedPart if any(entry.timed.part is part for entry, _ in pairs)]
    head = ("size", "context", "setting", *(f"{part.label}, {base.value}" for part in parts), *(
        f"{part.label}, {value.value}" for value in values for part in parts
    ))  # fmt: skip
    text = Text(_text(pairs, axis, values, base))
    if all(_speed_up(*pair) is None for pair in pairs):
        return Section(title, (text, *more))
    return Section(title, (text, _table(head, pairs, axis, values, parts), *more))


def _pairs(
    entries: Sequence[Entry], axis: Callable[[Entry], enum.Enum], base: enum.Enum
) -> list[tuple[Entry, Entry]]:
    """(entry at the base value, entry at another value) of cells that are otherwise equal."""
    pairs = []
    for same in grouped(entries, lambda e: _identity(e, axis)).values():
        before = next((e for e in same if axis(e) is base), None)
        pairs += [(before, e) for e in same if before is not None and axis(e) is not base]
    return pairs


def _identity(entry: Entry, axis: Callable[[Entry], enum.Enum]) -> tuple[object, ...]:
    step, compared = entry.timed.step, axis(entry)
    others = [member for member in (step.precision, entry.timed.mode, step.kernels) if member is not compared]
    return (entry.row, entry.column, step.batch, entry.timed.warm_up, *others)


def _setting(entry: Entry, axis: Callable[[Entry], enum.Enum]) -> str:
    step, compared = entry.timed.step, axis(entry)
    others = [
        member.value for member in (step.precision, entry.timed.mode, step.kernels) if member is not compared
    ]
    return ", ".join([*others, step.loss.label])


def _table(
    head: tuple[str, ...],
    pairs: Sequence[tuple[Entry, Entry]],
    axis: Callable[[Entry], enum.Enum],
    values: Sequence[enum.Enum],
    parts: Sequence[TimedPart],
) -> Table:
    rows = []
    for (row, setting), same in _by_row(pairs, axis).items():
        if all(entry.samples is None for pair in same for entry in pair):
            continue  # the tables of each configuration say why
        base = {before.timed.part: before for before, _ in same}
        other = {(axis(after), after.timed.part): (before, after) for before, after in same}
        rows.append(
            (
                row[0],
                str(row[1]),
                setting,
                *(_mean(base.get(part)) for part in parts),
                *(_gain(other.get((value, part))) for value in values for part in parts),
            )
        )
    note = (
        "Means in ms; in brackets how many times as fast as the first setting. Within noise: the 95 % interval "
        "of the difference of the means includes zero."
    )
    return Table("", head, tuple(rows), note)


def _by_row(
    pairs: Sequence[tuple[Entry, Entry]], axis: Callable[[Entry], enum.Enum]
) -> dict[tuple[tuple[str, int], str], list[tuple[Entry, Entry]]]:
    pairs_by_row: dict[tuple[tuple[str, int], str], list[tuple[Entry, Entry]]] = {}
    for before, after in pairs:
        pairs_by_row.setdefault((before.row, _setting(before, axis)), []).append((before, after))
    return pairs_by_row


def _mean(entry: Entry | None) -> str:
    if entry is None:
        return NOTHING
    if entry.samples is None:
        return entry.outcome.value
    mean = entry.samples.mean_ms
    return f"{mean:.{digits_of(mean)}f}"


def _gain(pair: tuple[Entry, Entry] | None) -> str:
    if pair is None:
        return NOTHING
    speed_up = _speed_up(*pair)
    if speed_up is None or pair[0].samples is None or pair[1].samples is None:
        return _mean(pair[1])
    unclear = "" if differ(pair[0].samples, pair[1].samples) else ", within noise"
    return f"{_mean(pair[1])} ({speed_up:.2f}×{unclear})"


def _speed_up(before: Entry, after: Entry) -> float | None:
    if before.samples is None or after.samples is None:
        return None
    return before.samples.mean_ms / after.samples.mean_ms


def _text(
    pairs: Sequence[tuple[Entry, Entry]],
    axis: Callable[[Entry], enum.Enum],
    values: Sequence[enum.Enum],
    base: enum.Enum,
) -> str:
    sentences = []
    for value in values:
        value_pairs = [(b, a) for b, a in pairs if axis(a) is value]
        gains = []
        for part in TimedPart:
            known = [g for b, a in value_pairs if a.timed.part is part and (g := _speed_up(b, a)) is not None]
            if known:
                gains.append(f"{part.label} {between(known, '{:.2f}'.format)}")
        if gains:
            sentences.append(f"{value.value}, times as fast as {base.value}: {', '.join(gains)}.")
        sentences += dict.fromkeys(
            f"{value.value}: {a.outcome.value} ({a.message})." for _, a in value_pairs if a.samples is None
        )
    return " ".join(sentences)


def _mode(entry: Entry) -> Mode:
    return entry.timed.mode


def _compiling(entries: Sequence[Entry]) -> list[Block]:
    """Seconds of compiling, steps to break even, and the largest difference to eager mode."""
    compiled = [e for e in entries if e.result and e.result.compile_seconds is not None]
    rows = []
    for (row, setting), same in grouped(compiled, lambda e: (e.row, _setting(e, _mode))).items():
        # The first part of a configuration compiles; the others find its kernels in the cache.
        results = [entry.result for entry in same if entry.result]
        longest = max(results, key=lambda result: result.compile_seconds or 0.0)
        seconds = longest.compile_seconds or 0.0
        cached = " (kernels from the cache)" if longest.from_cache else ""
        rows.append(
            (
                row[0],
                str(row[1]),
                setting,
                f"{seconds:.1f}{cached}",
                _steps_to_break_even(entries, same, seconds),
            )
        )
    blocks: list[Block] = []
    if rows:
        head = ("size", "context", "setting", "first step with compiling, s", "steps to break even")
        note = "A step is forward + backward. Programs are cached on disk: a second process reuses their kernels."
        alongside = max((e.result.compiled_alongside or 0 for e in compiled if e.result), default=0)
        if alongside:
            note += f" While one compiled, up to {alongside} other processes worked; steps were timed alone."
        blocks.append(Table("Compiling", head, tuple(rows), note))
    changed = [e.result for e in entries if e.result and e.timed.mode is not Mode.EAGER]
    differences = [result.difference for result in changed if result.difference is not None]
    if differences:
        text = (
            "Before anything was timed, loss and gradient norms were compared with eager mode's: they differ by at "
            f"most {max(differences):.1g}, relative."
        )
        if missing := len(changed) - len(differences):
            text += f" {missing} of {len(changed)} were not compared, because eager mode runs out of memory."
        blocks.append(Text(text))
    return blocks


def _steps_to_break_even(entries: Sequence[Entry], compiled: Sequence[Entry], seconds: float) -> str:
    """The number of steps after which compiling has saved as much time as it took."""
    both = next((e for e in compiled if e.timed.part is TimedPart.FORWARD_BACKWARD), None)
    if both is None:
        return NOTHING
    identity = _identity(both, _mode)
    eager = next((e for e in entries if e.timed.mode is Mode.EAGER and _identity(e, _mode) == identity), None)
    if eager is None or eager.samples is None or both.samples is None:
        return NOTHING
    gain_s = (eager.samples.mean_ms - both.samples.mean_ms) / 1e3
    return f"{seconds / gain_s:,.0f}" if gain_s > 0 else "never: it is not faster"
