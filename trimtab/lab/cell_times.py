"""Estimates how long a cell will take, before it is measured. Imports no torch.

The estimates plan sweeps: `--list` prints them, and `--minutes` starts no cell that would not end in time. They count
FLOPs, kernel launches, compilation and process starts with the constants below, which were chosen for an H200 and a
laptop's CPU: expect them to be within a factor of three. `CellTimes` corrects them by the cells of the same study that
this machine has already measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.lab.step_settings import Kernels, Mode, TimedPart
from trimtab.lab.step_times import LEAST_STEPS
from trimtab.lab.study import Cell, CellOutcome, Measurement
from trimtab.lab.study_models import named_shape
from trimtab.model.spec import flops_per_token

REACHED = {"fp32": 0.7, "tf32": 0.5, "bf16": 0.5, "fp16": 0.5}
"""Share of the peak FLOP/s that a step reaches."""
UNKNOWN_GPU = {"fp32": 15e12, "tf32": 50e12, "bf16": 100e12, "fp16": 100e12}
"""FLOP/s of a GPU without a data sheet."""
CORE_FLOPS = 40e9
"""FLOP/s of one CPU core in fp32."""
EMULATED = 0.2
"""Speed of 16-bit products relative to fp32 on a CPU without instructions for them."""
LAUNCH_SECONDS = {"cuda": 1e-5, "cpu": 3e-5}
"""Host time of one operation of a step."""
LAYER_OPERATIONS = 60
"""Operations of the forward pass of one layer; a backward pass has twice as many."""
START_SECONDS = {"cuda": 10.0, "cpu": 5.0}
"""Start of a process, with torch and the CUDA context."""
AHEAD_SHARE = 0.4
"""Seconds of a fresh process relative to another: several start at the same time."""
BUILD_SECONDS = 0.3
"""Building a model, releasing the previous one, and writing the record."""
VERIFY_SECONDS = 0.15
"""Inputs and memory of an attention cell, and its share of the checks against fp64."""
COMPILE_LAYER_SECONDS = 2.5
"""Compiling forward and backward of one layer as a part of the whole model."""
COMPILE_REGION_SECONDS = 12.0
"""Compiling one block, which all layers share."""
COMPILE_ATTENTION_SECONDS = 8.0
COMPILE_KERNELS_SECONDS = 15.0
"""Compiling trimtab's Triton kernels for one size and precision."""
TRACE_SHARE = 0.1
"""Time of a compilation that only traces, relative to one that generates code."""
CACHED_SHARE = 0.25
"""Time of torch.compile with its code in the cache on disk, relative to an empty cache: it traces again."""
CACHED_KERNELS_SHARE = 0.05
"""The same for trimtab's own kernels, which are only loaded."""
COMPILED_ALONGSIDE = "compiled_alongside"
"""The field of a result whose kernels were compiled before: the number of processes that worked at the same time."""
EVENT_SECONDS = 2.5e-4
"""Reading one operation from the profiler, per profile."""
RECORDED_SECONDS = 2e-3
"""Recording and attributing the memory of one operation."""


@dataclass(frozen=True)
class Speed:
    """What the estimates assume about a device."""

    kind: str
    """cpu or cuda."""
    flops: Mapping[str, float]
    """Peak FLOP/s by precision."""
    bandwidth: float
    """Bytes per second of the device's memory."""

    @staticmethod
    def of(device: DeviceFacts) -> Speed:
        """From the device's data sheet; typical values without one.

        Example:
            >>> Speed.of(DeviceFacts("NVIDIA H200", "cuda", 150 * 2**30)).flops["bf16"] / 1e12
            989.4
        """
        if device.kind == "cuda":
            sheet = device.data_sheet
            flops = UNKNOWN_GPU if sheet is None else {**UNKNOWN_GPU, **sheet.flops}
            return Speed("cuda", flops, 1e12 if sheet is None else sheet.bandwidth)
        fp32 = CORE_FLOPS * (device.cores or 1)
        half = fp32 * (1.0 if device.bf16 else EMULATED)
        return Speed("cpu", {"fp32": fp32, "tf32": fp32, "bf16": half, "fp16": fp32 * EMULATED}, 1e10)


