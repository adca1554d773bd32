"""Recipe changes that save memory or undo such savings: one list for errors, what-if tables and searches.

Each change is a set of recipe keys and the resulting job; everything else is unchanged, the memory plan included.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.spec_recompute import sort_policies
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.optim.choice import choose_optimizer
from trimtab.plan.job import Job
from trimtab.plan.make import Plan
from trimtab.plan.memory_search import tile_counts
from trimtab.recipe.keys import Recipe

SHORTEST = 256
"""The shortest suggested sequence length."""
POLICIES = {
    "cuda": ("pointwise", "selective", "block", "offload"),
    "cpu": ("pointwise", "selective", "block"),
}
"""Recompute policies suggested for all layers, in ascending order of savings."""
QUANTIZED = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}
"""Recipe keys by kind of quantized weights."""


@dataclass(frozen=True)
class Change:
    """A technique, the recipe keys that turn it on (or off, if it is `in_use`), and the resulting job.

    Example:
        >>> Change("LoRA", {"lora": {"r": 16}}, job=None, same_training=False).text
        'lora: {r: 16}'
    """

    name: str
    keys: dict[str, Any]
    """Recipe keys to set; empty if the planner decides by itself under `memory_limit`."""
    job: Job
    same_training: bool = True
    """Whether the optimizer updates are the same, up to rounding."""
    suggested: bool = True
    """Whether out-of-memory errors suggest it."""
    technique: bool = True
    """Whether a what-if table lists it; False if it only trains on less data."""
    in_use: bool = False
    """Whether the job already uses the technique, so that the keys turn it off."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The recipe lines to paste."""
        return tuple(recipe_line(key, value) for key, value in self.keys.items())

    @property
    def text(self) -> str:
        """The recipe lines as part of a sentence."""
        return " with ".join(self.lines)


def recipe_line(key: str, value: Any) -> str:
    """Formats a key and its value as one line of a recipe.

    Example:
        >>> recipe_line("load_in_4bit", True), recipe_line("recompute", {"block": 3}), recipe_line("lora", None)
        ('load_in_4bit: true', 'recompute: {block: 3}', 'lora: null')
    """
    return f"{key}: {_yaml(value)}"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def savings(plan: Plan, job: Job) -> Iterator[Change]:
    """Yields the changes that may save memory and that the recipe's other keys allow.

    Args:
        plan: recipe, device and resolved configuration.
        job: the plan's job, or a changed copy of it.
    """
    for change in _savings(plan, job):
        yield _with_implementation(change, job, plan.device)


def _savings(plan: Plan, job: Job) -> Iterator[Change]:
    device, recipe = plan.device, plan.recipe
    yield from _smaller_microbatch(job)
    yield from _activations(job, device)
    yield from _optimizer(job, recipe)
    yield from _dtypes(job, device)
    yield from _quantized(job, device)
    if job.tokens >= 2 * SHORTEST:
        half = job.tokens // 2
        changed = dataclasses.replace(job, tokens=half)
        keys = {"max_seq_length": half}
        yield Change("shorter sequences", keys, changed, same_training=False, technique=False)
    if not job.packed:
        yield Change("packing", _packing_keys(recipe, True), _packed(plan, job, True), suggested=False)
    yield from _adapters(job, device, recipe)


def reversals(plan: Plan) -> Iterator[Change]:
    """Yields changes that turn off each memory-saving technique of the plan's job."""
    job = plan.job
    yield from _reversed_activations(job)
    for change in _reversed_states(job):
        yield _with_implementation(change, job, plan.device)
    if job.packed:
        yield Change("packing", _packing_keys(plan.recipe, False), _packed(plan, job, False), in_use=True)


def _with_implementation(change: Change, before: Job, device: DeviceFacts) -> Change:
    """The change, with the implementation that is selected for another optimizer or other dtypes of weights."""
    after = change.job
    if after.optimizer == before.optimizer and (
        after.optimizer == "adamw_8bit" or _trained_dtypes(after) == _trained_dtypes(before)
    ):
        return change
    impl = choose_optimizer(
        after.optimizer, _trained_dtypes(after), device=device.kind, triton=device.runs_triton
    ).impl
    return dataclasses.replace(change, job=dataclasses.replace(after, optimizer_impl=impl))


def _trained_dtypes(job: Job) -> set[str]:
    if job.lora is None:
        return {job.weights_dtype}
    return {parameter.dtype for parameter in job.trained.parameters}


