"""Resolves every `auto` of a recipe, once for a model on a machine.

`resolve_backends` decides dtypes, implementations, adapters and quantization; `resolve_memory` then chooses the
recompute policy of each layer and whether CUDA graphs are captured, whose memory has to fit too. The result is stored
in the run folder, so that a resumed run uses the same configuration.
"""

from __future__ import annotations

import dataclasses

from trimtab.adapt import spec_quantized
from trimtab.adapt.peft_config import fit_to_model, read_adapter_folder
from trimtab.adapt.spec import LoraSettings, check_trainable, resolve_targets, trainable_parameters
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.targets import EMBEDDING, select_modules
from trimtab.facts.compilers import compile_obstacle
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ModelError, RecipeError, ResourceError
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.choice import choose_pointwise
from trimtab.kernels.linear_cross_entropy.choice import choose_loss
from trimtab.optim.choice import choose_optimizer
from trimtab.plan.graphs import resolve_cuda_graphs
from trimtab.plan.limits import limit_of, resolve_memory_plan
from trimtab.plan.make import job_of
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR
from trimtab.plan.resolved import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)
from trimtab.recipe import Recipe
from trimtab.run.attention_backends import choose_for_inference, choose_for_training


def resolve_recipe(recipe: Recipe, shape: ModelShape, device: DeviceFacts, threads: int) -> Resolved:
    """The complete configuration of a new run.

    Raises for settings that cannot be satisfied; none is replaced silently.

    Args:
        recipe: the recipe.
        shape: the model's shape.
        device: the device that trains.
        threads: CPU threads that torch uses by default; the recipe's `num_threads` takes precedence.
    """
    resolved = resolve_backends(recipe, shape, device, threads)
    return resolve_memory(recipe, shape, device, resolved)


def resolve_memory(recipe: Recipe, shape: ModelShape, device: DeviceFacts, resolved: Resolved) -> Resolved:
    """The configuration with a memory plan for this device, and the decision about CUDA graphs."""
    memory, graphs = resolve_memory_plan(recipe, job_of(recipe, shape, device, resolved), device)
    return dataclasses.replace(resolved, memory=memory, graphs=graphs)


def resolve_memory_on_resume(
    recipe: Recipe, shape: ModelShape, device: DeviceFacts, resolved: Resolved
) -> Resolved:
    """The configuration of an existing run with another memory plan, for a resume that changes memory keys.

    The number of MLP tiles and the memory of the loss are kept: they determine the order of summation.
    """
    before, tiles = resolved.memory, 1
    job = job_of(recipe, shape, device, dataclasses.replace(resolved, memory=None))
    if before is not None:
        job, tiles = job.changed(loss_memory=before.loss_memory), before.mlp_tiles
    memory, graphs = resolve_memory_plan(recipe, job, device, tiles=tiles, fixed_loss=True)
    return dataclasses.replace(resolved, memory=memory, graphs=graphs)


def resolve_graphs(recipe: Recipe, shape: ModelShape, device: DeviceFacts, resolved: Resolved) -> Resolved:
    """The configuration of an existing run, whose memory plan is kept, with a new decision about CUDA graphs."""
    limit, basis = limit_of(recipe, device)
    allocator_bytes = resolved.memory_plan.allocator_bytes
    if allocator_bytes is not None:
        limit = min(limit, allocator_bytes + BYTES_OUTSIDE_ALLOCATOR[device.kind])
    job = job_of(recipe, shape, device, resolved)
    return dataclasses.replace(resolved, graphs=resolve_cuda_graphs(recipe, job, device, limit, basis))


