"""Chart axes: linear or logarithmic, for numbers or bytes, with round ticks.

All chart writers use them, so HTML, pictures, terminal and Markdown format values in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.facts.units import format_bytes
from trimtab.report.drawing import HEADROOM, MAX_MAGNITUDE, format_tick, position, ticks

BYTES = "bytes"
"""The unit whose values are shown in KiB, MiB and GiB."""
UNITS = (
    BYTES,
    "B",
    "KiB",
    "MiB",
    "GiB",
    "TiB",
    "KB",
    "MB",
    "GB",
    "TB",
    "ns",
    "µs",
    "us",
    "ms",
    "s",
    "%",
    "W",
    "J",
)
"""Labels that consist of a unit only; labels that end with "/s" do too."""
MAX_MINIMUM_FROM_ZERO = 0.6
"""A linear axis starts at zero if the minimum is at most this fraction of the maximum."""
LOG_RANGE = (1e-300, 1e300)
"""Values outside are clamped to the ends of a logarithmic axis."""


def unit_of(label: str) -> str:
    """Returns the unit at the end of a label, or the label if it is a unit; empty for a label without a unit.

    Example:
        >>> unit_of("peak memory, GiB"), unit_of("ms"), unit_of("loss"), unit_of("TFLOP/s")
        ('GiB', 'ms', '', 'TFLOP/s')
    """
    quantity, comma, unit = label.rpartition(", ")
    if comma and quantity:
        return unit
    return label if label in UNITS or label.endswith("/s") else ""


def quantity_of(label: str) -> str:
    """Returns a label without its unit.

    Example:
        >>> quantity_of("context length, tokens"), quantity_of("ms")
        ('context length', 'ms')
    """
    quantity, comma, _ = label.rpartition(", ")
    return quantity if comma and quantity else label


def format_value(value: float, unit: str = "") -> str:
    """Formats a value: bytes in binary units, integers in full, other numbers with four digits.

    Example:
        >>> [format_value(3 * 2**30, "bytes"), format_value(16384.0, "tokens"), format_value(0.012345, "ms")]
        ['3.00 GiB', '16,384 tokens', '0.01235 ms']
    """
    if not math.isfinite(value):
        return "no value"
    if unit == BYTES:
        return format_bytes(value) if abs(value) < 2**60 else f"{value:.2e} B"
    return f"{format_number(value)} {unit}".rstrip()


def format_number(value: float) -> str:
    """Formats a number like a tick label: below a million with four digits, or in full with thousands separators.

    Example:
        >>> format_number(65536.0), format_number(1234.56), format_number(1e9), format_number(-0.5)
        ('65,536', '1,235', '1.00 B', '−0.5')
    """
    if abs(value) < 1e6 and (abs(value) >= 1000 or value == round(value)):
        return f"{value:,.0f}".replace("-", "−")
    return format_tick(value)


@dataclass(frozen=True)
class Axis:
    """A range of values and its scale.

    Example:
        >>> Axis(1, 100, log=True).share(10), Axis(0, 4).share(1)
        (0.5, 0.25)
    """

    low: float
    high: float
    log: bool = False
    unit: str = ""

    def draws(self, value: float | None) -> bool:
        """Whether a value can be drawn: finite, and positive on a logarithmic axis."""
        return value is not None and math.isfinite(value) and not (self.log and value <= 0)

    def share(self, value: float) -> float:
        """Returns the relative position of a value, from 0 to 1."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(min(max(value, LOG_RANGE[0]), LOG_RANGE[1])) - low) / (high - low)
        return position(min(max(value, -MAX_MAGNITUDE), MAX_MAGNITUDE), (self.low, self.high))

    def ticks(self, most: int) -> list[float]:
        """Returns at most `most` + 1 round values in the range."""
        if self.log:
            return _log_ticks(self.low, self.high, most, base=2 if self.unit == BYTES else 10)
        if self.unit == BYTES:
            step = _binary_unit(self.high)
            return [value * step for value in ticks(self.low / step, self.high / step, most)]
        return ticks(self.low, self.high, most)

    def tick_label(self, value: float) -> str:
        """Formats a tick; only bytes include the unit, which is otherwise in the axis label."""
        if self.unit == BYTES:
            step = _binary_unit(value if self.log else self.high)
            name = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}[step]
            return f"{format_tick(value / step)} {name}" if value else "0"
        return format_number(value)


