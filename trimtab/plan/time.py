"""Arithmetic of a run, and its seconds where they can be told honestly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.adapt.spec_recompute import recomputation
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.operations import Kind
from trimtab.model.spec_block import DeclaredBlock
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks, num_tiles


@dataclass(frozen=True)
class Time:
    """FLOPs a token, forward and backward with attention and head, and what they take."""

    flops_per_token: float
    flops: float | None
    """Of the whole run; None where the number of tokens is unknown."""
    floor_seconds: float | None
    """The device's ceiling all the time: no run can be faster."""
    seconds: float | None
    """An estimate; None unless it was measured which share of the ceiling training reaches."""
    basis: str
    """Where `seconds` and `floor_seconds` come from, or why there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def flops_per_token(job: Job) -> float:
    """FLOPs per token of forward, backward and recomputation, the head's included.

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
        (3 if job.trained.head or job.trained.adapts_head else 2) * 2.0 * shape.vocab_size * shape.hidden_size
    )
    total = 0.0
    for block, layers in declared_blocks(job):
        total += len(layers) * training_flops([block])
        for layer in layers:
            again = recomputation(block, job.layers[layer], num_tiles(job))
            total += again.products + again.attention
    return head + total / (job.batch * job.tokens)


def training_flops(blocks: Iterable[DeclaredBlock]) -> float:
    """FLOPs of matrix products and attention, forward and backward, of one microbatch: what is frozen has fewer."""
    total = 0.0
    for block in blocks:
        for one in block.operations:
            if one.kind not in (Kind.PRODUCT, Kind.ATTENTION):
                continue
            total += one.forward.flops
            if any(activation.name in block.requires_grad for activation in one.inputs):
                total += one.backward.flops
            if one.gradients:
                total += one.parameter_backward.flops
    return total


def estimate(job: Job, device: DeviceFacts, *, processed: int | None, num_devices: int = 1) -> Time:
    """Time of a run.

    Args:
        job: what is trained and how; attention is counted as if each sequence were one document, the most it can be.
        device: with a measured or known ceiling, or without.
        processed: tokens that pass through the model in the whole run, padding included; None if unknown.
        num_devices: devices that share the work.
    """
    dtype, per_token = job.dtype, flops_per_token(job)
    flops = None if processed is None else per_token * processed
    ceiling = device.ceiling(dtype)
    if ceiling is None:
        return Time(per_token, flops, None, None, f"no known {dtype} arithmetic rate of {device.name}")
    rate, source = ceiling
    named = f"{rate / 1e12:.3g} TFLOP/s in {dtype} ({source})"
    if flops is None:
        return Time(per_token, None, None, None, f"{named}; the number of tokens is not known yet")
    floor = flops / (rate * num_devices)
    if device.utilization is None:
        return Time(
            per_token, flops, floor, None, f"{named}; which share of it training reaches is not measured"
        )
    where = f" ({device.utilization_basis})" if device.utilization_basis else ""
    basis = f"{device.utilization:.0%} of {named}, as measured{where}"
    return Time(per_token, flops, floor, floor / device.utilization, basis)
