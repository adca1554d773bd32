"""Work of a sweep that may run while other processes use the same GPU, and how long a sweep takes with it.

Two kinds of work time nothing on the device: compiling the kernels that a timed cell needs, and cells that measure
memory or losses. On a GPU they run first, several processes at once, as far as memory and cores allow; timed cells then
run one after another with the GPU to themselves, and find their kernels in the caches on disk. Imports no torch.
"""

# B batch, T tokens (context length)

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.facts.devices import DeviceFacts, host_cores, host_memory
from trimtab.facts.shapes import ModelShape
from trimtab.lab.cell_times import CellTimes
from trimtab.lab.step_settings import Kernels, Mode, TimedPart
from trimtab.lab.studies.attention.formula import minimum_bytes
from trimtab.lab.studies.attention.settings import AttentionSettings, is_weighted_sum
from trimtab.lab.studies.attention.settings import Mode as AttentionMode
from trimtab.lab.studies.memory.settings import MeasuredPass
from trimtab.lab.study import Cell
from trimtab.lab.study_models import first_layers, named_shape

GIB = 2**30
MOST_PROCESSES = 12
HOST_BYTES = 4 * GIB
"""Host memory of one process."""
CONTEXT_BYTES = GIB * 6 // 10
"""Device memory of one process without tensors: the CUDA context and its libraries."""
BUDGET_SHARE = 0.9
"""Share of the free device memory that all processes together may use by their estimates."""
COMPILED_SHARE = 0.6
"""Activations of a compiled step relative to eager ones: fused operations save fewer tensors."""
MARGIN = 1.1
CLAIM_BYTES = {"starter": 4 * GIB, "smollm2": 10 * GIB}
"""Peak of a run of the claims study by its model; runs of other models are not shared."""
COMPILES_ATTENTION = ("flex", "triton")
"""Attention backends that compile kernels in eager mode too."""


@dataclass(frozen=True)
class SharedWork:
    """One piece of work that does not need the GPU to itself."""

    cell: Cell
    prepares: bool
    """True: it compiles what the cell will need. False: it measures the cell."""
    nbytes: int
    """Estimated peak of its device memory."""


def shared_work(cells: Iterable[Cell]) -> list[SharedWork]:
    """The shared work of cells: preparations of timed cells, and cells that time nothing.

    Example:
        >>> from trimtab.lab.studies.step.cells import cells
        >>> timed = cells(device="cuda", sizes=["small"], contexts=[512], modes=["compiled"], parts=["both"])
        >>> [(work.prepares, round(work.nbytes / 2**30)) for work in shared_work(timed[:1])]
        [(True, 3)]
    """
    works = []
    for cell in cells:
        needed = _preparation_bytes(cell)
        if needed is not None:
            works.append(SharedWork(cell, True, needed))
        measured = _untimed_bytes(cell)
        if measured is not None:
            works.append(SharedWork(cell, False, measured))
    return works


def _preparation_bytes(cell: Cell) -> int | None:
    """Peak of a cell's preparation; None for a cell that compiles nothing, or measures the compilation itself."""
    settings = cell.settings
    if cell.study == "step":
        if cell.fresh:
            return None
        if settings["mode"] == Mode.COMPILED.value:
            return _step_bytes(settings, optimizer=False)
        if settings["kernels"] == Kernels.FAST.value:  # of one layer: all have the same kernels
            return _step_bytes(settings, optimizer=False, layers=1)
    if cell.study == "attention" and not is_weighted_sum(settings):
        chosen = AttentionSettings.from_dict(settings)
        compiled = chosen.mode is AttentionMode.COMPILED
        if chosen.tried and (compiled or chosen.backend in COMPILES_ATTENTION):
            return CONTEXT_BYTES + 3 * minimum_bytes(chosen)
    return None


def _untimed_bytes(cell: Cell) -> int | None:
    """Peak of a cell that times nothing; None for a timed one."""
    settings = cell.settings
    if cell.study == "memory":
        if settings["pass"] == MeasuredPass.FULL.value:
            return _step_bytes(settings, optimizer=True)
        shape = named_shape(settings["size"])
        layers = 2 * _activation_bytes(first_layers(shape, 1), settings)
        return CONTEXT_BYTES + int(MARGIN * (_weight_bytes(settings) * shape.num_parameters + layers))
    if cell.study == "claims":
        from trimtab.lab.studies.claims.claim import Metric
        from trimtab.lab.studies.claims.trial import Trial

        trial = Trial.of(settings)
        return None if Metric.SPEED in trial.declared.metrics else CLAIM_BYTES.get(trial.model)
    return None


