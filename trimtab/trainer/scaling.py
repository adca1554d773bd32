"""Loss scaling for fp16: keeps gradients from underflowing to zero; an overflow halves the scale."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MIN_SCALE = 2.0**-14


@dataclass
class LossScaler:
    """The scale and the good steps since it last changed; plain numbers, stored in a checkpoint's scalars.

    Example:
        >>> scaler = LossScaler(scale=4.0)
        >>> scaler.update(overflowed=True)
        >>> scaler.scale
        2.0
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    good_steps: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot be lowered any more: non-finite gradients are then not an overflow."""
        return self.scale <= MIN_SCALE

    def update(self, overflowed: bool) -> None:
        """Halve after an overflow; double after `growth_interval` good steps in a row."""
        if overflowed:
            self.scale = max(self.scale / 2, MIN_SCALE)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.good_steps = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)
