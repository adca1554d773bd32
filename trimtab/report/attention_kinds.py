"""The attention backends of a run, from choices.json or plan.json: one entry per kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_RANGES = 4
"""Ranges of layers that are listed; the others are counted."""


@dataclass(frozen=True)
class AttentionKind:
    """The layers that share a choice of attention backend."""

    impl: str
    """The backend in training."""
    layers: str
    """Which layers these are; empty if all layers share the choice."""
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(other backend, reason against it)."""


def attention_kinds(attention: dict[str, Any]) -> list[AttentionKind]:
    """Reads the section `attention`; entries that are incomplete or of a wrong type are left out.

    Example:
        >>> windowed = {"layers": [0, 1, 2, 4], "reason": "a window"}
        >>> names = [{"packed": "triton", "unpacked": "triton"}] * 5
        >>> kinds = [windowed, {"layers": [3], "reason": "no window"}]
        >>> [(kind.layers, kind.reason) for kind in attention_kinds({"layers": names, "kinds": kinds})]
        [('layers 0–2, 4', 'a window'), ('layer 3', 'no window')]
        >>> attention_kinds({"impl": "triton", "reason": "fastest"})[0].layers
        ''
    """
    if isinstance(attention.get("impl"), str):
        return _kind(attention.get("whole") or attention["impl"], "", attention)
    names = attention.get("layers")
    if not isinstance(names, list):
        return []
    kinds = attention.get("kinds")
    if not isinstance(kinds, list):  # written by an earlier version: one reason for all layers
        backends = dict.fromkeys(str(_trained(name)) for name in names)
        return _kind(", ".join(backends), "", attention)
    found = []
    for kind in kinds:
        layers = kind.get("layers") if isinstance(kind, dict) else None
        if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < len(names) for i in layers):
            continue
        if layers:
            found += _kind(_trained(names[layers[0]]), _describe_layers(layers), kind)
    return found


def _trained(names: Any) -> Any:
    """The backend of training: the one for unpacked sequences is that for packed ones if the run packs."""
    return names.get("unpacked") if isinstance(names, dict) else None


def _kind(impl: Any, layers: str, reasons: dict[str, Any]) -> list[AttentionKind]:
    reason, rejected = reasons.get("reason"), reasons.get("rejected")
    if not isinstance(impl, str) or not isinstance(reason, str):
        return []
    pairs = [pair for pair in rejected if isinstance(pair, list)] if isinstance(rejected, list) else []
    return [AttentionKind(impl, layers, reason, tuple((str(p[0]), str(p[1])) for p in pairs if len(p) == 2))]


def _describe_layers(layers: list[int]) -> str:
    """Ranges of layers, such as "layers 0–2, 4"."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    shown = spans[:MOST_RANGES]
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in shown)
    more = len(layers) - sum(last - first + 1 for first, last in shown)
    return f"layer{'s' if len(layers) > 1 else ''} {text}" + (f" and {more} more" if more else "")
