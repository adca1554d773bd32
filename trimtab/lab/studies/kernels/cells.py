"""Validates the options of the kernel study and returns its cells. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.lab.choices import check_counts, choose_members
from trimtab.lab.step_settings import Kernels, Loss, Precision
from trimtab.lab.studies.step.cells import check_model
from trimtab.lab.study import Cell
from trimtab.lab.study_models import model_settings

STUDY = "kernels"
SIZES = ("small",)
CONTEXTS = (128, 1024)
"""The contexts of the reference study."""
BATCH = 4
ROUNDS = 3


def cells(
    *,
    device: str,
    sizes: Sequence[str] = (),
    contexts: Sequence[int] = (),
    precisions: Sequence[str] = (),
    kernels: Sequence[str] = (),
    loss: str = Loss.LOGITS_SUM.value,
    batch: int = BATCH,
    rounds: int = ROUNDS,
    trace: Path | None = None,
    nvtx: bool = False,
) -> list[Cell]:
    """One cell for each combination; an empty list means the default.

    Args:
        device: cpu, cuda or cuda:N.
        sizes: study models, recipes, or any model that `trimtab plan` accepts; `small` by default.
        contexts: tokens per sequence; 128 and 1024 by default.
        precisions: fp32, tf32, bf16, fp16; fp32 by default.
        kernels: reference (plain attention and torch's own operations), fast (those of training); both by default.
        loss: logits_sum, as in the reference study, or cross_entropy.
        batch: sequences per step.
        rounds: profiles of each pass, of which the fastest counts; fewer if they take long.
        trace: folder for a trace of each cell's full step; None for no traces.
        nvtx: emit NVTX ranges for NVIDIA's tools instead of profiling.

    Raises:
        RecipeError: an unknown word, with the nearest one; a number too small; a context beyond the model's positions.
        ModelError: trimtab can plan the model but not build it.

    Example:
        >>> found = cells(device="cpu", sizes=["tiny"], contexts=[64])
        >>> [cell.settings["kernels"] for cell in found]
        ['reference', 'fast']
    """
    if nvtx and trace is not None:
        raise RecipeError("--nvtx runs without the profiler that writes traces", "use --nvtx or --trace")
    check_counts([batch], "--batch")
    check_counts([rounds], "--rounds")
    names = list(dict.fromkeys(sizes or SIZES))
    lengths = check_counts(contexts or CONTEXTS, "--contexts")
    for name in names:
        check_model(name, max(lengths))
    chosen_precisions = choose_members(Precision, precisions or ("fp32",), "--precisions")
    chosen_kernels = choose_members(Kernels, kernels or ("reference", "fast"), "--kernels")
    (chosen_loss,) = choose_members(Loss, [loss], "--loss")
    cells = []
    for name, context, precision, kind in itertools.product(
        names, lengths, chosen_precisions, chosen_kernels
    ):
        settings: dict[str, Any] = {
            **model_settings(name),
            "context": context,
            "batch": batch,
            "precision": precision.value,
            "kernels": kind.value,
            "loss": chosen_loss.value,
            "device": device.split(":")[0],
            "rounds": rounds,
        }
        if nvtx:
            settings["nvtx"] = True
        if trace is not None:
            folder = "-".join([Path(name).name, str(context), precision.value, kind.value])
            settings["trace"] = str(trace / "traces" / folder)
        cells.append(Cell(STUDY, settings))
    return cells
