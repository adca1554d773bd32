"""Times one part of a step in one configuration; runs in a worker process."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch

from trimtab.facts.data_sheets import known_sheet
from trimtab.lab.step_settings import Mode, Precision
from trimtab.lab.step_times import StepTimes
from trimtab.lab.step_timing import time_steps
from trimtab.lab.studies.step.result import StepResult, TimedStep, model_flops
from trimtab.lab.study_models import named_shape
from trimtab.lab.study_modes import Preparation, check_mode, compile_step, ready_step
from trimtab.lab.study_step import StudyStep
from trimtab.lab.timing import Ceilings, ceilings, synchronize


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one cell: times of the part, with model FLOPs and the device's peak rates.

    Example:
        >>> from trimtab.lab.studies.step.cells import cells
        >>> cell = cells(device="cpu", sizes=["tiny"], contexts=[16], steps=2, warm_up=[1])[0]
        >>> len(measure(dict(cell.settings))["times"]["host"]["times_ms"])
        2
    """
    timed = TimedStep.from_settings(settings)
    check_mode(timed.mode, timed.step.device)
    _release(timed.mode)
    times, preparation, attention, cpu_share = _time(timed)
    _release(timed.mode)
    step, shape = timed.step, named_shape(timed.step.size)
    # After the timed steps: a product before them would be a warm-up, which a warm-up study must not have.
    measured = _measured_ceilings(step.device, step.precision)
    result = StepResult(
        times=times,
        tokens=step.batch * step.context,
        flops=model_flops(shape, step.context, step.batch, timed.part),
        parameters=shape.num_parameters,
        attention=attention,
        threads=torch.get_num_threads(),
        cpu_share=cpu_share,
        ceiling_flops=measured.matmul_flops_per_s,
        ceiling_dtype=measured.matmul_dtype,
        copy_bytes=measured.copy_bytes_per_s,
        sheet_flops=_sheet_flops(step.device, step.precision),
        compile_seconds=preparation.compile_seconds,
        from_cache=preparation.from_cache,
        difference=preparation.difference,
    )
    return result.to_dict()


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles what a cell needs, in a process alongside others; returns the fields of its result that are known then.

    Example:
        >>> from trimtab.lab.studies.step.cells import cells
        >>> cell = cells(device="cpu", sizes=["tiny"], contexts=[16], modes=["compiled"])[0]
        >>> sorted(prepare(dict(cell.settings)))                                     # doctest: +SKIP
        ['compile_seconds', 'from_cache']
    """
    from trimtab.lab.preparing import without_tuning

    timed = TimedStep.from_settings(settings)
    check_mode(timed.mode, timed.step.device)
    _release(timed.mode)
    with without_tuning():
        if timed.mode is Mode.COMPILED:
            seconds, cached = compile_step(StudyStep(timed.step))
            return {"compile_seconds": seconds, "from_cache": cached}
        StudyStep(timed.step, layers=1).forward_backward()  # all layers have the same kernels
        synchronize(timed.step.device)
    return {}


def _time(timed: TimedStep) -> tuple[StepTimes, Preparation, str, float | None]:
    """Times the step; the model is freed at the end, so that later measurements have its memory."""
    step = StudyStep(timed.step)
    ready = ready_step(step, timed.mode, timed.part)
    started, ran = time.perf_counter(), time.process_time()
    times = time_steps(
        ready.prepare,
        device=timed.step.device,
        steps=timed.steps,
        warm_up=timed.warm_up,
        budget_s=timed.budget_s,
    )
    attention = dict.fromkeys(layer.unpacked_attention for layer in step.decoder.kernels)
    # CPU time counts all threads: the share can exceed 1, which means that there was little disturbance.
    share = min(1.0, (time.process_time() - ran) / max(time.perf_counter() - started, 1e-9))
    cpu_share = None if timed.step.device.startswith("cuda") else share
    return times, ready.preparation, ", ".join(attention), cpu_share


@functools.cache
def _measured_ceilings(device: str, precision: Precision) -> Ceilings:
    """Peak rates, measured once per process and precision."""
    return ceilings(device, precision.value)


def _sheet_flops(device: str, precision: Precision) -> float | None:
    if not device.startswith("cuda"):
        return None
    _, total = torch.cuda.mem_get_info()
    sheet = known_sheet(torch.cuda.get_device_name(), total)
    return None if sheet is None else sheet.flops.get(precision.value)


def _release(mode: Mode) -> None:
    """Frees the memory of the previous cell."""
    if mode is Mode.COMPILED:
        from torch import _dynamo as dynamo

        dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
