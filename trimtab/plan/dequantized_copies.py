"""Dequantized copies of quantized weights, which use the remaining memory if nothing is recomputed."""

from __future__ import annotations

import dataclasses

from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.plan.job import Job
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import MemorySetting, usable_bytes
from trimtab.recipe.keys import Recipe


def requested_copies(recipe: Recipe, shape: ModelShape) -> int:
    """Returns the recipe's number of layers with dequantized copies; 0 for `auto`."""
    requested = recipe.dequantized_layers
    if requested == "auto":
        return 0
    if requested > shape.num_layers:
        raise RecipeError(
            f"dequantized_layers names {requested} layers and the model has {shape.num_layers}",
            f"set dequantized_layers to at most {shape.num_layers}",
        )
    return requested


def add_dequantized_copies(
    job: Job, setting: MemorySetting, limit: int, *, reserved: int = 0
) -> MemorySetting:
    """Returns a fitting setting with dequantized copies of as many layers as fit in the remaining memory.

    Copies are added only on a GPU, where dequantization takes a noticeable share of a step, and only if no layer
    recomputes and no feed-forward runs in tiles.

    Args:
        job: the training job.
        setting: a setting from `memory_search.find_setting` within the limit.
        limit: bytes on the device, including the process itself.
        reserved: bytes of the limit for other purposes than a training step.

    Example:
        >>> from trimtab.adapt.spec import LoraSettings
        >>> from trimtab.adapt.spec_quantized import Quantization
        >>> from trimtab.facts.devices import DeviceFacts
        >>> from trimtab.plan.memory_search import find_setting
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> job = Job(llama, batch=1, tokens=2048, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="triton", device="cuda",
        ...           pointwise="triton", loss_impl="triton", lora=LoraSettings(r=16),
        ...           quantization=Quantization("nf4", double=True, impl="triton"))
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> for gigabytes in (12, 24, 80):
        ...     limit = gigabytes * 10**9
        ...     print(add_dequantized_copies(job, find_setting(job, gpu, limit)[0], limit).dequantized_layers)
        0
        16
        32
    """
    saves_all = setting.mlp_tiles == 1 and set(setting.policies) == {"none"}
    if job.device != "cuda" or job.quantization is None or not saves_all:
        return setting
    job = job.changed(policies=setting.policies, mlp_tiles=1, loss_memory=setting.loss_memory)
    for layers in range(job.shape.num_layers, 0, -1):
        with_copies = job.changed(dequantized_layers=layers)
        needed = predict(with_copies).needed
        if needed <= min(usable_bytes(with_copies, limit), limit - reserved):
            return dataclasses.replace(setting, needed=needed, dequantized_layers=layers)
    return setting
