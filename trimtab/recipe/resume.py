"""Which keys may change when a run is resumed.

A resumed run continues the very run that stopped: same data in the same order, same arithmetic, same
schedule. Keys that touch none of these may change; a change of any other is an error, never ignored.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.recipe.keys import Recipe
from trimtab.recipe.loading import to_dict

CHANGEABLE_ON_RESUME: dict[str, str] = {
    "logging_steps": "only how often numbers are written",
    "eval_steps": "only how often is measured",
    "eval_on_start": "the start is past",
    "early_stopping_patience": "only when the run stops; a larger one continues a run that stopped early",
    "early_stopping_threshold": "only when the run stops",
    "num_threads": "another number may change the last bits of the losses, as the run then says",
    "save_steps": "only how often is saved",
    "save_total_limit": "only how many checkpoints are kept",
    "max_steps": "trains longer: the schedule is followed over the new number of steps from the resumed one on, as "
    "Hugging Face's Trainer does; a constant one stays as it is",
    "num_train_epochs": "as `max_steps`",
    "device": "the same training: on another GPU of the same kind with the same bits, from CUDA to CPU or back with "
    "other rounding",
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


WITH_DEVICE = ("model.attn_implementation", "optim_implementation", "torch_compile")
"""May change together with `device`: what was named for one may not run on the other."""


def check_resume(old: Recipe, new: Recipe, *, run: str = "RUN", overrides: Sequence[str] = ()) -> None:
    """Raise a RecipeError that lists every changed key which may not change; return if there is none.

    `run` and `overrides`, as the user gave them, are for the command that the error names.

    Example:
        >>> from trimtab.recipe import loads
        >>> text = "model: starter\\ndata: {train: starter:math}"
        >>> check_resume(loads(text), loads(text, ["logging_steps=1"]))
    """
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    allowed = {*CHANGEABLE_ON_RESUME, *(WITH_DEVICE if old.device != new.device else ())}
    changed = [
        key
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not _covered(key, allowed)
    ]
    if not changed:
        return
    listed = ", ".join(f"{key} ({before.get(key)!r} → {after.get(key)!r})" for key in changed)
    remedy = "set it back" if len(changed) == 1 else "set them back"
    raise RecipeError(
        f"a resumed run may not change {listed}",
        f"{remedy}, or start a new run from this one's weights: {_anew(old, run, overrides)}",
    )


def _anew(old: Recipe, run: str, overrides: Sequence[str]) -> str:
    """How to train on with other keys, from the weights of a run."""
    words = [f"{run}/recipe.yaml", f"output_dir={run}-2"]
    first = ""
    if old.lora is not None and not any(word.startswith("lora.") for word in overrides):
        command = shlex.join(["trimtab", "export", "peft", run, f"{run}-adapter"])
        words.append(f"lora={{adapter: {run}-adapter}}")
        return f"`{command}`, then `{shlex.join(['trimtab', 'train', *words, *overrides])}`"
    if old.lora is not None:  # a fresh adapter on what the old one has learnt
        first = f"`{shlex.join(['trimtab', 'merge', run, f'{run}-merged'])}`, then "
        words += [f"model.name={run}-merged", *(["lora.adapter=null"] if old.lora.adapter else [])]
    else:
        words.append(f"model.name={run}")
    if old.model.init == "random":
        words.append("model.init=pretrained")
    if old.model.added_tokens:
        words.append("model.added_tokens=[]")
    if old.model.revision is not None:
        words.append("model.revision=null")
    return f"{first}`{shlex.join(['trimtab', 'train', *words, *overrides])}`"


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