def _packing_keys(recipe: Recipe, on: bool) -> dict[str, Any]:
    return {"packing": on} | ({"group_by_length": False} if on and recipe.group_by_length else {})


def _packed(plan: Plan, job: Job, on: bool) -> Job:
    """The job with or without packing, and the attention backends resolved for it."""
    packed = tuple(layer.packed for layer in plan.resolved.attention.layers)
    attention = packed if on else tuple(layer.unpacked for layer in plan.resolved.attention.layers)
    return job.changed(
        packed=on,
        attention=attention[0],
        layer_attention=attention if len(set(attention)) > 1 else (),
        evaluation_attention=packed if packed != attention else (),
    )


def _reversed_activations(job: Job) -> Iterator[Change]:
    policies = set(job.layer_policies)
    if policies != {"none"}:
        none = job.changed(policies=("none",) * len(job.layer_policies))
        yield Change(_recompute_name(policies), {"recompute": "none"}, none, in_use=True)
    if job.mlp_tiles > 1:
        yield Change("feed-forward in tiles", {"mlp_tiles": 1}, job.changed(mlp_tiles=1), in_use=True)
    if job.accumulation > 1:
        batch = job.batch * job.accumulation
        keys = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 1}
        yield Change("gradient accumulation", keys, job.changed(batch=batch, accumulation=1), in_use=True)


def _reversed_states(job: Job) -> Iterator[Change]:
    """Changes that turn off savings in optimizer states, gradients and weights."""
    if job.optimizer in ("adamw_8bit", "adamw_bf16"):
        changed = job.changed(optimizer="adamw_torch")
        name = {"adamw_8bit": "8-bit optimizer states", "adamw_bf16": "bf16 optimizer states"}[job.optimizer]
        yield Change(name, {"optim": "adamw_torch"}, changed, same_training=False, in_use=True)
    if job.in_backward:
        later = job.changed(in_backward=False)
        yield Change("optimizer in backward", {"optim_in_backward": False}, later, in_use=True)
    if job.gradient_dtype == "bf16":
        changed = dataclasses.replace(job, gradient_dtype="fp32")
        yield Change("bf16 gradients", {"gradient_dtype": "fp32"}, changed, same_training=False, in_use=True)
    if job.quantization is not None:
        key = QUANTIZED[job.quantization.kind]
        changed = dataclasses.replace(job, quantization=None, dequantized_layers=0)
        yield Change(
            f"{job.quantization.kind.upper()} weights",
            {key: False},
            changed,
            same_training=False,
            in_use=True,
        )
    if job.lora is not None:
        keys: dict[str, Any] = {"lora": None}
        if job.quantization is not None:
            keys[QUANTIZED[job.quantization.kind]] = False
        full = dataclasses.replace(job, lora=None, quantization=None, dequantized_layers=0)
        yield Change("LoRA", keys, full, same_training=False, in_use=True)


def _recompute_name(policies: set[str]) -> str:
    return (
        "activation offloading"
        if any(p.startswith("offload") for p in policies)
        else "activation checkpointing"
    )


def _smaller_microbatch(job: Job) -> Iterator[Change]:
    if job.batch == 1 or job.in_backward:
        return
    batch = job.batch // 2 if job.batch % 2 == 0 else 1
    accumulation = job.accumulation * job.batch // batch
    keys = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    yield Change("smaller microbatch", keys, dataclasses.replace(job, batch=batch, accumulation=accumulation))


