"""Every `auto` of a recipe, decided once and kept in the run folder, so that a resumed run decides nothing anew."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trimtab.adapt import spec_quantized
from trimtab.adapt.peft_config import fitted, read_adapter_folder
from trimtab.adapt.spec import LoraSettings, check_trainable, resolve
from trimtab.adapt.targets import EMBEDDING, select_modules
from trimtab.facts.compilers import compile_obstacle
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ModelError, RecipeError, ResourceError
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.adamw8bit.choice import choose as choose_adamw8bit
from trimtab.kernels.attention.choice import choose
from trimtab.kernels.linear_cross_entropy.choice import choose as choose_loss
from trimtab.recipe import Recipe


@dataclass(frozen=True)
class Choices:
    """What was decided, in plain data.

    Example:
        >>> Choices.from_dict(choices.to_dict()) == choices  # doctest: +SKIP
        True
    """

    device: str
    dtype: str
    weights_dtype: str
    gradient_dtype: str
    attention: dict[str, Any]
    """impl, reason, and why each other one was not taken."""
    precision: str
    """The number formats in a sentence."""
    threads: int
    deterministic: bool
    optimizer: dict[str, Any] = field(default_factory=dict)
    """name, impl and reason; empty in the folders of runs made before there was a choice."""
    compile: dict[str, Any] = field(default_factory=dict)
    """on, dynamic (one program for all lengths) and reason; empty in the folders of runs made before it was there."""
    loss: dict[str, Any] = field(default_factory=dict)
    """impl, memory_bytes (the most it may hold; `memory` has what was settled), reason and, where the recipe sets them,
    label_smoothing and z_loss of the training loss; empty likewise."""
    pointwise: dict[str, Any] = field(default_factory=dict)
    """impl and reason, of norms, rotary positions and gates; empty likewise."""
    graphs: dict[str, Any] = field(default_factory=dict)
    """on and reason (`trimtab.run.recording`); decided with the plan, and anew when a run is resumed."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What layers keep, tiles, the limit and the reason (`trimtab.plan.limits.settle`); the plan fills it in."""
    lora: dict[str, Any] | None = None
    """The adapters' settings (`adapt.LoraSettings`), those of the adapter a run started from included; None where
    every weight is trained."""
    quantization: dict[str, Any] | None = None
    """Of frozen weights in few bits: kind, block, double, the dtype they are rounded to before, impl and reason; None
    where they stay as they are."""

    def to_dict(self) -> dict[str, Any]:
        """For choices.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def needed() -> list[str]:
        """Keys without which a choices.json is not whole; later ones are missing in the folders of older runs."""
        fields = dataclasses.fields(Choices)
        return [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Choices:
        """The inverse of `to_dict`; keys of other parts of choices.json are left alone."""
        return Choices(**{f.name: data[f.name] for f in dataclasses.fields(Choices) if f.name in data})


def choose_all(recipe: Recipe, shape: ModelShape, device: DeviceFacts, threads: int) -> Choices:
    """Decides for one machine; a wish that cannot be met is an error, never replaced.

    `threads` is what torch uses by default; the recipe's `num_threads` takes precedence.
    """
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
            "set gradient_dtype: fp32, or dtype: bf16 if this device should compute in bf16 all the same",
        )
    settings, quantization = _lora(recipe, shape), _quantization(recipe, device, weights)
    if settings is not None and quantization is not None:
        spec_quantized.check_whole(select_modules(shape, settings.modules_to_save))
    attention = _attention(recipe, shape, device, dtype)
    loss = choose_loss(
        triton=device.runs_triton,
        memory_bytes=device.memory_bytes,
        dtype=dtype,
        tokens=recipe.per_device_train_batch_size * recipe.max_seq_length,
        vocabulary=shape.vocab_size,
    )
    return Choices(
        device=device.kind,
        dtype=dtype,
        weights_dtype=weights,
        gradient_dtype=gradients,
        attention=attention,
        precision=_sentence(dtype, weights, gradients, settings, quantization),
        threads=recipe.num_threads or threads,
        deterministic=recipe.deterministic,
        optimizer=_optimizer(recipe, device),
        compile=_compile(recipe, device, attention["impl"]),
        loss={**loss._asdict(), **_loss_terms(recipe)},
        pointwise=_pointwise(device, autocast=dtype != weights),
        lora=None if settings is None else settings.to_dict(),
        quantization=quantization,
    )


def _lora(recipe: Recipe, shape: ModelShape) -> LoraSettings | None:
    """What a recipe says of adapters, or what the adapter that it starts from says, checked against the model."""
    lora = recipe.lora
    if lora is None:
        return None
    if lora.adapter is not None:
        settings = fitted(shape, read_adapter_folder(lora.adapter)).settings
        check_trainable(shape, settings, lora.adapter)
        if recipe.model.added_tokens and EMBEDDING not in settings.modules_to_save:
            raise RecipeError(
                f"model.added_tokens gives the embedding rows that lora.adapter: {lora.adapter} does not train",
                "leave the tokens out, or train a fresh adapter with embed_tokens in lora.modules_to_save",
            )
        return settings
    settings = LoraSettings.from_dict(lora.model_dump(exclude={"adapter"}))
    resolve(shape, settings)
    check_trainable(shape, settings)
    select_modules(shape, settings.modules_to_save)
    return settings


def _quantization(recipe: Recipe, device: DeviceFacts, weights: str) -> dict[str, Any] | None:
    """What frozen weights are kept in, the format they are rounded to before, and which code reads them; or None."""
    if not (recipe.load_in_4bit or recipe.load_in_8bit):
        return None
    chosen = spec_quantized.choose(device=device.kind, triton=device.runs_triton)
    nf4 = recipe.load_in_4bit
    return {
        "kind": "nf4" if nf4 else "int8",
        "block": spec_quantized.BLOCK if nf4 else 0,
        "double": nf4 and recipe.bnb_4bit_use_double_quant,
        "dtype": weights,
        "impl": chosen.impl,
        "reason": chosen.reason,
    }


def _loss_terms(recipe: Recipe) -> dict[str, float]:
    """What training adds to the cross-entropy, by the names of `trimtab.kernels.linear_cross_entropy`."""
    terms = {"label_smoothing": recipe.label_smoothing_factor, "z_loss": recipe.z_loss}
    return {name: value for name, value in terms.items() if value}


def _attention(recipe: Recipe, shape: ModelShape, device: DeviceFacts, dtype: str) -> dict[str, Any]:
    """The one for packed rows, which evaluation has whatever the training windows hold, and where those are never
    packed the one for whole rows as well."""
    job: dict[str, Any] = {
        "device": device.kind,
        "capability": device.capability,
        "dtype": dtype,
        "head_dim": shape.head_dim,
        "window": _shortest_window(shape, recipe.max_seq_length),
        "training": True,
        "requested": recipe.model.attn_implementation,
        "deterministic": recipe.deterministic,
        "tokens": recipe.max_seq_length,
        "triton": device.triton,
    }
    packed = choose(packed=True, **job)
    found = {"impl": packed.impl, "reason": packed.reason, "rejected": packed.rejected}
    if recipe.packing or recipe.model.attn_implementation != "auto":
        return found
    whole = choose(packed=False, **job)
    if whole.impl == packed.impl:
        return found
    reason = f"{whole.reason}; {packed.impl} where measured texts are packed"
    return {**found, "whole": whole.impl, "reason": reason}


def _optimizer(recipe: Recipe, device: DeviceFacts) -> dict[str, Any]:
    if recipe.optim != "adamw_8bit":
        return {"name": recipe.optim, "impl": "torch", "reason": "named in the recipe"}
    choice = choose_adamw8bit(
        device=device.kind, triton=device.runs_triton, requested=recipe.optim_implementation
    )
    return {"name": recipe.optim, "impl": choice.impl, "reason": choice.reason}


def _compile(recipe: Recipe, device: DeviceFacts, attention: str) -> dict[str, Any]:
    """Whether blocks are compiled, and whether for one length or for all."""
    obstacle = compile_obstacle(device.kind, device.capability)
    if recipe.torch_compile is True and obstacle is not None:
        raise ResourceError(f"torch_compile: true cannot work here: {obstacle}", "set torch_compile: auto")
    # Windows have one length unless they are grouped; varlen's offsets are as many as a batch has documents.
    dynamic = recipe.group_by_length or (recipe.packing and attention == "varlen")
    if recipe.torch_compile != "auto":
        return {"on": recipe.torch_compile, "dynamic": dynamic, "reason": "named in the recipe"}
    if device.kind != "cuda":
        reason = "compiling gains little on a CPU"
    else:
        reason = obstacle or "steps in one launch, of fused kernels, leave it nothing to gain"
    return {"on": False, "dynamic": dynamic, "reason": reason}


def _pointwise(device: DeviceFacts, *, autocast: bool) -> dict[str, Any]:
    if not device.runs_triton:
        return {"impl": "reference", "reason": "torch's own operations, on any device"}
    if autocast:  # the stream is fp32 and what is added to it 16 bits: the kernels take one format
        return {"impl": "reference", "reason": "torch's own operations, which autocast knows"}
    return {"impl": "triton", "reason": "norms, rotary positions and gates in one kernel each"}


def _shortest_window(shape: ModelShape, length: int) -> int | None:
    windows = [w for w in (shape.window(i) for i in range(shape.num_layers)) if w is not None and w < length]
    return min(windows) if windows else None


def _compute_dtype(recipe: Recipe, device: DeviceFacts) -> str:
    if recipe.dtype == "auto":
        return "bf16" if device.bf16 else "fp32"
    if recipe.dtype == "bf16" and device.kind == "cuda" and not device.bf16:
        raise ResourceError(
            f"{device.name} does not compute in bf16 (that needs capability 8.0)",
            "set dtype: fp16 (with loss scaling) or dtype: fp32",
        )
    return recipe.dtype


def _sentence(
    dtype: str, weights: str, gradients: str, lora: LoraSettings | None, quantization: dict[str, Any] | None
) -> str:
    if quantization is not None and lora is not None:
        scales = ", its scales in 8 bits" if quantization["double"] else ""
        return (
            f"matrix products in {dtype}, frozen weights of the blocks in {quantization['kind']}{scales} (read by "
            f"{quantization['impl']}), the others in {weights}, adapters and their gradients in {lora.dtype}; "
            "norms, softmax and loss in fp32"
        )
    if dtype == weights == "fp32" and (lora is None or lora.dtype == "fp32"):
        return "everything in fp32"
    if lora is not None:
        return (
            f"matrix products in {dtype}, frozen weights in {weights}, adapters and their gradients in {lora.dtype}; "
            "norms, softmax and loss in fp32"
        )
    rounding = ", updates rounded stochastically" if weights == "bf16" else ""
    scaling = ", loss scaled" if dtype == "fp16" else ""
    return (
        f"matrix products in {dtype}, weights in {weights}{rounding}, gradients added up in {gradients}{scaling}; "
        "norms, softmax and loss in fp32"
    )
