"""The set of cases for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from tools.sameness import cases_cpu, cases_gpu
from tools.sameness.case import Case

DEVICES = ("cpu", "cuda")


def cases_of(device: str, pattern: str | None = None) -> list[Case]:
    """The cases whose name matches a pattern, with those that they are compared with."""
    every: Sequence[Case] = cases_cpu.CASES if device == "cpu" else cases_gpu.CASES
    if pattern is None:
        return list(every)
    wanted = [case for case in every if fnmatch(case.name, pattern) or pattern in case.name]
    names = {case.name for case in wanted} | {case.same_as for case in wanted}
    return [case for case in every if case.name in names]


def base_of(device: str) -> dict[str, Any]:
    """The recipe that a device's cases change."""
    return cases_cpu.BASE if device == "cpu" else cases_gpu.BASE
