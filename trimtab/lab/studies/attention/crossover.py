"""Compares the times of two variants, and finds the crossover length. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.lab.studies.attention.readings import Group, Readings, Variant
from trimtab.lab.studies.attention.results import PassTimes
from trimtab.lab.studies.attention.settings import PLAIN
from trimtab.lab.study import CellOutcome

EAGER_PLAIN = Variant.of(PLAIN)


class SpeedVerdict(enum.Enum):
    """The result of comparing two variants at one length."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "no clear difference"
    """The ranges from the first to the third quartile overlap."""


def compare(times: PassTimes, base: PassTimes) -> SpeedVerdict:
    """Compares forward + backward with those of another variant.

    Example:
        >>> from trimtab.lab.samples import CacheState, Samples
        >>> fast, slow = (PassTimes(Samples((t,)), Samples((t,)), CacheState.AS_LEFT) for t in (1.0, 2.0))
        >>> [compare(*pair).value for pair in ((fast, slow), (slow, fast), (slow, slow))]
        ['faster', 'slower', 'no clear difference']
    """
    (low, high), (base_low, base_high) = times.quartiles_ms, base.quartiles_ms
    if high < base_low:
        return SpeedVerdict.FASTER
    return SpeedVerdict.SLOWER if low > base_high else SpeedVerdict.UNCLEAR


@dataclass(frozen=True)
class Crossover:
    """The length from which on a variant is faster than plain attention.

    Args:
        verdicts: of each length that was measured with both, ascending.
        alone: lengths at which the variant ran and plain attention was out of memory, measured or predicted.
    """

    verdicts: Mapping[int, SpeedVerdict]
    alone: Mapping[int, CellOutcome] = field(default_factory=dict)

    @property
    def faster_from(self) -> int | None:
        """The first length from which on the variant is clearly faster at every measured one; None if there is none.

        Example:
            >>> Crossover({256: SpeedVerdict.SLOWER, 512: SpeedVerdict.FASTER, 1024: SpeedVerdict.FASTER}).faster_from
            512
        """
        start = None
        for length in sorted(self.verdicts, reverse=True):
            if self.verdicts[length] is not SpeedVerdict.FASTER:
                break
            start = length
        return start

    def describe(self) -> str:
        """In words.

        Example:
            >>> Crossover({256: SpeedVerdict.SLOWER, 512: SpeedVerdict.FASTER}).describe()
            'faster from 512 on, slower at 256'
            >>> Crossover({256: SpeedVerdict.UNCLEAR}, alone={512: CellOutcome.OUT_OF_MEMORY}).describe()
            'no crossover from 256 to 256: no clear difference at 256; runs at 512, where plain is out of memory'
        """
        if not self.verdicts:
            text = "no length was measured with both"
        elif all(verdict is SpeedVerdict.FASTER for verdict in self.verdicts.values()):
            text = f"faster at every measured length, from {min(self.verdicts)} on"
        else:
            start = self.faster_from
            span = f"from {min(self.verdicts)} to {max(self.verdicts)}"
            rest = ", ".join(self._others(start))
            text = f"no crossover {span}: {rest}" if start is None else f"faster from {start} on, {rest}"
        for outcome in dict.fromkeys(self.alone.values()):
            lengths = ", ".join(str(length) for length, ending in self.alone.items() if ending is outcome)
            text += f"; runs at {lengths}, where plain is {outcome.value}"
        return text

    def _others(self, start: int | None) -> list[str]:
        before = {length: v for length, v in self.verdicts.items() if start is None or length < start}
        return [
            f"{verdict.value} at {', '.join(str(length) for length in lengths)}"
            for verdict in (SpeedVerdict.SLOWER, SpeedVerdict.UNCLEAR, SpeedVerdict.FASTER)
            if (lengths := [length for length, own_verdict in before.items() if own_verdict is verdict])
        ]


def crossover(readings: Readings, group: Group, head_dim: int, variant: Variant) -> Crossover:
    """Compares a variant with eager plain attention over all lengths of a group."""
    verdicts, alone = {}, {}
    for length in readings.lengths(group):
        result = readings.result(group, length, head_dim, variant)
        plain = readings.find(group, length, head_dim, EAGER_PLAIN)
        if result is None or plain is None:
            continue
        if plain.result is not None:
            verdicts[length] = compare(result.times, plain.result.times)
        elif plain.outcome in (CellOutcome.OUT_OF_MEMORY, CellOutcome.PREDICTED_OUT_OF_MEMORY):
            alone[length] = plain.outcome
    return Crossover(verdicts, alone)


def speed_up(readings: Readings, group: Group, length: int, head_dim: int, variant: Variant) -> float | None:
    """Time of eager plain attention divided by that of a variant, both passes together; None where one is missing."""
    result = readings.result(group, length, head_dim, variant)
    plain = readings.result(group, length, head_dim, EAGER_PLAIN)
    return None if result is None or plain is None else plain.times.total_ms / result.times.total_ms