@dataclass
class CellTimes:
    """Estimated seconds of cells, corrected by measured ones.

    Example:
        >>> times = CellTimes(Speed("cpu", {"fp32": 1e11}, 1e10))
        >>> times.seconds(Cell("sizes", {"size": "small"}))
        0.01
    """

    speed: Speed
    _measured: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(estimated, measured) seconds by study."""

    @property
    def start(self) -> float:
        """The start of a process."""
        return START_SECONDS[self.speed.kind]

    def seconds(self, cell: Cell, *, prepared: bool = False) -> float:
        """The estimate for one cell; `prepared`: what it compiles is in the cache on disk."""
        return self._estimate(cell, prepared=prepared) * self._correction(cell.study)

    def preparing(self, cell: Cell) -> float:
        """The estimate for compiling what a cell needs."""
        return BUILD_SECONDS + compile_seconds(cell)

    def observe(self, measurement: Measurement) -> None:
        """Learns from a cell that was measured on this machine."""
        if measurement.outcome is CellOutcome.MEASURED:
            cell = measurement.cell
            estimated = self._estimate(cell, prepared=measurement.result.get(COMPILED_ALONGSIDE) is not None)
            self._measured.setdefault(cell.study, []).append((estimated, measurement.seconds))

    def total(self, cells: Iterable[Cell]) -> float:
        """Seconds of several cells together."""
        return sum(map(self.seconds, cells))

    def _estimate(self, cell: Cell, *, prepared: bool) -> float:
        compiling = compile_seconds(cell) if prepared else 0.0
        traces = cell.settings.get("mode") == Mode.COMPILED.value or cell.settings.get("backend") == "flex"
        share = CACHED_SHARE if traces else CACHED_KERNELS_SHARE
        return estimate(cell, self.speed) - (1 - share) * compiling

    def _correction(self, study: str) -> float:
        """Measured divided by estimated time of the study's cells."""
        pairs = self._measured.get(study, ())
        estimated = sum(pair[0] for pair in pairs)
        return sum(pair[1] for pair in pairs) / estimated if estimated else 1.0


def estimate(cell: Cell, speed: Speed) -> float:
    """Seconds of one cell; the start of its worker counts only if it needs a new one.

    Example:
        >>> from trimtab.lab.studies.sizes.cells import cells
        >>> estimate(cells(["small"])[0], Speed("cpu", {"fp32": 1e11}, 1e10))
        0.01
    """
    seconds = _ESTIMATES[cell.study](cell.settings, speed)
    return seconds + (AHEAD_SHARE * START_SECONDS[speed.kind] if cell.fresh and seconds else 0.0)


def compile_seconds(cell: Cell) -> float:
    """Seconds that a cell of `step` or `attention` compiles with empty caches.

    Example:
        >>> compile_seconds(Cell("sizes", {"size": "small"}))
        0.0
    """
    settings = cell.settings
    if cell.study == "step":
        if settings["mode"] == Mode.COMPILED.value:
            return named_shape(settings["size"]).num_layers * COMPILE_LAYER_SECONDS
        if settings["kernels"] == Kernels.FAST.value and settings["device"] != "cpu":
            return COMPILE_KERNELS_SECONDS
    if cell.study == "attention" and settings.get("memory_bytes") is None and "backend" in settings:
        if settings["mode"] == "compiled" or settings["backend"] == "flex":
            return COMPILE_ATTENTION_SECONDS
        if settings["backend"] == "triton":
            return COMPILE_ATTENTION_SECONDS / 2
    return 0.0


def _sizes(settings: Mapping[str, Any], speed: Speed) -> float:
    return 0.01


