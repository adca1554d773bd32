"""Which keys may change when a run is resumed.

A resumed run continues the very run that stopped: same data in the same order, same arithmetic, same
schedule. Keys that touch none of these may change; a change of any other is an error, never ignored.
"""

from __future__ import annotations

from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.recipe.keys import Recipe
from trimtab.recipe.loading import to_dict
from trimtab.recipe.rules import FLAT_SCHEDULES

CHANGEABLE_ON_RESUME: dict[str, str] = {
    "logging_steps": "only how often numbers are written",
    "eval_steps": "only how often is measured",
    "eval_on_start": "the start is past",
    "early_stopping_patience": "only when the run stops; a larger one continues a run that stopped early",
    "early_stopping_threshold": "only when the run stops",
    "num_threads": "another number may change the last bits of the losses, as the run then says",
    "save_steps": "only how often is saved",
    "save_total_limit": "only how many checkpoints are kept",
    "report_to": "only where metrics are copied to",
    "output_dir": "the run folder may have moved; the one given to --resume counts",
    "data.num_proc": "the tokens are the same however many processes made them",
    "data.cache_dir": "the tokens are the same wherever they are cached",
    "prompts": "completions are shown, not trained on",
    "probe": "scores are shown, not trained on",
    "answers": "answers are shown, not trained on",
    "answers_field": "answers are shown, not trained on",
    "gradient_checkpointing": "the same numbers, kept or computed again",
    "recompute": "the same numbers, kept or computed again",
    "memory_limit": "the same numbers, kept or computed again",
    "unpacked_layers": "the same numbers, kept or unpacked again",
    "cuda_graphs": "the same kernels, handed over one by one or together",
}
"""Key to the reason why it may change."""

CHANGEABLE_IF_FLAT = ("max_steps", "num_train_epochs")
"""May change where the learning rate at a step does not depend on the number of steps: a constant schedule,
its warm-up counted in steps."""


CHANGEABLE_AMONG_GPUS = "device"
"""May change from one CUDA GPU to another (`cuda` to `cuda:1`): the bits are the same on the same kind of GPU."""


def check_resume(old: Recipe, new: Recipe, *, device: str | None = None) -> None:
    """Raise a RecipeError that lists every changed key which may not change; return if there is none.

    `device` is the kind of device that the run began on: what `device: auto` stood for.

    Example:
        >>> from trimtab.recipe import loads
        >>> text = "model: starter\\ndata: {train: starter:math}"
        >>> check_resume(loads(text), loads(text, ["logging_steps=1"]))
    """
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    if _device_kind(old.device, device) == _device_kind(new.device, device):
        before["device"] = after["device"]
    allowed = set(CHANGEABLE_ON_RESUME)
    if old.lr_scheduler_type in FLAT_SCHEDULES and not old.warmup_ratio:
        allowed |= set(CHANGEABLE_IF_FLAT)
    changed = [
        key
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not _covered(key, allowed)
    ]
    if not changed:
        return
    listed = ", ".join(f"{key} ({before.get(key)!r} → {after.get(key)!r})" for key in changed)
    remedy = "set it back" if len(changed) == 1 else "set them back"
    if set(changed) <= set(CHANGEABLE_IF_FLAT):
        remedy += ": with this schedule the number of steps decides the learning rate of every step"
    raise RecipeError(
        f"a resumed run may not change {listed}",
        f"{remedy}, or start a new run from the checkpoint's weights",
    )


def _device_kind(name: str, auto: str | None) -> str:
    """`cuda` of `cuda:1`; of `auto` what it stood for, where that is known."""
    kind = name.partition(":")[0]
    return auto if kind == "auto" and auto is not None else kind


def _covered(key: str, allowed: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"data": {"train": [{"source": "x"}]}}` as `{"data.train.0.source": "x"}`."""
    items: list[tuple[Any, Any]]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {} if items else {prefix: value}
    for key, child in items:
        flat.update(_flat(child, f"{prefix}.{key}" if prefix else str(key)))
    return flat
