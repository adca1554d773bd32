"""Early stopping: end a run once evaluations no longer improve."""

from __future__ import annotations

import math
from dataclasses import dataclass


def is_better(loss: float, best: float | None, threshold: float = 0.0) -> bool:
    """Whether a loss is lower than the lowest so far by more than `threshold`; NaN never is.

    Example:
        >>> is_better(1.9, 2.0), is_better(1.9, 2.0, threshold=0.2), is_better(math.nan, None)
        (True, False, False)
    """
    if math.isnan(loss):
        return False
    return best is None or math.isnan(best) or loss < best - threshold


@dataclass(frozen=True)
class EarlyStopping:
    """Stops after `patience` evaluations in a row without a loss lower than the best by more than `threshold`.

    Hugging Face's rule (`EarlyStoppingCallback`): each evaluation is compared with the lowest loss before it, and an
    improvement resets the count.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> stopping.reached(1), stopping.reached(2)
        (False, True)
    """

    patience: int
    threshold: float = 0.0

    def reached(self, stale: int) -> bool:
        """Whether that many evaluations without improvement end the run."""
        return stale >= self.patience

    def reason(self, name: str | None, stale: int, best: float | None) -> str:
        """Why the run ended, for the terminal, the log and the report."""
        evaluations = f"{stale} evaluation{'s' if stale != 1 else ''}"
        below = f" by more than {self.threshold:g}" if self.threshold else ""
        lowest = "" if best is None else f" (lowest: {best:.4f})"
        return (
            f"{evaluations} in a row did not lower the {name} loss{below}{lowest}, "
            f"and early_stopping_patience is {self.patience}"
        )
