"""A profile: kernels or operators with their time, by name and by kind. Imports no torch.

`trimtab.lab.profiles` records profiles; reports read them from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.lab.kernel_kinds import KernelKind, kind_of

SHOWN = 26
LONGEST_NAME = 160
"""Maximum length of a name in a file: names of C++ templates have thousands of characters."""


@dataclass(frozen=True)
class Entry:
    """One kernel or operator of a profile."""

    name: str
    count: int
    seconds: float
    kind: KernelKind

    @staticmethod
    def of(name: str, count: int, seconds: float) -> Entry:
        """An entry with the kind that follows from its name.

        Example:
            >>> Entry.of("aten::mm", 2, 0.5).kind
            <KernelKind.GEMM: 'GEMM'>
        """
        return Entry(name, count, seconds, kind_of(name))


@dataclass(frozen=True)
class KindTime:
    """All entries of one kind: calls, seconds, share of the time of all entries."""

    kind: KernelKind
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The kernels or operators of one run, the most expensive first."""

    entries: tuple[Entry, ...]
    span_seconds: float
    """From the start of the first entry to the end of the last."""
    host_seconds: float = 0.0
    """The same run by the host's clock, synchronized before and after."""
    device: str = "cpu"
    """cpu: entries are torch's operators; cuda: they are kernels."""

    @property
    def busy_seconds(self) -> float:
        """The sum of all entries.

        Example:
            >>> Profile((Entry.of("mm", 2, 0.5), Entry.of("add", 1, 0.25)), 1.0).busy_seconds
            0.75
        """
        return sum(entry.seconds for entry in self.entries)

    @property
    def calls(self) -> int:
        """Number of launched kernels or called operators."""
        return sum(entry.count for entry in self.entries)

    def share(self, seconds: float) -> float:
        """Share of the time of all entries; 0 in an empty profile."""
        return seconds / self.busy_seconds if self.busy_seconds else 0.0

    def by_kind(self) -> list[KindTime]:
        """Time of each kind that occurs, the most expensive first.

        Example:
            >>> found = Profile((Entry.of("aten::mm", 2, 0.75), Entry.of("aten::add", 1, 0.25)), 1.0).by_kind()
            >>> [(one.kind.value, one.calls, one.share) for one in found]
            [('GEMM', 2, 0.75), ('elementwise', 1, 0.25)]
        """
        kind_times = []
        for kind in dict.fromkeys(entry.kind for entry in self.entries):
            kind_entries = [entry for entry in self.entries if entry.kind is kind]
            seconds = sum(entry.seconds for entry in kind_entries)
            kind_times.append(
                KindTime(kind, sum(entry.count for entry in kind_entries), seconds, self.share(seconds))
            )
        return sorted(kind_times, key=lambda kind_time: -kind_time.seconds)

    def kind_share(self, kind: KernelKind) -> float:
        """Share of a kind in the time of all entries.

        Example:
            >>> Profile((Entry.of("aten::mm", 2, 0.5),), 1.0).kind_share(KernelKind.GEMM)
            1.0
        """
        return self.share(sum(entry.seconds for entry in self.entries if entry.kind is kind))

    def lines(self, shown: int = SHOWN) -> list[str]:
        """A head line and one line for each of the most expensive entries.

        Example:
            >>> print(*Profile((Entry.of("mm", 2, 0.5),), 1.0).lines(), sep="\\n")
            kernels 2, busy 500.0 ms, from first to last 1000.0 ms
                500.00 ms     2 × mm
        """
        busy, span = 1e3 * self.busy_seconds, 1e3 * self.span_seconds
        lines = [f"kernels {self.calls}, busy {busy:.1f} ms, from first to last {span:.1f} ms"]
        return lines + [
            f"  {1e3 * entry.seconds:8.2f} ms {entry.count:5d} × {entry.name[:110]}"
            for entry in self.entries[:shown]
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON; long names are cut, kinds are kept.

        Example:
            >>> profile = Profile((Entry.of("aten::mm", 2, 0.5),), 1.0)
            >>> Profile.from_dict(profile.to_dict()) == profile
            True
        """
        return {
            "device": self.device,
            "span_seconds": self.span_seconds,
            "host_seconds": self.host_seconds,
            "entries": [
                [entry.name[:LONGEST_NAME], entry.count, round(entry.seconds, 9), entry.kind.value]
                for entry in self.entries
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Profile:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            entries = tuple(
                Entry(str(name), int(count), float(seconds), KernelKind(kind))
                for name, count, seconds, kind in data["entries"]
            )
            span, host = float(data["span_seconds"]), float(data["host_seconds"])
            return Profile(entries, span, host, str(data["device"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a profile is damaged: {type(error).__name__}: {error}", "measure it again with --remeasure"
            ) from None