def resolve_inference(
    shape: ModelShape, device: str, *, dtype: str, capability: tuple[int, int] | None = None
) -> Resolved:
    """The configuration of a model for evaluation, generation and export, without training.

    Args:
        shape: the model's shape.
        device: cpu, cuda, cuda:1, …
        dtype: of weights and computation.
        capability: a CUDA device's compute capability.
    """
    attention = choose_for_inference(shape, device.partition(":")[0], dtype=dtype, capability=capability)
    return Resolved(
        device=device,
        threads=0,
        deterministic=False,
        precision=PrecisionConfig(dtype, dtype, dtype),
        attention=attention,
        optimizer=OptimizerConfig("none", "none", "no training"),
    )


def resolve_backends(recipe: Recipe, shape: ModelShape, device: DeviceFacts, threads: int) -> Resolved:
    """The configuration without memory plan and CUDA graphs."""
    if recipe.max_seq_length > shape.max_positions:
        raise ModelError(
            f"max_seq_length {recipe.max_seq_length} is beyond the model's {shape.max_positions} positions",
            f"set max_seq_length to at most {shape.max_positions}",
        )
    dtype = _compute_dtype(recipe, device)
    weights = recipe.weights_dtype
    if weights == "auto":
        weights = "bf16" if dtype == "bf16" else "fp32"
    gradients = recipe.gradient_dtype
    if weights == "fp32" and gradients == "bf16":
        raise RecipeError(
            f"gradient_dtype: bf16 needs weights in bf16, and {device.name} trains in {dtype} on fp32 weights",
            "set gradient_dtype: fp32, or dtype: bf16 if this device should compute in bf16 regardless",
        )
    settings, quantization = _lora(recipe, shape), _quantization(recipe, device, weights)
    if settings is not None and quantization is not None:
        spec_quantized.check_not_quantized(shape, select_modules(shape, settings.modules_to_save))
    attention = choose_for_training(recipe, shape, device, dtype)
    loss = choose_loss(
        triton=device.runs_triton,
        memory_bytes=device.memory_bytes,
        dtype=dtype,
        tokens=recipe.per_device_train_batch_size * recipe.max_seq_length,
        vocabulary=shape.vocab_size,
    )
    pointwise = choose_pointwise(triton=device.runs_triton, autocast=dtype != weights)
    return Resolved(
        device=device.kind,
        threads=recipe.num_threads or threads,
        deterministic=recipe.deterministic,
        precision=PrecisionConfig(
            dtype, weights, gradients, _describe_precision(dtype, weights, gradients, settings, quantization)
        ),
        attention=attention,
        optimizer=_optimizer(recipe, device, _trained_dtypes(shape, settings, weights)),
        compile=_compile(recipe, device, {layer.packed for layer in attention.layers}),
        loss=LossConfig(
            loss.impl,
            loss.memory_bytes,
            loss.reason,
            label_smoothing=recipe.label_smoothing_factor or 0.0,
            z_loss=recipe.z_loss or 0.0,
        ),
        pointwise=PointwiseConfig(pointwise.impl, pointwise.reason),
        lora=settings,
        quantization=quantization,
    )


def _lora(recipe: Recipe, shape: ModelShape) -> LoraSettings | None:
    """The settings of the recipe's adapters, or of the adapter that it starts from, validated for the model."""
    lora = recipe.lora
    if lora is None:
        return None
    if lora.adapter is not None:
        settings = fit_to_model(shape, read_adapter_folder(lora.adapter)).settings
        check_trainable(shape, settings, lora.adapter)
        if recipe.model.added_tokens and EMBEDDING not in settings.modules_to_save:
            raise RecipeError(
                f"model.added_tokens adds embedding rows, which lora.adapter: {lora.adapter} does not train",
                "leave the tokens out, or train a fresh adapter with embed_tokens in lora.modules_to_save",
            )
        return settings
    settings = LoraSettings.from_dict(lora.model_dump(exclude={"adapter"}))
    resolve_targets(shape, settings)  # raises for modules, ranks and patterns that do not fit
    check_trainable(shape, settings)
    select_modules(shape, settings.modules_to_save)
    return settings


