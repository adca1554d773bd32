"""Declared operations of a shape's layers, for tests that compare them with real steps."""

from __future__ import annotations

from typing import Any

from trimtab.facts.operations import saved_activations, total_bytes
from trimtab.facts.shapes import ModelShape
from trimtab.model import spec as model_spec
from trimtab.model.spec_block import DeclaredBlock
from trimtab.model.spec_operations import Execution
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks


def full_training(shape: ModelShape, batch: int, tokens: int, dtype: str = "fp32", **changes: Any) -> Job:
    """A job that trains every weight, on a CPU and in one dtype unless `changes` override it."""
    options: dict[str, Any] = {
        "accumulation": 1,
        "weights_dtype": dtype,
        "gradient_dtype": dtype,
        "optimizer": "adamw_torch",
        "attention": "sdpa_flash",
        "device": "cpu",
    }
    return Job(shape, batch=batch, tokens=tokens, dtype=dtype, **{**options, **changes})


def blocks_by_layer(job: Job) -> list[DeclaredBlock]:
    """The declared operations of each layer."""
    return [block for block, layers in declared_blocks(job) for _ in layers]


def bytes_around(job: Job) -> int:
    """Bytes saved by the final norm, and of the tensors that all blocks share, without token ids."""
    final = job.trained.final_norm
    run = Execution(job.batch, job.tokens, job.dtype, job.attention, job.weights_dtype, job.device, job.pointwise,
                    {} if final is None else {"norm.weight": final})  # fmt: skip
    norm = model_spec.final_norm(job.shape, run)
    shared = model_spec.shared_bytes(job.shape, run, packed=job.packed)
    return shared - job.batch * job.tokens * 8 + total_bytes(saved_activations([norm], {norm.inputs[0].name}))
