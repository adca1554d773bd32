"""Measures the memory of one cell: the peak in a plain run, then the contents of the peak in a recorded run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.facts.dtypes import BYTES
from trimtab.facts.phases import During, RunPhase
from trimtab.facts.shapes import ModelShape
from trimtab.lab.memory import peak_bytes
from trimtab.lab.memory_blocks import AttributedTimeline
from trimtab.lab.memory_recorder import record_memory
from trimtab.lab.memory_snapshot import write_torch_snapshot
from trimtab.lab.memory_summary import find_size, summarize
from trimtab.lab.step_settings import Kernels, Loss, Precision, StepSettings
from trimtab.lab.studies.memory.results import Allocator, MemoryResult, ResidualStream
from trimtab.lab.studies.memory.settings import MeasuredPass, MemorySettings
from trimtab.lab.study_step import StudyStep
from trimtab.plan import inference
from trimtab.plan.job import Job
from trimtab.plan.memory import CUBLAS_BYTES, predict
from trimtab.run.memory_state import largest_free_block
from trimtab.run.torch_setup import free_cached_memory

STREAM_DTYPE = "fp32"
"""Dtype of the residual stream: that of the weights, under autocast too."""


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures the memory of a forward pass or of a full step.

    Example:
        >>> measure(MemorySettings(StepSettings("tiny", 16, 2), MeasuredPass.FULL).to_dict())["residual"]["width"]
        64
    """
    chosen = MemorySettings.from_dict(settings)
    free_cached_memory()  # workspaces of an earlier cell in this process
    step = StudyStep(chosen.step)
    if chosen.part is MeasuredPass.FULL:
        step.full_step()  # creates optimizer states and library workspaces
    else:
        step.inference()
    device = chosen.step.device
    above = peak_bytes(step.full_step if chosen.part is MeasuredPass.FULL else step.inference, device)
    allocator = _allocator() if device.startswith("cuda") else None
    timeline = _recorded(step, chosen.part)
    if chosen.snapshots is not None:
        _write_snapshots(Path(chosen.snapshots), chosen, step, timeline)
    return MemoryResult(
        parameters=step.decoder.shape.num_parameters,
        measured_peak=timeline.before.total + above,
        memory=summarize(timeline),
        residual=_residual(chosen.step, step.decoder.shape, timeline),
        predicted_peak=_predicted(step, chosen),
        allocator=allocator,
    ).to_dict()


def _recorded(step: StudyStep, part: MeasuredPass) -> AttributedTimeline:
    def forward(during: During) -> None:
        with during(RunPhase.FORWARD):
            step.inference()

    def full(during: During) -> None:
        with during(RunPhase.FORWARD):
            loss = step.forward()
        with during(RunPhase.BACKWARD):
            step.backward(loss)
        with during(RunPhase.OPTIMIZER_STEP):
            step.update()

    device = step.settings.device
    if part is MeasuredPass.FORWARD:
        return record_memory(forward, device, step.decoder)
    return record_memory(full, device, step.decoder, step.optimizer)


def _residual(settings: StepSettings, shape: ModelShape, timeline: AttributedTimeline) -> ResidualStream:
    stream = ResidualStream(
        settings.batch, settings.context, shape.hidden_size, BYTES[STREAM_DTYPE], shape.num_layers, ()
    )
    return replace(stream, found=find_size(timeline, stream.nbytes))


def _predicted(step: StudyStep, chosen: MemorySettings) -> int | None:
    """The planner's prediction; None for steps that it does not cover: other losses, and autocast's weight copies."""
    settings, decoder = chosen.step, step.decoder
    fast = settings.kernels is Kernels.FAST and settings.loss is Loss.CROSS_ENTROPY
    if not fast or settings.precision not in (Precision.FP32, Precision.TF32):
        return None
    kernels = decoder.kernels[0]
    job = Job(
        decoder.shape,
        batch=settings.batch,
        tokens=settings.context,
        accumulation=1,
        dtype="fp32",
        weights_dtype="fp32",
        gradient_dtype="fp32",
        optimizer="adamw_torch",
        attention=kernels.unpacked_attention,
        layer_attention=tuple(layer.unpacked_attention for layer in decoder.kernels),
        device="cuda" if settings.device.startswith("cuda") else "cpu",
        packed=False,
        pointwise=kernels.pointwise,
        loss_impl=decoder.loss_impl,
    )
    memory = predict(job)
    workspaces = CUBLAS_BYTES[job.device]
    if chosen.part is MeasuredPass.FULL:
        return memory.peak.total + workspaces
    forward = workspaces // 2  # no thread of a backward pass
    return memory.before.weights + inference.total(inference.loss_tensors(job)) + forward


def _allocator() -> Allocator:
    segments = torch.cuda.memory_snapshot()
    return Allocator(
        reserved_peak=torch.cuda.max_memory_reserved(),
        segments=len(segments),
        largest_free_block=largest_free_block(segments) or 0,
    )


def _write_snapshots(
    folder: Path, chosen: MemorySettings, step: StudyStep, timeline: AttributedTimeline
) -> None:
    settings = chosen.step
    words = (settings.size, settings.context, settings.precision.value, chosen.part.value)
    name = "-".join(str(word) for word in words).replace(" ", "-").replace("/", "-")
    timeline.write(folder / f"{name}.json")
    if settings.device.startswith("cuda"):
        run = step.full_step if chosen.part is MeasuredPass.FULL else step.inference
        write_torch_snapshot(run, folder / f"{name}.pickle")
