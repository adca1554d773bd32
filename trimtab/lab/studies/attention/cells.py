"""Validates the options of the study and returns its cells. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.facts.dtypes import dtype_alias
from trimtab.kernels.weighted_sum.spec import IMPLS as WEIGHTED_SUM_IMPLS
from trimtab.lab.choices import check_counts, check_seconds, choose_members, choose_names
from trimtab.lab.studies.attention.formula import minimum_bytes
from trimtab.lab.studies.attention.settings import (
    BACKENDS,
    PLAIN,
    TILED,
    AttentionSettings,
    Mode,
    Visibility,
    WeightedSumSettings,
)
from trimtab.lab.study import Cell

STUDY = "attention"
DTYPES = ("fp32", "bf16", "fp16")
HEAD_DIMS = (16, 32, 64, 128)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST_ON_CPU = 4096
"""Longest default length on a CPU, where a pass of plain attention at batch 8 takes seconds."""
LONGEST_TILED = 4096
"""Longest length of `tiled`, unless the user names that backend: its Python loop runs N²/8192 tiles one by one."""
BATCHES = (8, 1)


@dataclass(frozen=True)
class Options:
    """The options of the study; an empty sequence means the device's default.

    Args:
        backends: names of `BACKENDS`.
        dtypes: fp32, bf16, fp16; by default fp32 and bf16, on a CPU fp32.
        head_dims, lengths, batches: every combination is measured. Lengths are 256 … 65536 by default, on a CPU
            256 … 4096.
        heads: the number of heads.
        modes: eager, compiled (torch.compile); by default eager, and for plain attention both.
        visibility: causal, or every query sees every key.
        repetitions: repetitions of each pass.
        seconds: time limit per cell, for the repetitions of both passes together.
        oversized: also try cells that cannot fit the device's memory.
        weighted_sum: also time the kernel of docs/writing-a-kernel.md.
    """

    backends: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    head_dims: Sequence[int] = ()
    lengths: Sequence[int] = ()
    batches: Sequence[int] = ()
    heads: int = 1
    modes: Sequence[str] = ()
    visibility: Visibility = Visibility.CAUSAL
    repetitions: int = 100
    seconds: float = 2.0
    oversized: bool = False
    weighted_sum: bool = True


def cells(options: Options | None = None, *, device: str = "cpu", memory_bytes: int) -> list[Cell]:
    """The cells of the study, short ones first.

    A cell whose formula exceeds the device's memory is not tried: it is recorded as "out of memory (predicted)", never
    as measured. Its settings contain the memory that it was compared with, so that the same cell, measured with
    `oversized`, is another record.

    Args:
        options: the options; the defaults if None.
        device: cpu or cuda.
        memory_bytes: total memory of the device.

    Raises:
        RecipeError: an option has an unknown name or an impossible value.

    Example:
        >>> small = Options(["reference", "triton"], lengths=[256], head_dims=[64], batches=[8], weighted_sum=False)
        >>> [(c.settings["backend"], c.settings["mode"]) for c in cells(small, memory_bytes=2**35)]
        [('reference', 'eager'), ('reference', 'compiled'), ('triton', 'eager')]
    """
    options = options or Options()
    checked = _checked(options, device)
    settings = _attention(checked, device, memory_bytes, long_tiled=TILED in options.backends)
    cells = [Cell(STUDY, entry.to_dict()) for entry in settings]
    if checked.weighted_sum:
        cells += [
            Cell(STUDY, WeightedSumSettings(
                impl, dtype, device=device, repetitions=checked.repetitions, seconds=checked.seconds
            ).to_dict())
            for dtype in checked.dtypes
            for impl in WEIGHTED_SUM_IMPLS
        ]  # fmt: skip
    return cells


def _attention(
    checked: Options, device: str, memory_bytes: int, *, long_tiled: bool
) -> Iterator[AttentionSettings]:
    axes = (checked.dtypes, checked.batches, checked.lengths, checked.head_dims, checked.backends)
    for dtype, batch, length, head_dim, backend in itertools.product(*axes):
        if backend == TILED and length > LONGEST_TILED and not long_tiled:
            continue
        for mode in _modes(backend, checked.modes):
            cell = AttentionSettings(
                backend, mode, dtype, batch, checked.heads, head_dim, length, checked.visibility,
                device, checked.repetitions, checked.seconds,
            )  # fmt: skip
            fits = checked.oversized or minimum_bytes(cell) <= memory_bytes
            yield cell if fits else replace(cell, memory_bytes=memory_bytes)


def _modes(backend: str, names: Sequence[str]) -> Sequence[Mode]:
    if names:
        return [Mode(name) for name in names]
    return (Mode.EAGER, Mode.COMPILED) if backend == PLAIN else (Mode.EAGER,)


def _checked(options: Options, device: str) -> Options:
    """The options with the defaults of the device; raises RecipeError for invalid values."""
    cpu = device == "cpu"
    lengths = tuple(length for length in LENGTHS if not cpu or length <= LONGEST_ON_CPU)
    checked = replace(
        options,
        backends=choose_names(options.backends, BACKENDS, "--backends") or BACKENDS,
        dtypes=choose_names([dtype_alias(name) for name in options.dtypes], DTYPES, "--precisions")
        or (DTYPES[:1] if cpu else DTYPES[:2]),
        head_dims=check_counts(options.head_dims, "--head-dims") or HEAD_DIMS,
        lengths=check_counts(options.lengths, "--contexts") or lengths,
        batches=check_counts(options.batches, "--batch") or BATCHES,
        modes=[mode.value for mode in choose_members(Mode, options.modes, "--modes")],
    )
    check_counts([options.heads], "--heads")
    check_counts([options.repetitions], "--repetitions")
    check_seconds(options.seconds, "--budget")
    return checked
