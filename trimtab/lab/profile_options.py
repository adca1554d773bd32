"""Options of `trimtab profile`, and their validation. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.run.prepare import Prepared


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

    Args:
        steps: timed optimizer steps.
        warm_up: steps before them.
        document: tokens per document of packed sequences; None for one document per sequence.
        folder: folder for memory.json, with every block of the recorded step, and the trace.
        trace: also write a trace that ui.perfetto.dev opens.
        nvtx: emit NVTX ranges in the timed steps, for NVIDIA's tools, and do not run torch's profiler.
        snapshot: file for torch's own snapshot of the CUDA allocator.
    """

    steps: int = 5
    warm_up: int = 2
    document: int | None = None
    folder: Path | None = None
    trace: bool = False
    nvtx: bool = False
    snapshot: Path | None = None


def check_options(options: ProfileOptions, prepared: Prepared) -> None:
    """Raises RecipeError or ResourceError for options that cannot be used."""
    if options.steps < 1 or options.warm_up < 0:
        word, value = ("--steps", options.steps) if options.steps < 1 else ("--warm-up", options.warm_up)
        raise RecipeError(
            f"{word} {value} is not a number of steps", "use at least 1 step, and a warm-up of at least 0"
        )
    tokens = prepared.recipe.max_seq_length
    if options.document is not None and not 2 <= options.document <= tokens:
        raise RecipeError(
            f"--document {options.document} is not a possible document length", f"use 2 to {tokens} tokens"
        )
    if options.nvtx and (options.trace or options.snapshot is not None):
        raise RecipeError(
            "--nvtx runs without the profiler that writes traces and snapshots",
            "remove --nvtx, or --trace and --snapshot",
        )
    if prepared.device.kind == "cuda":
        return
    for option, given in (("--nvtx", options.nvtx), ("--snapshot", options.snapshot is not None)):
        if given:
            raise ResourceError(
                f"{option} needs a CUDA GPU, and this profile runs on the CPU",
                f"remove {option}; the report and memory.json are written on a CPU too",
            )