def _quantization(recipe: Recipe, device: DeviceFacts, weights: str) -> Quantization | None:
    """The quantization of the frozen weights, their dtype before it, and the implementation; None without."""
    if not (recipe.load_in_4bit or recipe.load_in_8bit):
        return None
    chosen = spec_quantized.choose_quantized_kernels(device=device.kind, triton=device.runs_triton)
    nf4 = recipe.load_in_4bit
    return Quantization(
        kind="nf4" if nf4 else "int8",
        block=spec_quantized.BLOCK if nf4 else 0,
        double=nf4 and recipe.bnb_4bit_use_double_quant,
        dtype=weights,
        impl=chosen.impl,
        reason=chosen.reason,
    )


def _trained_dtypes(shape: ModelShape, lora: LoraSettings | None, weights: str) -> set[str]:
    """The dtypes of the trained parameters: the model's weights, or adapters and fully trained modules."""
    return {weights} if lora is None else {dtype for *_, dtype in trainable_parameters(shape, lora, weights)}


def _optimizer(recipe: Recipe, device: DeviceFacts, trained: set[str]) -> OptimizerConfig:
    choice = choose_optimizer(
        recipe.optim, trained,
        device=device.kind, triton=device.runs_triton, requested=recipe.optim_implementation,
    )  # fmt: skip
    return OptimizerConfig(recipe.optim, choice.impl, choice.reason)


def _compile(recipe: Recipe, device: DeviceFacts, attention: set[str]) -> CompileConfig:
    """Whether blocks are compiled, and whether with dynamic shapes."""
    obstacle = compile_obstacle(device.kind, device.capability)
    if recipe.torch_compile is True and obstacle is not None:
        raise ResourceError(
            f"torch_compile: true is not possible here: {obstacle}", "set torch_compile: auto"
        )
    # Sequences have one length unless grouped by length; varlen's offsets depend on the batch's number of documents.
    dynamic = recipe.group_by_length or (recipe.packing and "varlen" in attention)
    if recipe.torch_compile != "auto":
        return CompileConfig(recipe.torch_compile, dynamic, "set in the recipe")
    if device.kind != "cuda":
        reason = "torch.compile gains little on a CPU"
    else:
        reason = obstacle or "CUDA graphs and fused kernels leave little to gain"
    return CompileConfig(False, dynamic, reason)


def _compute_dtype(recipe: Recipe, device: DeviceFacts) -> str:
    if recipe.dtype == "auto":
        return "bf16" if device.bf16 else "fp32"
    if recipe.dtype == "bf16" and device.kind == "cuda" and not device.bf16:
        raise ResourceError(
            f"{device.name} does not support bf16 (that needs compute capability 8.0)",
            "set dtype: fp16 (with loss scaling) or dtype: fp32",
        )
    return recipe.dtype


def _describe_precision(
    dtype: str, weights: str, gradients: str, lora: LoraSettings | None, quantization: Quantization | None
) -> str:
    if quantization is not None and lora is not None:
        scales = " with 8-bit scales" if quantization.double else ""
        return (
            f"matrix products in {dtype}, frozen weights of the blocks in {quantization.kind}{scales} (dequantized by "
            f"{quantization.impl}), other weights in {weights}, adapters and their gradients in {lora.dtype}; "
            "norms, softmax and loss in fp32"
        )
    if dtype == weights == "fp32" and (lora is None or lora.dtype == "fp32"):
        return "everything in fp32"
    if lora is not None:
        return (
            f"matrix products in {dtype}, frozen weights in {weights}, adapters and their gradients in {lora.dtype}; "
            "norms, softmax and loss in fp32"
        )
    rounding = " with stochastic rounding of updates" if weights == "bf16" else ""
    scaling = ", loss scaling" if dtype == "fp16" else ""
    return (
        f"matrix products in {dtype}, weights in {weights}{rounding}, gradients accumulated in {gradients}{scaling}; "
        "norms, softmax and loss in fp32"
    )
