"""Parses and formats bytes, counts and durations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_bytes(text: str) -> int | None:
    """Parses a size with a unit in any case, decimal ("24GB", "24 gb", "24G") or binary ("24GiB"); None otherwise.

    Example:
        >>> parse_bytes("24GiB"), parse_bytes("1.5 gb"), parse_bytes("24g"), parse_bytes("24")
        (25769803776, 1500000000, 24000000000, None)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] == "i" or not text.strip()[-1].isalpha():
        return None
    units = {unit.lower(): size for unit, size in BYTE_UNITS.items()}
    return round(float(match[1]) * units[f"{match[2]}b"])


def parse_share(text: str) -> float | None:
    """Parses a percentage above 0 and up to 100 into a fraction; None for anything else.

    Example:
        >>> parse_share("80%"), parse_share("120%")
        (0.8, None)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    share = float(match[1]) / 100 if match else 0.0
    return share if 0 < share <= 1 else None


def format_bytes(count: float, *, up: bool = False) -> str:
    """Formats bytes in binary units with three significant digits; `up` rounds the last digit up.

    Example:
        >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(1025), format_bytes(1025, up=True)
        ('1.50 KiB', '3.00 GiB', '1.00 KiB', '1.01 KiB')
    """
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{sign}{size:.0f} B"
    if up:
        digits = 100 if size < 10 else 10
        size = math.ceil(size * digits) / digits
    return f"{sign}{size:.2f} {unit}" if size < 10 else f"{sign}{size:.1f} {unit}"


def format_count(count: float) -> str:
    """Formats a count of parameters or tokens in decimal units.

    Example:
        >>> format_count(596_049_920), format_count(950)
        ('596 M', '950')
    """
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            value = count / limit
            return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.0f} {unit}"
    return f"{count:.0f}"


def format_rate(per_second: float) -> str:
    """Formats a rate per second; below ten with two significant digits, so that a slow rate is not printed as 0.

    Example:
        >>> format_rate(0.4321), format_rate(4.36), format_rate(12_340)
        ('0.43', '4.4', '12 K')
    """
    return f"{per_second:.2g}" if abs(per_second) < 9.95 else format_count(per_second)


def format_seconds(seconds: float) -> str:
    """Formats a duration in readable units.

    Example:
        >>> format_seconds(0.0382), format_seconds(4.25), format_seconds(200), format_seconds(7300)
        ('38 ms', '4.2 s', '3 min 20 s', '2 h 01 min')
    """
    if 0 < seconds < 0.9995:
        return f"{1e3 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_gaps(present: Iterable[int], last: int, most: int = 4) -> str:
    """Formats the numbers from 1 to `last` that are missing, as at most `most` ranges; empty if none are missing.

    Example:
        >>> format_gaps([1, 2, 5, 7], 9)
        '3 to 4, 6, 8 to 9'
    """
    spans = []
    before = 0
    for number in (*sorted({n for n in present if 1 <= n <= last}), last + 1):
        if number - before == 2:
            spans.append(str(before + 1))
        elif number - before > 2:
            spans.append(f"{before + 1} to {number - 1}")
        before = number
    return ", ".join(spans[:most]) + (" and more" if len(spans) > most else "")
