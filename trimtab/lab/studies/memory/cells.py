"""Validates the options of the memory study and returns its cells. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.facts.errors import RecipeError
from trimtab.lab.choices import check_counts, choose_members, choose_names
from trimtab.lab.step_settings import Kernels, Loss, Precision, StepSettings
from trimtab.lab.studies.memory.settings import MeasuredPass, MemorySettings
from trimtab.lab.study import Cell
from trimtab.lab.study_models import STUDY_MODELS, model_settings, named_shape

STUDY = "memory"
CONTEXTS = (128, 256, 512, 1024)
CPU_SIZES, CPU_CONTEXTS = ("small",), (128, 256)
"""Defaults on a CPU, where a step of the larger models takes minutes."""
PRECISIONS = (Precision.FP32.value, Precision.BF16.value)
BATCH = 4
PARTS = {"forward": MeasuredPass.FORWARD, "full": MeasuredPass.FULL}
"""Values of --parts, which are parts of `trimtab bench step`."""


@dataclass(frozen=True)
class Options:
    """The options of the study; an empty sequence means the default.

    Args:
        sizes: study models, recipes or models by name; all five study models by default, on a CPU `small`.
        contexts: tokens per sequence; 128 to 1024 by default, on a CPU 128 and 256.
        precisions: fp32, tf32, bf16, fp16; fp32 and bf16 by default.
        parts: forward, full; both by default.
        batch: sequences per step.
        kernels: reference or fast.
        loss: logits_sum or cross_entropy.
        snapshots: folder to which every block of each cell is written.
    """

    sizes: Sequence[str] = ()
    contexts: Sequence[int] = ()
    precisions: Sequence[str] = ()
    parts: Sequence[str] = ()
    batch: int = BATCH
    kernels: str = Kernels.REFERENCE.value
    loss: str = Loss.LOGITS_SUM.value
    snapshots: Path | None = None


def cells(options: Options | None = None, *, device: str = "cpu") -> list[Cell]:
    """The cells of the study, small models and short contexts first.

    Raises:
        RecipeError: an option has an unknown name or an impossible value.

    Example:
        >>> [c.settings["pass"] for c in cells(Options(["tiny"], contexts=[64], precisions=["fp32"]))]
        ['forward', 'full step']
    """
    options = options or Options()
    on_cpu = not device.startswith("cuda")
    sizes = options.sizes or (CPU_SIZES if on_cpu else tuple(STUDY_MODELS))
    contexts = options.contexts or (CPU_CONTEXTS if on_cpu else CONTEXTS)
    precisions = choose_members(Precision, options.precisions or PRECISIONS, "--precisions")
    parts = [PARTS[name] for name in choose_names(options.parts or list(PARTS), list(PARTS), "--parts")]
    [kernels] = choose_members(Kernels, [options.kernels], "--kernels")
    [loss] = choose_members(Loss, [options.loss], "--loss")
    check_counts([options.batch], "--batch")
    cells = []
    for size in dict.fromkeys(sizes):
        _check_contexts(size, contexts)
        model = model_settings(size)
        for context, precision, part in itertools.product(dict.fromkeys(contexts), precisions, parts):
            step = StepSettings(size, context, options.batch, precision, kernels, loss, device)
            folder = None if options.snapshots is None else str(options.snapshots.expanduser().absolute())
            cell_settings = MemorySettings(step, part, model.get("shape"), folder)
            cells.append(Cell(STUDY, cell_settings.to_dict()))
    return cells


def _check_contexts(size: str, contexts: Sequence[int]) -> None:
    longest = named_shape(size).max_positions
    for context in contexts:
        if not 1 <= context <= longest:
            raise RecipeError(
                f"--contexts {context} is outside the positions of {size}", f"use 1 to {longest}"
            )
