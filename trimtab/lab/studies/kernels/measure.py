"""Profiles one study model: inference, forward pass and full step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from trimtab.lab.nvtx import nvtx_ranges
from trimtab.lab.operation_labels import SCORES, SOFTMAX, VALUES, labelled_operations
from trimtab.lab.operation_times import BACKWARD, FORWARD, OperationTimes, measure_operations
from trimtab.lab.profiles import check_profiler, profile_run, write_trace
from trimtab.lab.step_settings import Kernels, Loss, Precision, StepSettings
from trimtab.lab.step_timing import time_steps
from trimtab.lab.studies.kernels.attention_flops import product_flops, softmax_flops
from trimtab.lab.studies.kernels.results import AttentionPart, KernelsResult, ProfiledPass
from trimtab.lab.study_step import StudyStep
from trimtab.lab.timing import synchronize, time_once

TRACE = "trace.json.gz"
CLOCK_SECONDS = 10.0
"""Time limit of the runs without the profiler."""


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Profiles one cell, without CUDA graphs and torch.compile."""
    step = StudyStep(
        StepSettings(
            settings["size"],
            settings["context"],
            settings["batch"],
            Precision(settings["precision"]),
            Kernels(settings["kernels"]),
            Loss(settings["loss"]),
            settings["device"],
        )
    )
    rounds: int = settings["rounds"]
    if settings.get("nvtx"):
        return KernelsResult(ranges=emit_ranges(step, rounds)).to_dict()
    check_profiler(settings["device"])
    return profile_step(step, rounds, settings.get("trace")).to_dict()


def profile_step(step: StudyStep, rounds: int, trace: str | None = None) -> KernelsResult:
    """Profiles and times the passes of a step; with a folder, also writes a trace of one full step.

    Example:
        >>> tiny = StudyStep(StepSettings("tiny", context=16, batch=2))
        >>> profile_step(tiny, rounds=1).profiles[ProfiledPass.FULL].entries[0].name         # doctest: +SKIP
        'aten::mm'
    """
    device = step.settings.device
    runs: dict[ProfiledPass, Callable[[], object]] = {
        ProfiledPass.INFERENCE: step.inference,
        ProfiledPass.FORWARD: step.forward,
        ProfiledPass.FULL: step.full_step,
    }
    for _ in range(2):  # warms up compiled kernels, the allocator and optimizer states
        step.full_step()
    clocks = {kind: _clock(run, device, rounds) for kind, run in runs.items()}
    profiles = {kind: profile_run(run, device, rounds=rounds) for kind, run in runs.items()}
    parts: tuple[AttentionPart, ...] = ()
    if step.settings.kernels is Kernels.REFERENCE:
        parts = attention_parts(step, rounds)
    path = None
    if trace is not None:
        path = Path(trace) / TRACE
        with labelled_operations(step.decoder):
            write_trace(lambda: _labelled_step(step), device, path)
    return KernelsResult(profiles, clocks, parts, None if path is None else str(path))


def _clock(run: Callable[[], object], device: str, rounds: int) -> float:
    """Median seconds of a run without the profiler."""
    times = time_steps(lambda: run, device=device, steps=rounds, warm_up=0, budget_s=CLOCK_SECONDS)
    return times.host.median_ms / 1e3


def _labelled_step(step: StudyStep) -> None:
    with record_function("forward"):
        loss = step.forward()
    with record_function("backward"):
        step.backward(loss)
    with record_function("optimizer"):
        step.update()


def attention_parts(step: StudyStep, rounds: int) -> tuple[AttentionPart, ...]:
    """Time of the products and of the softmax inside plain attention, with their FLOPs."""

    def both() -> None:
        step.drop_gradients()
        step.forward_backward()

    device = step.settings.device
    fewer = 1 if time_once(both, device) > CLOCK_SECONDS else rounds
    times = measure_operations(step.decoder, both, device, rounds=fewer, attention_parts=True)
    step.drop_gradients()
    shape = step.decoder.shape
    attention = shape.blocks[0].attention
    size = {
        "batch": step.settings.batch,
        "heads": attention.num_heads,
        "context": step.settings.context,
        "layers": shape.num_layers,
    }
    product = product_flops(**size, head_dim=attention.head_dim)
    softmax = softmax_flops(**size)
    flops = {SCORES: product, SOFTMAX: softmax, VALUES: product}
    product_parts = [
        _part(times, name, part_flops.forward, part_flops.backward) for name, part_flops in flops.items()
    ]
    return (*product_parts, _part(times, "attention", 0, 0))


def _part(times: OperationTimes, name: str, forward: int, backward: int) -> AttentionPart:
    return AttentionPart(name, forward, backward, times.seconds(name, FORWARD), times.seconds(name, BACKWARD))


def emit_ranges(step: StudyStep, rounds: int) -> int:
    """Runs steps in NVTX ranges, without torch's profiler: only one profiler can record a GPU at a time."""
    step.full_step()
    synchronize(step.settings.device)
    with nvtx_ranges(step.decoder) as ranges:
        for number in range(rounds):
            with ranges.named(f"step {number + 1}"):
                with ranges.named("forward"):
                    loss = step.forward()
                with ranges.named("backward"):
                    step.backward(loss)
                with ranges.named("optimizer"):
                    step.update()
                synchronize(step.settings.device)
    return ranges.count
