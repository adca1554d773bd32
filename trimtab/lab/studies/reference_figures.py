"""Figures of the reference study, shown next to our own if the settings are the same. Imports no torch.

Source: one A100-SXM4-40GB, fp32, batch 4, eager mode with plain attention; milliseconds of one step. The forward pass
was timed twice, in a study of sizes at context 128 and in a study of contexts; reports show both figures.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "one A100-SXM4-40GB, fp32, batch 4"
LABEL = "reference (A100 40 GB, fp32)"
"""Column header."""
BATCH = 4
WARM_UP_SIZE, WARM_UP_CONTEXT = "small", 128


@dataclass(frozen=True)
class ReferenceWarmUp:
    """Time of forward + backward after some warm-up steps; None for figures that the study does not state."""

    mean_ms: float
    std_ms: float | None = None
    first_ms: float | None = None


FORWARD_AT_128 = {"small": 38.3, "medium": 76.6, "large": 114.6, "xl": 155.1, "2.7B": 219.2}
FORWARD_BACKWARD_AT_128 = {"small": 78.3, "medium": 154.6, "large": 273.1, "xl": 457.9, "2.7B": 672.3}

FORWARD: dict[str, dict[int, float | None]] = {
    "small": {128: 36.8, 256: 37.4, 512: 46.3, 1024: 103.9},
    "medium": {128: 75.4, 256: 74.7, 512: 137.2, 1024: None},
    "large": {128: 112.0, 256: 142.0, 512: 285.0, 1024: None},
    "xl": {128: 152.0, 256: 281.0, 512: None},
    "2.7B": {128: 219.0, 256: 416.0, 512: None},
}
"""Milliseconds by size and context; None for out of memory."""

BACKWARD_TO_FORWARD = (
    "The reference study (A100 40 GB, fp32) states a backward pass of 1.1 times the forward pass at 128 tokens, up to "
    "6.7 times for medium at 1024."
)

WARM_UP = {
    0: ReferenceWarmUp(226.0, 441.0, 1550.0),
    1: ReferenceWarmUp(77.6, 2.0),
    2: ReferenceWarmUp(76.4),
    5: ReferenceWarmUp(76.3),
}
"""By the number of warm-up steps."""


def is_known(size: str, context: int) -> bool:
    """Whether the study has figures of a size and context.

    Example:
        >>> is_known("small", 1024), is_known("tiny", 16)
        (True, False)
    """
    return context in FORWARD.get(size, {})


def reference_forward(size: str, context: int) -> str:
    """The forward time, formatted for a table.

    Example:
        >>> [reference_forward("medium", context) for context in (64, 128, 256, 1024)]
        ['–', '76.6 and 75.4', '74.7', 'out of memory']
    """
    by_context = FORWARD.get(size, {})
    if context not in by_context:
        return "–"
    milliseconds = by_context[context]
    if milliseconds is None:
        return "out of memory"
    return f"{FORWARD_AT_128[size]:.1f} and {milliseconds:.1f}" if context == 128 else f"{milliseconds:.1f}"


def reference_forward_backward(size: str, context: int) -> str:
    """The time of forward + backward, formatted for a table.

    Example:
        >>> reference_forward_backward("small", 128), reference_forward_backward("small", 256)
        ('78.3', '–')
    """
    if context != 128 or size not in FORWARD_BACKWARD_AT_128:
        return "–"
    return f"{FORWARD_BACKWARD_AT_128[size]:.1f}"
