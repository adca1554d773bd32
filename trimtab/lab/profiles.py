"""Time by kernel or operator, from torch's profiler.

On a GPU the entries are kernels with the device's time; on a CPU torch's operators with their self time, without that
of the operators they call. `profile_data` defines profiles, `kernel_kinds` the kind of each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimtab.lab.kernel_kinds import KernelKind, kind_of
from trimtab.lab.profile_data import Entry, KindTime, Profile
from trimtab.lab.study import NotSupported
from trimtab.lab.timing import time_once

__all__ = ["Entry", "KindTime", "Profile", "check_profiler", "profile_run", "write_trace"]

STILL_WORKS = "whole steps are timed without it: trimtab bench step"
OPTIMIZER_STEP = "Optimizer.step#"
"""Prefix of torch's label around every optimizer step."""
INHERITED = (KernelKind.NORM, KernelKind.SOFTMAX, KernelKind.ATTENTION)
"""On a CPU, operators called by operators of these kinds count as the same kind."""


def check_profiler(device: str) -> None:
    """Raises NotSupported if torch's profiler cannot record the device; the message names an alternative.

    Example:
        >>> check_profiler("cpu")
    """
    if not torch.autograd.kineto_available():
        raise NotSupported(f"this build of torch has no profiler (Kineto); {STILL_WORKS}")
    if device.startswith("cuda") and ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise NotSupported(f"this build of torch cannot record CUDA kernels (no CUPTI); {STILL_WORKS}")


def profile_run(
    run: Callable[[], object], device: str, *, rounds: int = 1, budget_seconds: float = 10.0
) -> Profile:
    """Profiles several rounds and returns the fastest, which other work disturbed least.

    Build the run without CUDA graphs: a replayed graph shows kernels, but not their operators and labels.

    Args:
        run: the function to profile.
        device: cpu or cuda.
        rounds: the number of rounds.
        budget_seconds: no further round begins after this time.

    Raises:
        NotSupported: the profiler is missing, or recorded nothing of the device.

    Example:
        >>> x = torch.randn(64, 64)
        >>> found = profile_run(lambda: x @ x, "cpu")
        >>> found.entries[0].name, found.by_kind()[0].kind.value
        ('aten::mm', 'GEMM')
    """
    check_profiler(device)
    results = [_profiled(run, device)]
    while len(results) < rounds and sum(result.host_seconds for result in results) < budget_seconds:
        results.append(_profiled(run, device))
    return min(results, key=lambda result: result.host_seconds)


def _profiled(run: Callable[[], object], device: str) -> Profile:
    cuda = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        seconds = time_once(run, device)
    return summarize(profiled.events() or (), cuda=cuda, host_seconds=seconds)


def summarize(events: Iterable[Any], *, cuda: bool, host_seconds: float) -> Profile:
    """Builds a profile from the events of torch's profiler.

    Raises:
        NotSupported: a GPU ran and none of its kernels was recorded.
    """
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    device_events = [
        event for event in events if event.device_type == device and not event.is_user_annotation
    ]
    if cuda and not device_events:
        raise NotSupported(
            "the profiler recorded no kernel: the driver may not permit it, or another profiler runs; "
            f"{STILL_WORKS}"
        )
    seconds_by_entry: dict[tuple[str, KernelKind], list[float]] = {}
    for event in device_events:
        spent = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        kind = kind_of(event.name) if cuda else _operator_kind(event)
        seconds_by_entry.setdefault((event.name, kind), []).append(spent / 1e6)
    entries = [
        Entry(name, len(values), sum(values), kind) for (name, kind), values in seconds_by_entry.items()
    ]
    entries.sort(key=lambda entry: -entry.seconds)
    span = 0.0
    if device_events:
        span = (
            max(e.time_range.end for e in device_events) - min(e.time_range.start for e in device_events)
        ) / 1e6
    return Profile(tuple(entries), span, host_seconds, "cuda" if cuda else "cpu")


def _operator_kind(event: Any) -> KernelKind:
    """The kind of a CPU operator: that of the enclosing norm, softmax, attention or optimizer step, if any."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(OPTIMIZER_STEP):
            return KernelKind.OPTIMIZER
        if not parent.is_user_annotation and kind_of(parent.name) in INHERITED:
            return kind_of(parent.name)
        parent = parent.cpu_parent
    return kind_of(event.name)


def write_trace(run: Callable[[], object], device: str, path: Path) -> None:
    """Runs once and writes a Chrome trace of host and device, which ui.perfetto.dev opens.

    Args:
        run: the function to trace; labels of `torch.profiler.record_function` in it appear as named ranges.
        device: cpu or cuda.
        path: ends with .json, or .json.gz for a compressed file; its folder is created.
    """
    check_profiler(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
    with profile(activities=activities) as profiled:
        time_once(run, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(path))
