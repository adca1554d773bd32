"""Which keys may change when a run is resumed.

A resumed run continues with the same data order, arithmetic and schedule. `CHANGEABLE_ON_RESUME` lists the keys that
may change, each with the reason; changing any other key is an error.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.recipe.keys import Recipe
from trimtab.recipe.loading import to_dict

CHANGEABLE_ON_RESUME: dict[str, str] = {
    "logging_steps": "changes only the logging interval",
    "eval_steps": "changes only the evaluation interval",
    "eval_on_start": "the evaluation before the first step is over",
    "early_stopping_patience": "changes only when the run stops; a larger value continues a run that stopped early",
    "early_stopping_threshold": "changes only when the run stops",
    "num_threads": "another number may change the last bits of the losses; the run prints a note",
    "save_steps": "changes only the checkpoint interval",
    "save_total_limit": "changes only how many checkpoints are kept",
    "max_steps": "trains longer: from the resumed step on, the schedule runs over the new number of steps, as in "
    "Hugging Face's Trainer; a constant schedule does not change",
    "num_train_epochs": "as `max_steps`",
    "device": "continues the same training: bitwise identical on another GPU of the same model, with different "
    "rounding between CUDA and CPU",
    "report_to": "changes only where metrics are sent",
    "output_dir": "the run folder may have moved; the path given to --resume is used",
    "data.num_proc": "tokens do not depend on the number of tokenizer processes",
    "data.cache_dir": "tokens do not depend on the cache folder",
    "prompts": "completions do not affect training",
    "probe": "probe scores do not affect training",
    "answers": "answers do not affect training",
    "answers_field": "answers do not affect training",
    "gradient_checkpointing": "gradients do not depend on the recompute policy",
    "recompute": "gradients do not depend on the recompute policy",
    "memory_limit": "gradients do not depend on the recompute policy",
    "dequantized_layers": "results do not depend on dequantized copies",
    "cuda_graphs": "the same kernels run, launched one by one or as a graph",
}
"""Keys that may change, each with the reason."""


WITH_DEVICE = ("model.attn_implementation", "optim_implementation", "torch_compile")
"""Keys that may change together with `device`: an implementation named for one device may not run on the other."""


def check_resume(old: Recipe, new: Recipe, *, run: str = "RUN", overrides: Sequence[str] = ()) -> None:
    """Raises a RecipeError that lists every changed key that may not change on resume.

    `run` and `overrides` are what the user gave; the error uses them in the suggested command.

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
        if before.get(key) != after.get(key) and not _is_allowed(key, allowed)
    ]
    if not changed:
        return
    listed = ", ".join(f"{key} ({before.get(key)!r} → {after.get(key)!r})" for key in changed)
    remedy = "set it back" if len(changed) == 1 else "set them back"
    raise RecipeError(
        f"a resumed run may not change {listed}",
        f"{remedy}, or start a new run from this one's weights: {_new_run_command(old, run, overrides)}",
    )


def _new_run_command(old: Recipe, run: str, overrides: Sequence[str]) -> str:
    """The command that starts a new run with other settings from the weights of a run."""
    words = [f"{run}/recipe.yaml", f"output_dir={run}-2"]
    first = ""
    if old.lora is not None and not any(word.startswith("lora.") for word in overrides):
        command = shlex.join(["trimtab", "export", "peft", run, f"{run}-adapter"])
        words.append(f"lora={{adapter: {run}-adapter}}")
        return f"`{command}`, then `{shlex.join(['trimtab', 'train', *words, *overrides])}`"
    if old.lora is not None:  # a new adapter on the merged weights
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


def _is_allowed(key: str, allowed: set[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens `{"data": {"train": [{"source": "x"}]}}` to `{"data.train.0.source": "x"}`."""
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
