"""Recorded cases: kernel calls, and training runs of the GPU recipes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from tools.sameness import actions, cases_gpu
from tools.sameness.case import Case
from tools.sameness.gpu.calls import attention_calls, gated_calls, norm_calls, rope_calls
from tools.sameness.gpu.calls_others import loss_calls, optimizer_calls, quantization_calls

NOT_RECORDED: dict[str, str] = {
    "compile/*": "torch.compile does not trace emulated tensors",
    "attention/flex/*": "FlexAttention is compiled by torch",
    "dtype/fp32": "its attention is FlexAttention",
    "resume/*": "the same steps as the others",
}
"""GPU recipes that the emulated device cannot run, or need not, with the reason."""
Recorded = Callable[[], None]


def cases(world: Path, pattern: str | None = None) -> dict[str, Recorded]:
    """Functions to run on the emulated device by name, optionally filtered by a pattern or substring."""
    calls = (
        attention_calls, norm_calls, rope_calls, gated_calls, quantization_calls, optimizer_calls, loss_calls
    )  # fmt: skip
    found: dict[str, Recorded] = {f"call/{name}": call for one in calls for name, call in one()}
    for case in cases_gpu.CASES:
        if not any(fnmatch(case.name, one) for one in NOT_RECORDED):
            found[f"train/{case.name}"] = partial(_train, case, world)
    if pattern is None:
        return found
    return {name: one for name, one in found.items() if fnmatch(name, pattern) or pattern in name}


def _train(case: Case, world: Path) -> None:
    """Run a recipe with loading, evaluation, training and saving, as on a GPU."""
    with tempfile.TemporaryDirectory(prefix="sameness-") as work:
        plain = dataclasses.replace(case, then=())
        recipe = plain.recipe(cases_gpu.BASE, world)
        actions.Runner(plain, recipe, world, Path(work)).train()
