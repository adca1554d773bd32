"""A report of measurements as plain data: sections of text, tables and charts.

A document is written as Markdown (`document_markdown`), as one HTML page (`document_page`) and to a terminal
(`document_console`); its charts also as PNG pictures (`pictures`). Nothing in it is formatted for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines that keep their spaces: a bit pattern, a command."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the rows, the others are aligned to the right unless they are words.

    Example:
        >>> Table("Times", ("size", "ms"), (("small", "38.3"),)).head
        ('size', 'ms')
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A named curve: (x, y) in ascending x; y is None where a measurement is missing, as after out of memory."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class LineChart:
    """Curves over one x axis.

    Args:
        id: letters, digits and dashes; unique in a document, and the file name of its picture.
        x_label, y_label: with the unit: "context length, tokens", "ms". Values of "bytes" or "peak memory, bytes" are
            drawn in KiB, MiB and GiB.
        log_x, log_y: logarithmic axes, with ticks at the values that occur on x.
    """

    id: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart: values by part, stacked from the left."""

    name: str
    parts: tuple[tuple[str, float], ...]
    label: str
    """What stands behind the bar: "12.3 ms (41 %)"."""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars on one scale that begins at zero."""

    id: str
    title: str
    unit: str
    bars: tuple[Bar, ...]
    note: str = ""


@dataclass(frozen=True)
class Band:
    """One series of a stack: its value from each x to the next one.

    `role` picks the colour: weights, gradients, optimizer, activations, other, or a part of the activations as in
    `trimtab.report.roles.PARTS`; any other text gets a colour of its own.
    """

    name: str
    role: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Phase:
    """A stretch of a stack's x axis with a name below it."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StackChart:
    """Stacked areas in steps, as memory over time; the page lets readers zoom in and shows values under the pointer.

    Args:
        x: where each value begins, ascending; the last value lasts until `end`.
        titles: what is shown of each x on hover ("forward, layer 3, mlp.up_proj"); empty: x itself.
        unit: "bytes" (drawn in KiB, MiB, GiB) or any other, drawn as it is.
        limit: a dashed line, as of the device's memory; left out where it is far above the peak.
        limit_label: what the dashed line is: "24.0 GiB available"; by default "limit 24.0 GiB".
    """

    id: str
    title: str
    x_label: str
    unit: str
    x: tuple[float, ...]
    end: float
    bands: tuple[Band, ...]
    phases: tuple[Phase, ...] = ()
    titles: tuple[str, ...] = ()
    limit: float | None = None
    note: str = ""
    limit_label: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal or growing width: `edges` has one value more than `counts`."""

    id: str
    title: str
    x_label: str
    edges: tuple[float, ...]
    counts: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, counts) of each distribution, drawn over each other."""
    note: str = ""


Chart = LineChart | BarChart | StackChart | Histogram
Block = Text | Code | Table | Chart


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in order."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A whole report.

    Args:
        title: "Step time of the study models".
        facts: device, versions, date: one short phrase each.
        sections: in order.
        command: what wrote it, for the footer: "trimtab bench step".
    """

    title: str
    facts: tuple[str, ...]
    sections: tuple[Section, ...]
    command: str
