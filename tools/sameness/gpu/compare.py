"""Two commits side by side: sequences of operators and launches case by case, and the PTX of each launched kernel."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tools.sameness.gpu.compiled import Compiled, canonical
from tools.sameness.gpu.log import Entry, Specialization
from tools.sameness.gpu.recording import Recording, Store


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a case."""

    case: str
    operators: int
    launches: int
    text: str
    """`equal`, or what differs."""
    note: str = ""
    """Differences in allocations, which are not work for the GPU."""
    diff: tuple[str, ...] = ()
    failed: bool = False
    """Whether it failed in both commits, so that nothing was compared."""

    @property
    def different(self) -> bool:
        """Whether operators or launches differ."""
        return self.text != "equal" and not self.failed


@dataclass(frozen=True)
class KernelVerdict:
    """The result of comparing a kernel, over all pairs of specializations that were launched at the same place."""

    kernel: str
    pairs: int = 0
    identical: int = 0
    """Pairs whose PTX is the same text."""
    by_name: int = 0
    """Pairs whose PTX is the same once parameters have one order and registers are numbered by it."""
    differences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Specialization to the lines that differ."""
    added: frozenset[str] = frozenset()
    """Parameters that only one of the commits has, with the constant that they were compiled as."""


Pairs = dict[tuple[str, str], tuple[Specialization, Specialization]]


def compare_case(
    name: str,
    parent: Recording | None,
    head: Recording | None,
    pairs: Pairs,
    renamed: Mapping[str, str] | None = None,
) -> Verdict:
    """Compares a case, and adds the specializations that both commits launched at the same place to `pairs`.

    `renamed` maps names of kernels in the parent to their names in the head.
    """
    if parent is None or head is None:
        return Verdict(name, 0, 0, f"not recorded in the {'parent' if parent is None else 'head'}")
    before, after = _work(parent.entries), _work(head.entries)
    before = [_with_current_name(entry, renamed or {}) for entry in before]
    counts = len(after), sum(entry.kernel is not None for entry in after)
    if parent.error or head.error:
        same = parent.error == head.error
        text = (
            f"fails in both: {head.error}" if same else f"{parent.error or 'runs'} → {head.error or 'runs'}"
        )
        return Verdict(name, *counts, text, failed=same)
    for one, other in _matched(before, after):
        if one.kernel and other.kernel:
            pairs[one.kernel, other.kernel] = (
                parent.specializations[one.kernel],
                head.specializations[other.kernel],
            )
    text = _first_difference(before, after)
    diff = () if text == "equal" else tuple(_shortened(_changes(before, after)))
    return Verdict(name, *counts, text, _allocations(parent.entries, head.entries), diff)


def _with_current_name(entry: Entry, renamed: Mapping[str, str]) -> Entry:
    """The entry; if it launches a kernel that the head has renamed, with the current name."""
    kind, _, kernel = entry.name.partition(" ")
    return replace(entry, name=f"{kind} {renamed[kernel]}") if kernel in renamed else entry


def _work(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.is_allocation]


def text_of(entry: Entry) -> str:
    """An entry as one line, without the specialization, which is compared as PTX."""
    arguments = ", ".join(f"{name}={value}" for name, value in entry.arguments.items())
    return f"{entry.name}({arguments})" + (f" on stream {entry.stream}" if entry.stream else "")


def _first_difference(before: Sequence[Entry], after: Sequence[Entry]) -> str:
    for i, (one, other) in enumerate(zip(before, after, strict=False)):
        if text_of(one) != text_of(other):
            return f"entry {i}: {_change(one, other)}"
    if len(before) != len(after):
        return f"{len(before)} → {len(after)} operators and launches"
    return "equal"


def _change(one: Entry, other: Entry) -> str:
    """Two entries; if it is the same operator, only the arguments that differ."""
    if one.name != other.name:
        return f"{text_of(one)} → {text_of(other)}"
    names = [*one.arguments, *(name for name in other.arguments if name not in one.arguments)]
    values = [(name, one.arguments.get(name), other.arguments.get(name)) for name in names]
    found = [f"{name}: {value} → {new}" for name, value, new in values if value != new]
    found += [f"stream {one.stream} → {other.stream}"] if one.stream != other.stream else []
    return f"{one.name} {', '.join(found)}"


def _changes(before: Sequence[Entry], after: Sequence[Entry]) -> list[str]:
    """Differences after buffer numbers are removed, so that one additional buffer is one difference instead of one in
    each later line.
    """
    found: Counter[str] = Counter()
    i = j = 0
    names = [[entry.name for entry in entries] for entries in (before, after)]
    for begin, other_begin, count in _blocks(*names):
        found.update(f"only in the parent: {text_of(_anonymous(entry))}" for entry in before[i:begin])
        found.update(f"only in the head: {text_of(_anonymous(entry))}" for entry in after[j:other_begin])
        i, j = begin + count, other_begin + count
        pairs = zip(before[begin:i], after[other_begin:j], strict=True)
        anonymous = [(_anonymous(one), _anonymous(other)) for one, other in pairs]
        found.update(_change(one, other) for one, other in anonymous if text_of(one) != text_of(other))
    return [f"{count} × {line}" for line, count in found.items()]


def _anonymous(entry: Entry) -> Entry:
    arguments = {name: re.sub(r"#\d+ ", "", value) for name, value in entry.arguments.items()}
    return replace(entry, arguments=arguments)


def _matched(before: Sequence[Entry], after: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Entries at the same place in both sequences."""
    one, other = [entry.name for entry in before], [entry.name for entry in after]
    for i, j, count in _blocks(one, other):
        yield from zip(before[i : i + count], after[j : j + count], strict=True)


