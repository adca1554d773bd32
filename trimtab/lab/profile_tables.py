"""Tables and charts of profiles: by kernel, by kind, and the device's time next to the host's clock. Imports no torch.

`kernel_sections` reports any profiles; studies and `trimtab profile` use it.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.lab.kernel_kinds import KernelKind, short_name
from trimtab.lab.profile_data import Entry, Profile
from trimtab.report.document import Bar, BarChart, Block, Section, Table, Text

SHOWN = 12
MATTERS = 0.01
"""Minimum share of a listed kernel that is no matrix product."""
KINDS = tuple(KernelKind)
GRAPHS_OFF = (
    " CUDA graphs are off while profiling: a replayed graph is one launch, whose kernels have neither operators nor "
    "labels."
)


def kernel_sections(profiles: Mapping[str, Profile], *, id: str, shown: int = SHOWN) -> list[Section]:
    """Sections on profiles of one model: time by kind, the longest kernels, agreement with the host's clock.

    Args:
        profiles: profiles by name ("forward", "full step"); the last one is shown kernel by kernel.
        id: the prefix of chart ids: letters, digits and dashes.
        shown: the number of kernels in the table.

    Example:
        >>> step = Profile((Entry.of("aten::mm", 2, 0.6), Entry.of("aten::add", 1, 0.2)), 0.8, 0.81)
        >>> [section.title for section in kernel_sections({"full step": step}, id="mine")]
        ['Time by kind', 'Time by kernel', 'Device time and host clock']
    """
    last, profile = list(profiles.items())[-1]
    return [
        Section("Time by kind", kind_blocks(profiles, id=id)),
        Section("Time by kernel", kernel_blocks(profile, last, shown=shown)),
        Section("Device time and host clock", clock_blocks(profiles)),
    ]


def kind_blocks(profiles: Mapping[str, Profile], *, id: str) -> tuple[Block, ...]:
    """Milliseconds, calls and share of each kind, a column for each profile, with a chart of the shares."""
    present = [k for k in KINDS if any(e.kind is k for p in profiles.values() for e in p.entries)]
    present.sort(key=lambda kind: -max(profile.kind_share(kind) for profile in profiles.values()))
    by_name = {
        name: {kind_time.kind: kind_time for kind_time in profile.by_kind()}
        for name, profile in profiles.items()
    }
    head = ["kind"]
    for name in profiles:
        head += [f"{name}, ms", "calls", "share"]
    rows = []
    for kind in present:
        row = [kind.value]
        for name in profiles:
            time = by_name[name].get(kind)
            row += [ms(time.seconds), f"{time.calls:,}", percent(time.share)] if time else ["–", "–", "–"]
        rows.append(tuple(row))
    bars = tuple(
        Bar(
            name,
            tuple((kind.value, 100 * profile.kind_share(kind)) for kind in present),
            f"{ms(profile.busy_seconds)} ms",
        )
        for name, profile in profiles.items()
    )
    chart = BarChart(f"{id}-kinds", "Share of the time by kind", "%", bars)
    return (Table("", tuple(head), tuple(rows)), chart, Text(gemm_sentence(profiles)))


def gemm_sentence(profiles: Mapping[str, Profile]) -> str:
    """The share of matrix products, and its change from the first profile to the last."""
    names = list(profiles)
    first, last = names[0], names[-1]
    before, after = profiles[first].kind_share(KernelKind.GEMM), profiles[last].kind_share(KernelKind.GEMM)
    if len(profiles) == 1:
        return f"Matrix products take {percent(before)} of the time of the {first}."
    moved = 100 * (after - before)
    direction = "the same to a tenth of a point"
    if abs(moved) >= 0.05:
        direction = f"{abs(moved):.1f} percentage points {'more' if moved > 0 else 'less'}"
    return (
        f"Matrix products take {percent(before)} of the time of the {first} and {percent(after)} of that of the "
        f"{last}: {direction}. {_gained(profiles[first], profiles[last])}"
    )


def _gained(first: Profile, last: Profile) -> str:
    """The kind, other than products, whose share grows most from one profile to another."""
    gains = {k: last.kind_share(k) - first.kind_share(k) for k in KINDS if k is not KernelKind.GEMM}
    kind = max(gains, key=lambda candidate: gains[candidate])
    if gains[kind] < 0.0005:
        return "The share of no other kind grows."
    return (
        f"Among the other kinds the share of {kind.value} grows most: {percent(first.kind_share(kind))} → "
        f"{percent(last.kind_share(kind))}."
    )


def kernel_blocks(profile: Profile, name: str, *, shown: int = SHOWN) -> tuple[Block, ...]:
    """The longest kernels of a profile, and all relevant kernels that are no matrix products."""
    word = "kernels" if profile.device == "cuda" else "operators"
    if not profile.entries:
        return (Text(f"The profile of the {name} has no {word}."),)
    first, leading = profile.entries[0], profile.entries[:shown]
    rest = [e for e in profile.entries if _matters(profile, e)]
    covered = profile.share(sum(entry.seconds for entry in leading))
    text = (
        f"The {name} calls {profile.calls:,} {word}, {len(profile.entries)} different ones. "
        f"{short_name(first.name)} takes longest: {first.count:,} calls, {percent(profile.share(first.seconds))} of "
        f"the time. The {len(leading)} in the table take {percent(covered)}."
    )
    blocks: list[Block] = [Text(text), _entries_table(f"Longest {word} of the {name}", profile, leading)]
    if rest:
        title = f"Other {word} with at least {percent(MATTERS, 0)} of the {name}"
        blocks.append(_entries_table(title, profile, rest))
    else:
        blocks.append(Text(f"Only matrix products take {percent(MATTERS, 0)} of the {name} or more."))
    return tuple(blocks)


def _matters(profile: Profile, entry: Entry) -> bool:
    return entry.kind is not KernelKind.GEMM and profile.share(entry.seconds) >= MATTERS


def _entries_table(title: str, profile: Profile, entries: tuple[Entry, ...] | list[Entry]) -> Table:
    word = "kernel" if profile.device == "cuda" else "operator"
    rows = tuple(
        (
            short_name(entry.name),
            entry.kind.value,
            f"{entry.count:,}",
            ms(entry.seconds),
            percent(profile.share(entry.seconds)),
        )
        for entry in entries
    )
    return Table(title, (word, "kind", "calls", "ms", "share"), rows)


def clock_blocks(profiles: Mapping[str, Profile]) -> tuple[Block, ...]:
    """The sum of all kernels, the span from the first to the last, and the host's clock for the same run."""
    rows = tuple(
        (
            name,
            ms(profile.busy_seconds),
            ms(profile.span_seconds),
            ms(profile.host_seconds),
            percent(ratio(profile.busy_seconds, profile.span_seconds)),
            percent(ratio(profile.span_seconds, profile.host_seconds)),
        )
        for name, profile in profiles.items()
    )
    head = ("profiled", "sum, ms", "first to last, ms", "host clock, ms", "sum of span", "span of clock")
    name, worst = min(
        profiles.items(), key=lambda item: ratio(item[1].busy_seconds, item[1].span_seconds) or 1.0
    )
    gaps = max(1 - ratio(worst.busy_seconds, worst.span_seconds), 0.0)
    cuda = worst.device == "cuda"
    text = (
        "The host clock is read around the profiled run, synchronized before and after. The clock exceeds the span by "
        "the time before the first and after the last kernel; the span exceeds the sum by the time in which "
        f"{'the GPU waits for launches' if cuda else 'Python and the dispatcher run'}: at most "
        f"{percent(gaps)} of the span here, in the {name}. The profiler slows launches down, so gaps are shorter "
        f"without it.{GRAPHS_OFF if cuda else ''}"
    )
    return (Table("", head, rows), Text(text))


def ms(seconds: float) -> str:
    """Milliseconds with three significant digits.

    Example:
        >>> ms(0.0123456), ms(0.00001234), ms(1.5)
        ('12.3', '0.0123', '1,500')
    """
    value = 1e3 * seconds
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage.

    Example:
        >>> percent(0.8412), percent(0.01, 0)
        ('84.1 %', '1 %')
    """
    return f"{100 * share:.{digits}f} %"


def ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
