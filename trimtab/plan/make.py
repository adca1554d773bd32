"""The plan of a run: its predicted memory, time and disk space. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.plan import data as plan_data
from trimtab.plan import memory as plan_memory
from trimtab.plan import phases as plan_phases
from trimtab.plan import time as plan_time
from trimtab.plan.checkpoints import checkpoint_disk
from trimtab.plan.data import DataFacts
from trimtab.plan.disk import Disk
from trimtab.plan.graphs import graphs_shortfall, requested_graphs
from trimtab.plan.job import Job
from trimtab.plan.limits import limit_of
from trimtab.plan.reserved import Reserved, reserved_memory
from trimtab.plan.resolved import Resolved
from trimtab.plan.resolved_json import resolved_to_dict
from trimtab.recipe.keys import Recipe
from trimtab.recipe.rules import has_domain_set

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The predicted memory, time and disk space of a run. `to_dict()` is written to plan.json in the run folder."""

    recipe: Recipe
    shape: ModelShape
    device: DeviceFacts
    num_devices: int
    job: Job
    memory: plan_memory.Memory
    data: dict[str, Any]
    time: plan_time.Time
    disk: Disk
    resolved: Resolved
    notes: tuple[str, ...]
    limit: int
    """Bytes that the run may use on its device."""

    @cached_property
    def phases(self) -> plan_phases.RunMemory:
        """Memory of every phase of the run and the timeline of a step; computed on first access."""
        return plan_phases.run_memory(self.recipe, self.job, self.memory, self.disk)

    @cached_property
    def reserved(self) -> Reserved | None:
        """GPU memory of torch's allocator and of the whole process in training; None on a CPU."""
        if self.job.device == "cpu":
            return None
        return reserved_memory(
            self.job,
            graphs=self.resolved.graphs.enabled,
            limit=self.resolved.memory_plan.allocator_bytes,
        )

    @cached_property
    def graphs_depend_on_memory(self) -> bool:
        """Whether CUDA graphs are captured if their memory fits: they are, or are not for want of memory."""
        if self.recipe.cuda_graphs != "auto":
            return False
        if self.resolved.graphs.enabled:
            return True
        possible = requested_graphs(self.recipe, self.job, self.device).enabled
        return possible and graphs_shortfall(self.job, self.limit, capped=self.is_capped) > 0

    @property
    def is_capped(self) -> bool:
        """Whether the run's allocator has a limit of its own (`memory_limit`)."""
        return self.resolved.memory_plan.allocator_bytes is not None

    @property
    def needed(self) -> int:
        """Bytes on the device in the phase that needs the most: a training step, or for example evaluation."""
        return max(self.memory.needed, self.phases.peak.needed)

    def with_data(self, data: DataFacts, *, trained_steps: int = 0) -> Plan:
        """Returns the plan with steps, time and disk for known data; the memory prediction is reused.

        Args:
            data: known facts about the packed data.
            trained_steps: optimizer steps that a resumed run has already trained; the time is that of the others.
        """
        return dataclasses.replace(
            self,
            data=plan_data.describe(self.recipe, data, self.num_devices),
            **_with_data(
                self.recipe, self.job, self.resolved, self.device, data, self.num_devices, trained_steps
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; every number in bytes, tokens, FLOPs or seconds."""
        return {
            "version": VERSION,
            "model": {
                "name": self.recipe.model.name,
                "family": self.shape.family,
                "parameters": self.shape.num_parameters,
                "trained": self.job.trained.count,
            },
            "memory": {
                "before": self.memory.before.to_dict(),
                "peak": self.memory.peak.to_dict(),
                "moment": self.memory.moment.describe(),
                "outside": self.memory.process_bytes,
                "needed": self.memory.needed,
                "available": self.device.available_bytes,
                "limit": self.limit,
                "host": self.memory.host,
            },
            "phases": self.phases.to_dict(),
            "reserved": None if self.reserved is None else self.reserved.to_dict(),
            "data": self.data,
            "time": self.time.to_dict(),
            "disk": self.disk.to_dict(),
            "choices": resolved_to_dict(self.resolved),
            "notes": list(self.notes),
        }


def make_plan(
    recipe: Recipe,
    shape: ModelShape,
    resolved: Resolved,
    *,
    device: DeviceFacts,
    data: DataFacts | None = None,
    num_devices: int = 1,
) -> Plan:
    """Predict the memory, time and disk space of a run.

    Args:
        recipe: the recipe.
        shape: the model's shape.
        resolved: the values of every `auto` of the recipe, including the memory plan.
        device: the device of the run.
        data: known facts about the packed data; None before it was read.
        num_devices: data-parallel devices; each processes `per_device_train_batch_size` sequences per microbatch.

    Example:
        >>> from trimtab.facts.devices import DeviceFacts
        >>> from trimtab.plan.resolved import *
        >>> from trimtab.recipe import loads
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> fp32 = PrecisionConfig("fp32", "fp32", "fp32")
        >>> resolved = Resolved("cpu", threads=2, deterministic=False, precision=fp32,
        ...                     attention=AttentionConfig.uniform(2, "sdpa_flash"), memory=MemoryPlan(("none", "none")),
        ...                     optimizer=OptimizerConfig("adamw_torch_fused"))
        >>> plan = make_plan(loads("model: tiny\\ndata: {train: x}"), tiny, resolved,
        ...                  device=DeviceFacts("a laptop", "cpu", memory_bytes=8 * 2**30))
        >>> plan.memory.peak.weights
        558336
    """
    job = job_of(recipe, shape, device, resolved)
    memory = plan_memory.predict(job)
    return Plan(
        recipe=recipe,
        shape=shape,
        device=device,
        num_devices=num_devices,
        job=job,
        memory=memory,
        data=plan_data.describe(recipe, data, num_devices),
        **_with_data(recipe, job, resolved, device, data, num_devices),
        resolved=resolved,
        notes=tuple(_notes(recipe, job, device, resolved)),
        limit=limit_of(recipe, device)[0],
    )


def _with_data(
    recipe: Recipe,
    job: Job,
    resolved: Resolved,
    device: DeviceFacts,
    data: DataFacts | None,
    num_devices: int,
    trained_steps: int = 0,
) -> dict[str, Any]:
    """The parts of a plan that depend on the amount of data: disk and time."""
    steps = plan_data.total_steps(recipe, data, num_devices)
    disk = checkpoint_disk(recipe, job, steps)
    processed = None
    if steps is not None:
        length = plan_data.mean_length(recipe, data)
        processed = round(plan_data.processed_sequences(recipe, data, num_devices) * length)
    if data is not None and data.attended_share is not None and recipe.packing:
        job = job.changed(attended_share=data.attended_share)
    work = plan_time.Workload(
        steps,
        processed,
        evaluations=plan_data.evaluations(recipe, steps),
        evaluation_tokens=plan_data.evaluation_tokens(recipe),
        checkpoints=disk.saving.saves or 0,
        checkpoint_bytes=disk.checkpoint_bytes,
        trained_steps=trained_steps,
    )
    graphs = resolved.graphs.enabled
    time = plan_time.estimate(job, device, work, graphs=graphs, num_devices=num_devices)
    return {"time": time, "disk": disk}


def job_of(recipe: Recipe, shape: ModelShape, device: DeviceFacts, resolved: Resolved) -> Job:
    """Returns the job: the settings that determine a step, from the recipe and the resolved `auto` keys."""
    precision, memory = resolved.precision, resolved.memory
    layers = resolved.attention.layers
    attention = tuple(backends.packed if recipe.packing else backends.unpacked for backends in layers)
    packed = tuple(backends.packed for backends in layers)
    return Job(
        shape=shape,
        batch=recipe.per_device_train_batch_size,
        tokens=recipe.max_seq_length,
        accumulation=recipe.gradient_accumulation_steps,
        dtype=precision.dtype,
        weights_dtype=precision.weights_dtype,
        gradient_dtype=precision.gradient_dtype,
        optimizer=resolved.optimizer.name,
        optimizer_impl=resolved.optimizer.impl,
        in_backward=recipe.optim_in_backward,
        compiled=resolved.compile.enabled,
        loss_impl=resolved.loss.impl,
        loss_memory=resolved.loss.memory_bytes if memory is None else memory.loss_memory,
        attention=attention[0],
        layer_attention=attention if len(set(attention)) > 1 else (),
        evaluation_attention=packed if packed != attention else (),
        device=device.kind,
        bf16=device.bf16,
        packed=recipe.packing,
        policies=() if memory is None else memory.recompute,
        mlp_tiles=1 if memory is None else memory.mlp_tiles,
        pointwise=resolved.pointwise.impl,
        lora=resolved.lora,
        quantization=resolved.quantization,
        dequantized_layers=0 if memory is None else memory.dequantized_layers,
    )


def _notes(recipe: Recipe, job: Job, device: DeviceFacts, resolved: Resolved) -> list[str]:
    notes = [*device.assumptions, *(note for note in (device.bound, device.shared) if note is not None)]
    graphs = resolved.graphs
    not_captured = recipe.cuda_graphs == "auto" and not graphs.enabled and graphs.reason
    if not_captured and requested_graphs(recipe, job, device).enabled:
        notes.append(f"steps run eagerly: {graphs.reason}")
    if device.unified:
        notes.append(
            f"CPU and GPU share one memory on {device.name}: offloading gains nothing, and other programs use it too"
        )
    if device.cores is not None and (recipe.num_threads or 0) > device.cores:
        notes.append(
            f"num_threads: {recipe.num_threads} is more than this machine's {device.cores} cores: as many threads as "
            "cores are usually faster"
        )
    if job.device == "cpu" and job.dtype == "bf16" and not job.bf16:
        notes.append("this CPU has no bf16 arithmetic: dtype: fp32 would be several times faster")
    if job.device == "cpu" and job.dtype == "fp16":
        notes.append("fp16 on a CPU is very slow: dtype: fp32 would be many times faster")
    if job.gradient_dtype == "bf16" and job.accumulation > 1:
        notes.append(
            "gradients are accumulated in bf16, as the recipe requests; fp32 is more precise and takes twice the memory"
        )
    if job.optimizer == "adamw_torch_fused" and job.weights_dtype == "bf16":
        notes.append(
            "adamw_torch_fused rounds bf16 weights to the nearest: updates at a low learning rate are lost; "
            "adamw_8bit and adamw_bf16 round stochastically"
        )
    if not (has_domain_set(recipe) or recipe.data.eval.general):
        notes.append("no text is held out for evaluation: the report will show training loss only")
    if recipe.early_stopping_patience is not None:
        notes.append(
            "early_stopping_patience: the run may end before its last step, so steps, time and disk are upper bounds"
        )
    return notes