def _step(settings: Mapping[str, Any], speed: Speed) -> float:
    if settings["mode"] == Mode.GRAPHS.value and speed.kind == "cpu":
        return 0.01  # not supported
    shape, part = named_shape(settings["size"]), TimedPart(settings["part"])
    forward = _pass(shape, settings, speed)
    timed = forward * {TimedPart.FORWARD: 1, TimedPart.BACKWARD: 2}.get(part, 3)
    once = forward if part is TimedPart.FORWARD else 3 * forward
    budget = settings["budget_s"]
    steps, warm_up = settings["steps"], settings["warm_up"]
    if budget is not None:
        most = math.ceil(budget / timed)
        half = math.ceil(budget / 2 / timed)
        steps, warm_up = min(steps, max(most, LEAST_STEPS)), min(warm_up, max(half, 1))
    seconds = BUILD_SECONDS + (steps + warm_up) * once + compile_seconds(Cell("step", settings))
    return seconds if settings["mode"] == Mode.EAGER.value else seconds + 6 * 3 * forward


def _kernels(settings: Mapping[str, Any], speed: Speed) -> float:
    shape, rounds = named_shape(settings["size"]), settings["rounds"]
    forward = _pass(shape, settings, speed)
    if settings.get("nvtx"):
        return BUILD_SECONDS + (rounds + 1) * 3 * forward
    steps = (
        2 * 3 + 2 * rounds * 5 + rounds * 3
    )  # warm-up; clocks and profiles of three passes; parts of attention
    events = shape.num_layers * LAYER_OPERATIONS * 3 * rounds * 3
    return BUILD_SECONDS + steps * forward + events * EVENT_SECONDS


def _memory(settings: Mapping[str, Any], speed: Speed) -> float:
    shape = named_shape(settings["size"])
    passes = 1 if settings["pass"] == "forward" else 3
    operations = shape.num_layers * LAYER_OPERATIONS * passes
    return BUILD_SECONDS + 3 * passes * _pass(shape, settings, speed) + operations * RECORDED_SECONDS


def _attention(settings: Mapping[str, Any], speed: Speed) -> float:
    if settings.get("memory_bytes") is not None:
        return 0.01  # predicted to run out of memory, and not tried
    if "length" not in settings:
        return VERIFY_SECONDS + settings["seconds"]
    elements = settings["batch"] * settings["heads"] * settings["length"] ** 2
    flops = speed.flops.get(settings["dtype"], speed.flops["fp32"])
    once = (
        14 * elements * settings["head_dim"] / (REACHED["bf16"] * flops)
        + 40 * elements / speed.bandwidth
        + 2e-4
    )
    timed = max(min(settings["seconds"], settings["repetitions"] * once), once)
    return VERIFY_SECONDS + timed + 4 * once + compile_seconds(Cell("attention", settings))


def _compile(settings: Mapping[str, Any], speed: Speed) -> float:
    shape, lengths = named_shape(settings["size"]), settings["lengths"]
    programs = 1 if settings["shapes"] == "dynamic" else len(lengths)
    whole = settings["scope"] == "whole"
    program = shape.num_layers * COMPILE_LAYER_SECONDS if whole else COMPILE_REGION_SECONDS
    if settings["backend"] != "inductor":
        return BUILD_SECONDS + programs * program * TRACE_SHARE
    # A second process compiles again with a warm cache.
    return BUILD_SECONDS + START_SECONDS[speed.kind] + programs * program * 1.4


def _claims(settings: Mapping[str, Any], speed: Speed) -> float:
    return 10.0 + 0.15 * settings["steps"] if speed.kind == "cpu" else 8.0 + 0.05 * settings["steps"]


def _concurrency(settings: Mapping[str, Any], speed: Speed) -> float:
    return START_SECONDS[speed.kind] + (20.0 if speed.kind == "cpu" else 10.0)


_ESTIMATES = {
    "sizes": _sizes,
    "step": _step,
    "kernels": _kernels,
    "memory": _memory,
    "attention": _attention,
    "compile": _compile,
    "claims": _claims,
    "concurrency": _concurrency,
}


def _pass(shape: ModelShape, settings: Mapping[str, Any], speed: Speed) -> float:
    """Seconds of one forward pass: the larger of its products' time and its launches' time."""
    tokens = settings["batch"] * settings["context"]
    flops = tokens * flops_per_token(shape, settings["context"], training=False)
    products = flops / (REACHED[settings["precision"]] * speed.flops[settings["precision"]])
    return max(products, shape.num_layers * LAYER_OPERATIONS * LAUNCH_SECONDS[speed.kind])
