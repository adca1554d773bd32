"""CSS classes that set the colours of series, bands and parts, in light and dark mode.

Series cycle through eight colours; from the ninth series on, lines are dashed, then dotted. Memory buckets and phases
of a step have fixed colours, the same in every chart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from trimtab.report.html import read_templates

TONES = 8
DASHES = 3
"""Solid, dashed, dotted."""
PARTS = {
    "residual stream": "residual",
    "attention": "attention",
    "feed-forward": "feed-forward",
    "norms": "norms",
    "loss": "loss",
    "gradients of activations": "activation-gradients",
    "gradients of parameters": "parameter-gradients",
    "workspace": "workspace",
    "key/value cache": "cache",
    "token ids, masks and RoPE tables": "inputs",
}
"""Parts of the activations and their CSS classes."""
ROLES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "other",
    "outside",
    "forward",
    "backward",
    "recompute",
    "update",
    *PARTS.values(),
)
"""CSS classes with a fixed colour."""


def series_role(index: int) -> str:
    """Returns the CSS classes of the series at an index: colour and line style.

    Example:
        >>> series_role(0), series_role(9)
        ('s0', 's1 dash1')
    """
    dash = index // TONES % DASHES
    return f"s{index % TONES}" + (f" dash{dash}" if dash else "")


def named_roles(names: Sequence[str]) -> list[str]:
    """Returns a CSS class for each name or role: its fixed colour if that is not used yet, otherwise a series colour.

    Example:
        >>> named_roles(["weights", "residual stream", "kernels", "weights"])
        ['weights', 'residual', 's0', 's1']
    """
    found: list[str] = []
    others = 0
    for name in names:
        role = PARTS.get(name, name)
        if role not in ROLES or role in found:
            role = series_role(others)
            others += 1
        found.append(role)
    return found


@cache
def tones() -> dict[str, str]:
    """Returns the colour of each class in light mode, read from the style sheets.

    Example:
        >>> tones()["weights"]
        '#3b6fd4'
    """
    styles = read_templates("page.css", "charts.css")
    light = re.sub(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", "", styles, flags=re.DOTALL)
    values = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    return {
        role: values[name] for role, name in re.findall(r"\.([\w-]+) \{ --tone: var\(--([\w-]+)\)", light)
    }
