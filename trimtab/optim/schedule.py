"""Learning rates as a pure function of the step: no state to save or restore."""

from __future__ import annotations

import math

from trimtab.optim.spec import SCHEDULES


def learning_rate(
    kind: str,
    step: int,
    *,
    base: float,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 0 as in transformers' schedules.

    So the first warm-up step has a rate of 0, and step `warmup_steps` the full rate. `min_ratio` is the final rate of
    decaying schedules relative to `base`; `decay_steps` is the length of warmup_stable_decay's last phase (by default a
    tenth of the run). Beyond `total_steps` a decaying schedule stays at its final value.

    Example:
        >>> [learning_rate("cosine", s, base=1.0, total_steps=5, warmup_steps=1) for s in (0, 1, 3, 5)]
        [0.0, 1.0, 0.5, 0.0]
    """
    if kind not in SCHEDULES:
        raise ValueError(f"unknown schedule {kind!r}; use one of {', '.join(SCHEDULES)}")
    if kind == "constant":
        return base
    if kind == "warmup_stable_decay":
        if decay_steps is None:
            decay_steps = max(1, total_steps // 10)
        return base * _warmup_stable_decay(step, total_steps, warmup_steps, decay_steps, min_ratio)
    if step < warmup_steps:
        return base * (step / max(1, warmup_steps))
    if kind == "constant_with_warmup":
        return base
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        factor = max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
    return base * max(0.0, factor * (1.0 - min_ratio) + min_ratio)


def _warmup_stable_decay(step: int, total: int, warmup: int, decay: int, min_ratio: float) -> float:
    """Linear warm-up (from `min_ratio`, as in transformers), plateau, half a cosine down to `min_ratio`."""
    stable_end = total - decay
    if step < warmup:
        return step / max(1, warmup) * (1.0 - min_ratio) + min_ratio
    if step < stable_end:
        return 1.0
    # if the warm-up overlaps with the decay phase, there is no plateau and the decay starts after the warm-up
    start = max(stable_end, warmup)
    if step < start + decay:
        factor = 0.5 * (1.0 + math.cos(math.pi * (step - start) / max(1, decay)))
        return max(0.0, factor * (1.0 - min_ratio) + min_ratio)
    return min_ratio