def axis_of(values: Iterable[float | None], *, log: bool = False, unit: str = "", room: bool = True) -> Axis:
    """Returns an axis that contains these values; values that cannot be drawn on it are skipped.

    Args:
        values: values in any order; None is a gap.
        log: whether the axis is logarithmic.
        unit: "bytes", or any other unit.
        room: whether to add a margin above and below; a linear axis then starts at zero if the minimum is close to it.

    Example:
        >>> axis_of([0.0, 10.0, 1000.0], log=True, room=False)
        Axis(low=10.0, high=1000.0, log=True, unit='')
    """
    probe = Axis(0, 1, log, unit)
    known = [min(max(v, -MAX_MAGNITUDE), MAX_MAGNITUDE) for v in values if v is not None and probe.draws(v)]
    if not known:
        return Axis(1, 10, log, unit) if log else Axis(0, 1, log, unit)
    low, high = min(known), max(known)
    if log:
        return _log_axis(low, high, unit, room)
    if not room:
        return Axis(low, high, log, unit) if low < high else Axis(low - 1, high + 1, log, unit)
    if 0 <= low <= MAX_MINIMUM_FROM_ZERO * high:
        return Axis(0, high * (1 + HEADROOM) or 1.0, log, unit)
    spare = HEADROOM * (high / 2 - low / 2) * 2 or HEADROOM * abs(high) or 1.0
    return Axis(low - spare, high + spare, log, unit)


def _log_axis(low: float, high: float, unit: str, room: bool) -> Axis:
    low, high = (min(max(value, LOG_RANGE[0]), LOG_RANGE[1]) for value in (low, high))
    if low == high:
        return Axis(low / 2, high * 2, True, unit)
    spare = math.exp(min(HEADROOM * (math.log(high) - math.log(low)), 5.0))
    return Axis(low / spare, high * spare, True, unit) if room else Axis(low, high, True, unit)


def spread(values: Sequence[float], shares: Sequence[float], apart: float) -> list[float]:
    """Selects from ascending values those at least `apart` from each other on the axis, including the last.

    Example:
        >>> spread([1, 2, 3, 9], [0.0, 0.1, 0.3, 1.0], 0.2)
        [1, 3, 9]
    """
    kept: list[int] = []
    for i in range(len(values)):
        if not kept or shares[i] - shares[kept[-1]] >= apart:
            kept.append(i)
    last = len(values) - 1
    if kept and kept[-1] != last:
        if len(kept) > 1:
            kept[-1] = last
        elif shares[last] - shares[kept[0]] >= apart:
            kept.append(last)
    return [values[i] for i in kept]


def _binary_unit(value: float) -> int:
    return next((unit for unit in (2**30, 2**20, 2**10) if value >= unit), 1)


def _log_ticks(low: float, high: float, most: int, base: int) -> list[float]:
    """Powers of the base; in base 10 also 1, 2 and 5 times powers of ten if they fit; round numbers in short ranges."""
    first = math.floor(math.log(low, base)) - 1
    last = math.ceil(math.log(high, base)) + 1
    powers = range(first, last + 1)
    if base == 10:
        fine = [factor * 10.0**p for p in powers for factor in (1, 2, 5)]
        found = [value for value in fine if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(found) <= most + 1:
            return found
    inside = [p for p in powers if low * (1 - 1e-9) <= float(base) ** p <= high * (1 + 1e-9)]
    if len(inside) < 2:
        return [value for value in ticks(low, high, most) if value > 0]
    apart = -(-len(inside) // (most + 1))
    return [float(base) ** p for p in inside if p % apart == 0]