def _blocks(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Matching blocks as (begin, begin, length). Common beginnings and ends are removed first, because difflib is slow
    on thousands of lines.
    """
    shorter = min(len(one), len(other))
    head = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    tail = next((i for i in range(shorter - head) if one[-1 - i] != other[-1 - i]), shorter - head)
    yield 0, 0, head
    middle = one[head : len(one) - tail], other[head : len(other) - tail]
    for block in difflib.SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        yield head + block.a, head + block.b, block.size
    yield len(one) - tail, len(other) - tail, tail


def _diff(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The lines that only one has, in their order."""
    found = []
    i = j = 0
    for begin, other_begin, count in _blocks(one, other):
        found += [f"-{line}" for line in one[i:begin]] + [f"+{line}" for line in other[j:other_begin]]
        i, j = begin + count, other_begin + count
    return found


def _shortened(lines: Sequence[str], most: int = 12) -> list[str]:
    rest = len(lines) - most
    return [*lines[:most], *([f"… {rest} more"] if rest > 0 else [])]


def _allocations(before: Iterable[Entry], after: Iterable[Entry]) -> str:
    """Memory that only one commit allocates."""
    one, other = (
        Counter(e.arguments["->"] for e in entries if e.is_allocation) for entries in (before, after)
    )
    parts = [f"−{count} × {what}" for what, count in (one - other).items()]
    parts += [f"+{count} × {what}" for what, count in (other - one).items()]
    return ", ".join(_shortened(parts, 4))


def compare_kernels(pairs: Pairs, parent: Store, head: Store) -> list[KernelVerdict]:
    """Compares the PTX of every pair, kernel by kernel."""
    grouped: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for keys, (_, after) in pairs.items():
        grouped[after.kernel].append(keys)
    return [
        _kernel_verdict(kernel, [(keys, pairs[keys]) for keys in sorted(found)], parent, head)
        for kernel, found in sorted(grouped.items())
    ]


def _kernel_verdict(
    kernel: str,
    pairs: Sequence[tuple[tuple[str, str], tuple[Specialization, Specialization]]],
    parent: Store,
    head: Store,
) -> KernelVerdict:
    identical, by_name = 0, 0
    differences: dict[str, tuple[str, ...]] = {}
    added: set[str] = set()
    for keys, (before, after) in pairs:
        one, other = parent.read_kernel(keys[0]), head.read_kernel(keys[1])
        added |= _only_in(before, after, "−") | _only_in(after, before, "+")
        if isinstance(one, str) or isinstance(other, str):
            differences[describe(after)] = (f"not compiled: {one if isinstance(one, str) else other}",)
            continue
        options = _changed(before, after, ("options",))  # some are the launcher's and not in the code
        wrong = options or _code_difference(one, other, before, after)
        identical += one == other and not wrong
        by_name += one != other and not wrong
        if wrong:
            differences[describe(after)] = (*_changed(before, after, ("constants", "signature")), *wrong)
    return KernelVerdict(kernel, len(pairs), identical, by_name, differences, frozenset(added))


def _code_difference(
    one: Compiled, other: Compiled, before: Specialization, after: Specialization
) -> list[str]:
    """Lines of PTX that differ; none if the code is the same."""
    if one == other:
        return []
    first = canonical(one.ptx, before.signature).splitlines()
    second = canonical(other.ptx, after.signature).splitlines()
    wrong = _shortened(_diff(first, second))
    return [f"shared memory {one.shared} → {other.shared}", *wrong] if one.shared != other.shared else wrong


def _changed(before: Specialization, after: Specialization, fields: Sequence[str]) -> list[str]:
    """Constants, types or options that both have and that differ."""
    found = []
    for what in fields:
        one, other = getattr(before, what), getattr(after, what)
        found += [
            f"{what} {key}: {one[key]} → {other[key]}"
            for key in one
            if key in other and one[key] != other[key]
        ]
    return found


def _only_in(one: Specialization, other: Specialization, sign: str) -> set[str]:
    return {
        f"{sign}{name}={one.constants.get(name, one.signature[name])}"
        for name in one.signature
        if name not in other.signature
    }


def describe(one: Specialization) -> str:
    """A specialization in a line: types of pointers, constants, warps and stages."""
    kinds = sorted({kind for kind in one.signature.values() if kind.startswith(("*", "tensordesc"))})
    constants = ", ".join(f"{name}={value}" for name, value in one.constants.items())
    options = f"num_warps={one.options.get('num_warps')}, num_stages={one.options.get('num_stages')}"
    return f"{one.key}({', '.join(kinds)}; {constants}; {options})"
