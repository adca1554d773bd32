"""The report's part on torch.compile: compiled against eager, with the seconds of compiling. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.lab.studies.attention.readings import Reading, Readings, Variant
from trimtab.lab.studies.attention.results import AttentionResult
from trimtab.lab.studies.attention.settings import Mode
from trimtab.lab.studies.attention.tables import NOTHING, format_mib, format_ms
from trimtab.report.document import Section, Table, Text


@dataclass(frozen=True)
class _Pair:
    name: str
    place: tuple[str, ...]
    """Settings, head dimension and length, as text."""
    eager: AttentionResult
    compiled: AttentionResult

    @property
    def gains(self) -> tuple[float, float]:
        """(forward, backward): eager time divided by compiled time."""
        before, after = self.eager.times, self.compiled.times
        return (
            before.forward.median_ms / after.forward.median_ms,
            before.backward.median_ms / after.backward.median_ms,
        )

    @property
    def saved_ms(self) -> float:
        """Time saved per forward and backward pass."""
        return self.eager.times.total_ms - self.compiled.times.total_ms


def compiled_section(readings: Readings) -> Section | None:
    """Compares compiled with eager; None where no pair of them was measured."""
    pairs = _pairs(readings)
    if not pairs:
        return None
    table = Table(
        "Compiled against eager",
        ("backend", "settings", "head dim", "length", "eager, ms", "compiled, ms", "gain, forward", "gain, backward",
         "before backward, MiB", "compiling, s", "passes to break even"),
        tuple(_row(pair) for pair in pairs),
        "ms: forward / backward. MiB: eager → compiled. Times exclude compiling; cached: the code was found on disk. "
        "Passes to break even: seconds of compiling divided by the time that one forward and backward pass saves.",
    )  # fmt: skip
    return Section("torch.compile", (Text(_text(pairs)), table))


def _pairs(readings: Readings) -> list[_Pair]:
    pairs = []
    for reading in sorted(readings.all, key=_order(readings)):
        s = reading.settings
        if s.mode is Mode.EAGER or reading.result is None:
            continue
        eager = readings.result(reading.group, s.length, s.head_dim, Variant.of(s.backend))
        if eager is not None:
            place = (reading.group.title, str(s.head_dim), str(s.length))
            pairs.append(_Pair(str(Variant.of(s.backend)), place, eager, reading.result))
    return pairs


def _order(readings: Readings) -> Callable[[Reading], tuple[int, int, int, int]]:
    groups = readings.groups
    return lambda reading: (
        reading.variant.position, groups.index(reading.group), reading.settings.head_dim, reading.settings.length,
    )  # fmt: skip


def _row(pair: _Pair) -> tuple[str, ...]:
    forward, backward = pair.gains
    compiled = pair.compiled
    memory = f"{format_mib(pair.eager.before_backward_bytes)} → {format_mib(compiled.before_backward_bytes)}"
    seconds = f"{compiled.compile_seconds:.1f}{' (cached)' if compiled.compile_cached else ''}"
    counts = pair.saved_ms > 0 and not compiled.compile_cached
    passes = f"{1e3 * compiled.compile_seconds / pair.saved_ms:,.0f}" if counts else NOTHING
    return (
        pair.name, *pair.place, _both(pair.eager), _both(compiled), f"{forward:.2f}×", f"{backward:.2f}×", memory,
        seconds, passes,
    )  # fmt: skip


def _both(result: AttentionResult) -> str:
    times = result.times
    return f"{format_ms(times.forward.median_ms)} / {format_ms(times.backward.median_ms)}"


def _text(pairs: list[_Pair]) -> str:
    forward = [pair.gains[0] for pair in pairs]
    backward = [pair.gains[1] for pair in pairs]
    cold = [pair.compiled.compile_seconds for pair in pairs if not pair.compiled.compile_cached]
    slower = [pair for pair in pairs if pair.saved_ms <= 0]
    memory = [pair.compiled.before_backward_bytes / pair.eager.before_backward_bytes for pair in pairs]
    sentences = [
        "torch.compile fuses the operations between the two products (scaling, mask, softmax, casts) into fewer "
        f"kernels. Over {len(pairs)} shapes the compiled forward pass was {_range(forward)} as fast as the eager one, "
        f"backward {_range(backward)}; memory before backward was {_range(memory)} eager's."
    ]
    if slower:
        sentences.append(f"In {len(slower)} of them forward and backward together were not faster.")
    if cold:
        sentences.append(
            f"Compiling took {min(cold):.1f} to {max(cold):.1f} s for each shape, once per process; torch keeps the "
            "code on disk, and loads it from there in the next one."
        )
    alongside = max(pair.compiled.compiled_alongside or 0 for pair in pairs)
    if alongside:
        sentences.append(
            f"Up to {alongside} other processes worked at the same time as one compiled; passes were timed alone."
        )
    return " ".join(sentences)


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"
