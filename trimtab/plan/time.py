"""Predicted time of a run: steps, evaluations and checkpoints, at the rates of a device. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_recompute import recompute_cost
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.operations import OperationKind
from trimtab.model.spec_block import DeclaredBlock
from trimtab.plan.device_rates import rates_of
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks, num_tiles
from trimtab.plan.step_time import StepTime, forward_seconds, step_time_at


@dataclass(frozen=True)
class Workload:
    """The amount of work of a run, as far as it is known beforehand."""

    steps: int | None = None
    """Optimizer steps; None if the size of the data is not known yet."""
    processed: int | None = None
    """Tokens processed in training, padding included."""
    evaluations: int = 0
    evaluation_tokens: int = 0
    """Per evaluation."""
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    trained_steps: int = 0
    """Optimizer steps that a resumed run has already trained."""

    @property
    def remaining(self) -> float:
        """Share of the steps that are not trained yet.

        Example:
            >>> Workload(steps=8, trained_steps=6).remaining
            0.25
        """
        return max(0.0, 1.0 - self.trained_steps / self.steps) if self.steps else 1.0


@dataclass(frozen=True)
class Time:
    """Time of a step and of a run; None if unknown, with the reason in `basis`."""

    flops_per_token: float
    """FLOPs of forward and backward, including attention and head."""
    flops: float | None
    """FLOPs of training; None if the number of tokens is unknown."""
    basis: str
    """The source of the rates, or the reason why there are no times."""
    step: StepTime | None = None
    tokens_per_second: float | None = None
    """In training, padding included."""
    training_seconds: float | None = None
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    """None if the write speed of the disk was not measured."""
    floor_seconds: float | None = None
    """Time of training with every kernel at the device's peak rates: no run can be faster."""
    low_seconds: float | None = None
    high_seconds: float | None = None
    """The range in which the run's time is expected."""
    trained_steps: int = 0
    """Optimizer steps that were trained before: the run's seconds are those of the others."""
    validated: bool = True
    """Whether steps of such models were measured; False for families that cannot be trained yet."""

    @property
    def step_seconds(self) -> float | None:
        """Seconds per optimizer step."""
        return None if self.step is None else self.step.seconds

    @property
    def seconds(self) -> float | None:
        """Seconds of the run: training, evaluations and checkpoints, as far as known."""
        if self.training_seconds is None:
            return None
        return self.training_seconds + (self.evaluation_seconds or 0.0) + (self.checkpoint_seconds or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "flops_per_token": self.flops_per_token,
            "flops": self.flops,
            "floor_seconds": self.floor_seconds,
            "seconds": self.seconds,
            "low_seconds": self.low_seconds,
            "high_seconds": self.high_seconds,
            "training_seconds": self.training_seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
            "tokens_per_second": self.tokens_per_second,
            "trained_steps": self.trained_steps,
            "step": None if self.step is None else self.step.to_dict(),
            "basis": self.basis,
            "validated": self.validated,
        }

    def unvalidated(self) -> Time:
        """Returns the same time, labelled as not validated."""
        return dataclasses.replace(
            self, validated=False, basis=f"{self.basis}; not validated: trimtab cannot train this model yet"
        )


def flops_per_token(job: Job) -> float:
    """Returns the FLOPs per token of forward, backward and recomputation, including the head.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> job = Job(tiny, batch=1, tokens=1, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="triton", device="cuda")
        >>> flops_per_token(job)
        20192.0
    """
    shape = job.shape
    head = (
        (3 if job.trained.head_gradient_bytes or job.trained.adapts_head else 2)
        * 2.0
        * shape.vocab_size
        * shape.hidden_size
    )
    total = 0.0
    for block, layers in declared_blocks(job):
        total += len(layers) * training_flops([block])
        for layer in layers:
            recomputed = recompute_cost(block, job.layer_policies[layer], num_tiles(job))
            total += recomputed.products + recomputed.attention
    return head + total / (job.batch * job.tokens)


def training_flops(blocks: Iterable[DeclaredBlock]) -> float:
    """Returns the FLOPs of matmuls and attention in one microbatch; frozen parameters need no weight gradients."""
    total = 0.0
    for block in blocks:
        for operation in block.operations:
            if operation.kind not in (OperationKind.PRODUCT, OperationKind.ATTENTION):
                continue
            total += operation.forward.flops
            if any(activation.name in block.requires_grad for activation in operation.inputs):
                total += operation.backward.flops
            if operation.gradients:
                total += operation.parameter_backward.flops
    return total


def estimate(
    job: Job, device: DeviceFacts, work: Workload, *, graphs: bool = False, num_devices: int = 1
) -> Time:
    """Predict the time of a run.

    Args:
        job: the training job.
        device: a device with a calibration, a known data sheet, or neither.
        work: the amount of work.
        graphs: whether microbatches are captured as CUDA graphs.
        num_devices: data-parallel devices; each processes `per_device_train_batch_size` sequences per microbatch.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> shape = uniform_shape("qwen3", 151936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
        ...                       tie_embeddings=True, qk_norm=True)
        >>> job = Job(shape, batch=4, tokens=1024, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="sdpa_cudnn", device="cuda",
        ...           pointwise="triton", optimizer_impl="triton", loss_impl="triton", loss_memory=2**31)
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> time = estimate(job, gpu, Workload(steps=1000, processed=4 * 1024 * 1000), graphs=True)
        >>> 30 < time.seconds < 45
        True
    """
    per_token = flops_per_token(job)
    flops = None if work.processed is None else per_token * work.processed
    rates = rates_of(device, job.dtype)
    if rates is None:
        return Time(per_token, flops, _unknown(job, device))
    step = step_time_at(job, rates, graphs=graphs)
    tokens = job.batch * job.tokens * job.accumulation * num_devices
    time = Time(per_token, flops, rates.basis, step, tokens / step.seconds)
    if work.processed is None:
        return time
    # In steps; the last step of an epoch counts by its sequences.
    share = work.remaining * work.processed / tokens
    evaluation = work.remaining * work.evaluations * forward_seconds(job, rates, work.evaluation_tokens)
    checkpoints = None
    if rates.disk_write is not None:
        checkpoints = work.remaining * work.checkpoints * work.checkpoint_bytes / rates.disk_write
    other_seconds = evaluation + (checkpoints or 0.0)
    return dataclasses.replace(
        time,
        trained_steps=work.trained_steps,
        training_seconds=share * step.seconds,
        evaluation_seconds=evaluation,
        checkpoint_seconds=checkpoints,
        floor_seconds=share * step.floor_seconds,
        low_seconds=share * step.low_seconds + other_seconds,
        high_seconds=share * step.high_seconds + other_seconds,
    )


def _unknown(job: Job, device: DeviceFacts) -> str:
    if device.sheet is not None:
        return f"no {job.dtype} rate of {device.name} is published"
    if device.kind == "cpu":
        return f"the speed of {device.name} is not known; `trimtab plan --calibrate` measures it in a minute"
    return (
        f"no {job.dtype} rate of {device.name} is known; name the GPU, as in --gpu rtx4090, or run "
        "`trimtab plan --calibrate` on the machine that has it"
    )
