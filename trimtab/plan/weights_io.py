"""Memory of loading, `trimtab export` and `trimtab merge`. Imports no torch.

Export and merge load a model in fp32 on the CPU, write it in another format, read the files back and compare. Legend:
P parameters, w bytes per stored element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.adapt import spec_quantized
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.shapes import ModelShape
from trimtab.plan.job import Job

READ_ELEMENTS = 2**22
"""Elements of a parameter that are read in one chunk (`trimtab.model.weights`)."""
CHECKED_ELEMENTS = 2**20
"""Elements per chunk of the finiteness check: a magnitude and three booleans each."""
SHARD_BYTES = 5_000_000_000
"""The largest weight file (`trimtab.model.save`); the safetensors writer allocates a second copy of its bytes."""
PROBE_TOKENS = 32
"""Tokens whose logits are compared (`trimtab.export.hf`)."""


@dataclass(frozen=True)
class IOMemory:
    """Bytes of tensors while files are read or written."""

    model: int
    """Weights of the model."""
    temporary: int
    """Peak of temporary tensors."""

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.model + self.temporary


def largest_parameter(shape: ModelShape) -> int:
    """Returns the elements of the largest parameter."""
    return max(math.prod(dims) for _, dims in shape.parameters())


def read_scratch_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns the temporary bytes of reading weights into parameters of the same dtype: a chunk, and its check.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> read_scratch_bytes(tiny, "bf16") == 64 * 16 * (2 + 2 + 3)
        True
    """
    largest = largest_parameter(shape)
    checked = min(largest, CHECKED_ELEMENTS) * (BYTES[dtype] + 3)
    return min(largest, READ_ELEMENTS) * BYTES[dtype] + checked


def loading_memory(job: Job) -> IOMemory:
    """Returns device memory while a run's weights are loaded; optimizer states are allocated later."""
    weights = job.trained.weight_bytes
    if job.quantization is None:
        return IOMemory(
            weights, min(largest_parameter(job.shape), CHECKED_ELEMENTS) * (BYTES[job.weights_dtype] + 3)
        )
    packed = job.quantization
    kind, block, double = packed.kind, packed.block_size, packed.double
    peak = spec_quantized.loading_peak_bytes(
        job.shape, kind, job.weights_dtype, impl=packed.impl, block=block, double=double
    )
    standing = spec_quantized.weight_bytes(job.shape, kind, job.weights_dtype, block=block, double=double)
    return IOMemory(weights, peak - standing)


def loading_host_bytes(job: Job) -> int:
    """Returns peak host memory during loading: a weight as stored (fp32 from GGUF) and in the model's dtype.

    Files are memory-mapped: the operating system can reclaim their pages.
    """
    if job.quantization is None:
        elements = min(largest_parameter(job.shape), READ_ELEMENTS)
    else:
        packed = spec_quantized.linear_shapes(job.shape).values()
        elements = max((math.prod(dims) for dims in packed), default=0)
    return elements * (4 + BYTES[job.weights_dtype])


def export_memory(shape: ModelShape, dtype: str) -> IOMemory:
    """Returns memory of `trimtab export hf`: a model in fp32, and the larger of writing and reading back.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> qwen = uniform_shape("qwen3", 151936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
        ...                      tie_embeddings=True, qk_norm=True)
        >>> round(export_memory(qwen, "bf16").total / 1e9, 2)
        4.77
    """
    P = shape.num_parameters
    shard = min(nbytes(dtype, P), max(SHARD_BYTES, nbytes(dtype, largest_parameter(shape))))
    writing = shard + (shard if dtype != "fp32" else 0)
    return IOMemory(4 * P, max(writing, reloading_bytes(shape, dtype)))


def reloading_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns memory of the comparison: the model read back from its files, and the reference logits."""
    logits = min(PROBE_TOKENS, shape.max_positions) * shape.vocab_size * 4
    return nbytes(dtype, shape.num_parameters) + read_scratch_bytes(shape, dtype) + logits


def merge_memory(job: Job, dtype: str) -> IOMemory:
    """Returns memory of `trimtab merge`: base and adapters, and the merged weights until all are computed.

    The merged model is then exported while the logits of both models are in memory.
    """
    shape, trained = job.shape, job.trained
    merged = merged_bytes(job)
    adapters = sum(
        nbytes(parameter.dtype, parameter.count)
        for parameter in trained.parameters
        if ".lora_" in parameter.name
    )
    loaded = 4 * shape.num_parameters + adapters
    if job.quantization is not None:
        packed = job.quantization
        loaded = adapters + spec_quantized.weight_bytes(
            shape, packed.kind, "fp32", block=packed.block_size, double=packed.double
        )
    logits = min(PROBE_TOKENS, shape.max_positions) * shape.vocab_size * 4
    exported = export_memory(shape, dtype)
    return IOMemory(loaded, max(merged, exported.total - loaded + logits) + logits)


def merged_bytes(job: Job) -> int:
    """Returns the fp32 bytes of all merged weights: those of adapted and of quantized layers."""
    adapted = {
        parameter.name.partition(".lora_")[0] + ".weight"
        for parameter in job.trained.parameters
        if ".lora_" in parameter.name
    }
    quantized = spec_quantized.linear_shapes(job.shape) if job.quantization is not None else {}
    sizes = {name: math.prod(dims) for name, dims in job.shape.parameters()}
    return 4 * sum(size for name, size in sizes.items() if name in adapted or name in quantized)
