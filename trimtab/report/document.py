"""A report of measurements as plain data: sections of text, tables and charts.

A document is written as Markdown (`document_markdown`), as an HTML page (`document_page`) and to a terminal
(`document_console`); its charts also as PNG files (`pictures`). It contains no formatting for a particular output.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted lines, such as a bit pattern or a command."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column contains row names, and the other columns are right-aligned if numeric.

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
    """A named curve: (x, y) in ascending x; y is None if a measurement is missing, for example after out of memory."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class LineChart:
    """Curves over one x axis.

    Args:
        id: letters, digits and dashes; unique in a document, and the file name of its picture.
        x_label, y_label: labels with the unit: "context length, tokens", "ms". Values with "bytes" or
            "peak memory, bytes" are shown in KiB, MiB and GiB.
        log_x, log_y: whether the axes are logarithmic; a logarithmic x axis has ticks at the x values of the points.
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
    """The label after the bar: "12.3 ms (41 %)"."""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars on one scale that starts at zero."""

    id: str
    title: str
    unit: str
    bars: tuple[Bar, ...]
    note: str = ""


@dataclass(frozen=True)
class Band:
    """One series of a stack: its value from each x to the next.

    `role` selects the colour: weights, gradients, optimizer, activations, other, or a part of the activations as in
    `trimtab.report.roles.PARTS`; any other role gets the next unused colour.
    """

    name: str
    role: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class TimelinePhase:
    """A named interval of a stack's x axis."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StackChart:
    """Stacked areas in steps, as memory over time; the page lets readers zoom in and shows values under the pointer.

    Args:
        x: where each value begins, ascending; the last value lasts until `end`.
        titles: title of each x on hover ("forward, layer 3, mlp.up_proj"); if empty, the x value is shown.
        unit: "bytes" (shown in KiB, MiB, GiB) or any other unit.
        limit: value of a dashed line, such as the device's memory; omitted if it is far above the peak.
        limit_label: label of the dashed line: "24.0 GiB available"; by default "limit 24.0 GiB".
    """

    id: str
    title: str
    x_label: str
    unit: str
    x: tuple[float, ...]
    end: float
    bands: tuple[Band, ...]
    phases: tuple[TimelinePhase, ...] = ()
    titles: tuple[str, ...] = ()
    limit: float | None = None
    note: str = ""
    limit_label: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal or increasing width: `edges` has one more element than `counts`."""

    id: str
    title: str
    x_label: str
    edges: tuple[float, ...]
    counts: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, counts) of each distribution; they are overlaid."""
    note: str = ""


Chart = LineChart | BarChart | StackChart | Histogram
Block = Text | Code | Table | Chart


@dataclass(frozen=True)
class Section:
    """A heading and its blocks in order."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A report.

    Args:
        title: title, such as "Step time of the study models".
        facts: device, versions, date: one short phrase each.
        sections: sections in order.
        command: the command that wrote the report, for the footer: "trimtab bench step".
    """

    title: str
    facts: tuple[str, ...]
    sections: tuple[Section, ...]
    command: str