def _activations(job: Job, device: DeviceFacts) -> Iterator[Change]:
    """Changes of dequantized copies, recompute policies, feed-forward tiles and loss chunks."""
    layers = len(job.layer_policies)
    if job.dequantized_layers:
        yield Change(
            "no dequantized copies", {"dequantized_layers": 0}, dataclasses.replace(job, dequantized_layers=0)
        )
    policies = tuple(p for p in POLICIES[job.device] if p != "offload" or not device.unified)
    stronger = (
        policies[policies.index(job.layer_policies[0]) + 1 :]
        if job.layer_policies[0] in policies
        else policies
    )
    if set(job.layer_policies) & {"offload_half", "offload_attention"}:
        stronger = tuple(policy for policy in stronger if policy in ("block", "offload"))
    for policy in stronger:
        changed = job.changed(policies=(policy,) * layers)
        kind = "activation offloading" if policy == "offload" else "activation checkpointing"
        yield Change(kind, {"recompute": policy}, changed)
    if layers > 1 and set(job.layer_policies) == {"none"}:
        counts = {"block": layers // 2, "none": layers - layers // 2}
        changed = job.changed(policies=sort_policies(counts))
        yield Change("checkpointing half the layers", {"recompute": counts}, changed, suggested=False)
    next_count = next((count for count in tile_counts(job, None) if count > job.mlp_tiles), None)
    if next_count is not None:
        changed = job.changed(mlp_tiles=next_count)
        yield Change("feed-forward in tiles", {"mlp_tiles": next_count}, changed, suggested=False)
    if job.loss_impl == "triton" and job.loss_memory is not None:
        yield Change("loss in smaller chunks", {}, job.changed(loss_memory=None), suggested=False)


def _optimizer(job: Job, recipe: Recipe) -> Iterator[Change]:
    if job.optimizer != "adamw_8bit":
        changed = dataclasses.replace(job, optimizer="adamw_8bit")
        yield Change("8-bit optimizer states", {"optim": "adamw_8bit"}, changed, same_training=False)
    if job.optimizer == "adamw_torch":
        changed = dataclasses.replace(job, optimizer="adamw_bf16")
        yield Change(
            "bf16 optimizer states", {"optim": "adamw_bf16"}, changed, same_training=False, suggested=False
        )
    if not job.in_backward and job.dtype != "fp16":
        keys: dict[str, Any] = {"optim_in_backward": True}
        if recipe.max_grad_norm > 0:
            keys["max_grad_norm"] = 0
        if job.accumulation > 1:
            keys["gradient_accumulation_steps"] = 1
        changed = dataclasses.replace(job, in_backward=True, accumulation=1)
        yield Change("optimizer in backward", keys, changed, same_training=False, suggested=False)


def _dtypes(job: Job, device: DeviceFacts) -> Iterator[Change]:
    if job.weights_dtype == "fp32" and job.bf16:
        keys = {"dtype": "bf16", "weights_dtype": "bf16"}
        changed = dataclasses.replace(job, dtype="bf16", weights_dtype="bf16")
        yield Change("bf16 weights", keys, changed, same_training=False)
    if job.weights_dtype == "bf16" and job.gradient_dtype == "fp32":
        changed = dataclasses.replace(job, gradient_dtype="bf16")
        yield Change("bf16 gradients", {"gradient_dtype": "bf16"}, changed, same_training=False)


def _quantized(job: Job, device: DeviceFacts) -> Iterator[Change]:
    if job.lora is None or not _can_be_quantized(job):
        return
    current = job.quantization.kind if job.quantization is not None else None
    if current is None:
        changed = dataclasses.replace(job, quantization=_quantization("int8", device))
        yield Change("INT8 weights", {"load_in_8bit": True}, changed, same_training=False, suggested=False)
    if current != "nf4":
        keys = {"load_in_4bit": True} | ({"load_in_8bit": False} if current else {})
        changed = dataclasses.replace(job, quantization=_quantization("nf4", device), dequantized_layers=0)
        yield Change("NF4 weights", keys, changed, same_training=False)


def _adapters(job: Job, device: DeviceFacts, recipe: Recipe) -> Iterator[Change]:
    """LoRA and QLoRA, listed last because they train other parameters."""
    narrow = min(min(linear.out_features, linear.in_features) for _, linear in job.shape.linears())
    allowed = not job.in_backward and recipe.embedding_learning_rate is None
    if job.lora is None and allowed and narrow >= LoraSettings().r:
        changed = dataclasses.replace(job, lora=LoraSettings())
        yield Change("LoRA", {"lora": {"r": 16}}, changed, same_training=False)
        quantized = dataclasses.replace(changed, quantization=_quantization("nf4", device))
        keys = {"lora": {"r": 16}, "load_in_4bit": True}
        yield Change("QLoRA", keys, quantized, same_training=False, suggested=False)


def _can_be_quantized(job: Job) -> bool:
    """Whether no linear layer of the blocks is fully trained."""
    try:
        spec_quantized.check_not_quantized(
            job.shape, (parameter.name for parameter in job.trained.parameters)
        )
    except RecipeError:
        return False
    return True


def _quantization(kind: str, device: DeviceFacts) -> Quantization:
    impl = spec_quantized.choose_quantized_kernels(device=device.kind, triton=device.runs_triton).impl
    if kind == "int8":
        return Quantization("int8", block=0, double=False, impl=impl)
    return Quantization("nf4", double=True, impl=impl)