def _step_bytes(settings: Mapping[str, Any], *, optimizer: bool, layers: int | None = None) -> int:
    """Peak of a study model's step: weights, with the optimizer two moments, and activations or gradients, of which the
    former are released while the latter are made."""
    shape = first_layers(named_shape(settings["size"]), layers)
    full = optimizer or settings.get("part") == TimedPart.FULL.value
    activations = _activation_bytes(shape, settings)
    if settings.get("mode") == Mode.COMPILED.value:
        activations = int(COMPILED_SHARE * activations)
    persistent = (_weight_bytes(settings) + (8 if full else 0)) * shape.num_parameters
    return CONTEXT_BYTES + int(MARGIN * (persistent + max(4 * shape.num_parameters, activations)))


def _weight_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes per parameter: fp32 weights, and their copies under autocast."""
    return 4 if settings["precision"] in ("fp32", "tf32") else 6


def _activation_bytes(shape: ModelShape, settings: Mapping[str, Any]) -> int:
    """Tensors saved for backward: of each layer 10 of hidden and 4 of intermediate size, and the scores; logits.

    Peaks of the memory study on a CPU are 1 to 10 % lower, without the margin.
    """
    tokens = settings["batch"] * settings["context"]
    layer = tokens * 4 * (10 * shape.hidden_size + 4 * shape.intermediate_size)
    if settings["kernels"] == Kernels.REFERENCE.value:
        layer += 10 * shape.blocks[0].attention.num_heads * tokens * settings["context"]
    return shape.num_layers * layer + 8 * tokens * shape.vocab_size


def processes_at_once(device: DeviceFacts, cores: int | None = None, host_bytes: int | None = None) -> int:
    """The number of processes for shared work: one on a CPU, where the cores themselves are measured.

    Args:
        device: the device; of a GPU its memory counts.
        cores: cores of its host, by default of this machine.
        host_bytes: available memory of its host, by default of this machine.

    Example:
        >>> processes_at_once(DeviceFacts("a CPU", "cpu", 2**34))
        1
    """
    if device.kind != "cuda":
        return 1
    by_host = (host_bytes or host_memory()[1]) // HOST_BYTES
    by_device = device.memory_bytes // (4 * CONTEXT_BYTES)
    return max(1, min(MOST_PROCESSES, (cores or host_cores()) - 2, by_host, by_device))


def memory_budget(device: DeviceFacts, at_once: int) -> int:
    """Bytes of device memory that shared work may use at the same time, by its estimates."""
    free = device.free_bytes or device.memory_bytes
    return max(0, int(BUDGET_SHARE * free) - at_once * CONTEXT_BYTES)


def ordered(works: Sequence[SharedWork], times: CellTimes) -> list[SharedWork]:
    """Preparations first, long ones before short ones, then cells in their own order."""
    preparing = sorted((w for w in works if w.prepares), key=lambda w: -times.preparing(w.cell))
    return preparing + [work for work in works if not work.prepares]


def sweep_seconds(cells: Sequence[Cell], times: CellTimes, device: DeviceFacts, at_once: int) -> float:
    """Estimated seconds of a sweep over cells with `at_once` processes for shared work.

    Example:
        >>> from trimtab.lab.cell_times import Speed
        >>> device = DeviceFacts("a CPU", "cpu", 2**34)
        >>> sweep_seconds([Cell("sizes", {"size": "small"})], CellTimes(Speed.of(device)), device, 1)
        0.01
    """
    if at_once == 1:
        return times.total(cells)
    works = shared_work(cells)
    measured = {work.cell.key for work in works if not work.prepares}
    prepared = {work.cell.key for work in works if work.prepares}
    alone = sum(
        times.seconds(cell, prepared=cell.key in prepared) for cell in cells if cell.key not in measured
    )
    if not works:
        return alone
    return (
        alone + times.start + _makespan(ordered(works, times), times, memory_budget(device, at_once), at_once)
    )


def _makespan(works: list[SharedWork], times: CellTimes, budget: int, at_once: int) -> float:
    """Seconds until all work has ended, if each begins as soon as a process and its memory are free."""
    waiting, running, now, used = list(works), list[tuple[float, int]](), 0.0, 0
    while waiting or running:
        chosen = next((work for work in waiting if not running or used + work.nbytes <= budget), None)
        if chosen is None or len(running) == at_once:
            now, freed = heapq.heappop(running)
            used -= freed
            continue
        waiting.remove(chosen)
        seconds = times.preparing(chosen.cell) if chosen.prepares else times.seconds(chosen.cell)
        heapq.heappush(running, (now + seconds, chosen.nbytes))
        used += chosen.nbytes
    return now
