"""Constraints between keys of a recipe, beyond each key's own type and range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimtab.facts.units import parse_bytes, parse_share

if TYPE_CHECKING:
    from trimtab.recipe.keys import Lora, Recipe

FLAT_SCHEDULES = ("constant", "constant_with_warmup")
"""Schedules whose learning rate does not depend on the total number of steps."""

MAX_TOKENS = 10**15
"""Maximum number of tokens per optimizer step; integers up to it are exact in a double."""
MAX_WEIGHT = 1000
"""Maximum passes over a source per epoch. The order of an epoch is stored in memory, and a larger weight is most likely
a typing error."""

TEMPLATE_NAMES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "namespace",
    "raise_exception",
    "strftime_now",
    "self",
)
"""Variables that every chat template receives from the rows, from trimtab or from Jinja."""


def find_violations(recipe: Recipe) -> list[str]:
    """Returns one sentence, `cause; remedy`, for each violated constraint."""
    return [
        *_num_steps(recipe),
        *_batch_size(recipe),
        *_weights(recipe),
        *_grouping(recipe),
        *_schedule(recipe),
        *_precision(recipe),
        *_optimizer(recipe),
        *_memory(recipe),
        *_template(recipe),
        *_evaluation(recipe),
        *_early_stopping(recipe),
        *_lora(recipe),
        *_quantized(recipe),
    ]


def _num_steps(recipe: Recipe) -> Iterator[str]:
    if recipe.max_steps == 0:
        yield "max_steps is 0; set a positive number of steps, or -1 to train for num_train_epochs"
    if recipe.max_steps > 0 and recipe.num_train_epochs is not None:
        yield (
            f"max_steps: {recipe.max_steps} and num_train_epochs: {recipe.num_train_epochs:g} are both "
            "given; keep one of them: set max_steps=null or num_train_epochs=null"
        )
    if recipe.data.streaming and recipe.max_steps <= 0:
        yield "data.streaming: true leaves the number of steps unknown; set max_steps"


def _batch_size(recipe: Recipe) -> Iterator[str]:
    tokens = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * recipe.max_seq_length
    if tokens > MAX_TOKENS:
        yield (
            f"per_device_train_batch_size × gradient_accumulation_steps × max_seq_length is {float(tokens):.3g} "
            f"tokens per step, more than any model is trained on; reduce the product to {MAX_TOKENS:.0e} or less"
        )


def _weights(recipe: Recipe) -> Iterator[str]:
    sources = {"data.train": recipe.data.train}
    if recipe.data.replay is not None:
        sources["data.replay.sources"] = recipe.data.replay.sources
    for key, items in sources.items():
        for i, source in enumerate(items):
            if source.weight > MAX_WEIGHT:
                yield (
                    f"{key}.{i}.weight: {source.weight:g} is above {MAX_WEIGHT}, the maximum number of passes over a "
                    f"source per epoch; set {key}.{i}.weight={MAX_WEIGHT} or less (1 is one pass)"
                )


def _grouping(recipe: Recipe) -> Iterator[str]:
    if not recipe.group_by_length:
        return
    if recipe.packing:
        yield (
            "group_by_length: true requires one document per sequence, and packing: true packs several; "
            "set packing: false, or leave group_by_length out (group_by_length=null)"
        )
    if recipe.data.streaming:
        yield (
            "group_by_length: true requires the lengths of all documents, which are unknown with data.streaming: true; "
            "set data.streaming: false, or leave group_by_length out (group_by_length=null)"
        )


def _schedule(recipe: Recipe) -> Iterator[str]:
    if recipe.warmup_steps and recipe.warmup_ratio:
        yield (
            f"warmup_steps: {recipe.warmup_steps} and warmup_ratio: {recipe.warmup_ratio:g} are both given; "
            "keep one of them: set warmup_steps=null or warmup_ratio=null"
        )
    if recipe.lr_scheduler_type == "constant" and (recipe.warmup_steps or recipe.warmup_ratio):
        yield (
            "lr_scheduler_type: constant has no warm-up; set lr_scheduler_type=constant_with_warmup, or "
            + _without_warmup(recipe)
        )
    if 0 < recipe.max_steps <= recipe.warmup_steps:
        yield (
            f"warmup_steps: {recipe.warmup_steps} lasts as long as the whole run "
            f"(max_steps: {recipe.max_steps}); make it shorter"
        )
    if recipe.min_lr_ratio and recipe.lr_scheduler_type in FLAT_SCHEDULES:
        yield (
            f"min_lr_ratio: {recipe.min_lr_ratio:g} has no meaning for lr_scheduler_type: "
            f"{recipe.lr_scheduler_type}, which does not decay; leave it out (min_lr_ratio=null), or set "
            "lr_scheduler_type=cosine"
        )


def _without_warmup(recipe: Recipe) -> str:
    """The remedy that removes the recipe's warm-up."""
    given = [key for key in ("warmup_steps", "warmup_ratio") if getattr(recipe, key)]
    return f"leave the warm-up out ({' '.join(f'{key}=null' for key in given)})"


def _precision(recipe: Recipe) -> Iterator[str]:
    if recipe.dtype in ("fp32", "fp16") and recipe.weights_dtype == "bf16":
        yield (
            f"dtype: {recipe.dtype} cannot be used with bf16 weights; set dtype: bf16, or weights_dtype: fp32"
        )
    if recipe.gradient_dtype == "bf16" and (
        recipe.weights_dtype == "fp32"
        or (recipe.weights_dtype == "auto" and recipe.dtype in ("fp32", "fp16"))
    ):
        yield (
            "gradient_dtype: bf16 requires bf16 weights, and here they are fp32; "
            "set gradient_dtype: fp32, or weights_dtype: bf16 with dtype: bf16"
        )


def _optimizer(recipe: Recipe) -> Iterator[str]:
    if recipe.optim_implementation != "auto" and recipe.optim != "adamw_8bit":
        yield (
            f"optim_implementation: {recipe.optim_implementation} requires optim: adamw_8bit, not "
            f"{recipe.optim}; leave it out (optim_implementation=null), or set optim: adamw_8bit"
        )
    if not recipe.optim_in_backward:
        return
    if recipe.max_grad_norm > 0:
        yield (
            "optim_in_backward: true updates each parameter before all gradients are known, so the global gradient "
            f"norm cannot be clipped to max_grad_norm: {recipe.max_grad_norm:g}; set max_grad_norm: 0, or "
            "optim_in_backward: false"
        )
    if recipe.gradient_accumulation_steps > 1:
        yield (
            "optim_in_backward: true updates the parameters in every backward pass, so gradients cannot be accumulated "
            f"over gradient_accumulation_steps: {recipe.gradient_accumulation_steps}; set "
            "gradient_accumulation_steps: 1 with a larger per_device_train_batch_size, or optim_in_backward: false"
        )
    if recipe.dtype == "fp16":
        yield (
            "optim_in_backward: true cannot skip a step whose gradients overflow, as loss scaling with dtype: fp16 "
            "requires; set dtype: bf16, or optim_in_backward: false"
        )


def _memory(recipe: Recipe) -> Iterator[str]:
    named = [recipe.recompute] if isinstance(recipe.recompute, str) else recipe.recompute
    inside = [policy for policy in ("offload_half", "offload_attention") if policy in named]
    if recipe.torch_compile is True and inside:
        yield (
            f"recompute: {inside[0]} offloads activations from inside a layer, which torch_compile: true compiles as "
            "one region; set recompute: offload, or torch_compile: false"
        )
    limit = recipe.memory_limit
    if limit is not None and not parse_bytes(limit) and parse_share(limit) is None:
        yield _not_a_limit(limit)
    if recipe.gradient_checkpointing is not None and recipe.recompute != "auto":
        same = "block" if recipe.gradient_checkpointing else "none"
        how = "are both given" if named == [same] else "contradict each other"
        yield (
            f"gradient_checkpointing: {str(recipe.gradient_checkpointing).lower()} (recompute: {same}) and recompute: "
            f"{recipe.recompute} {how}; keep one of them: set gradient_checkpointing=null or recompute=null"
        )
    yield from _tiles(recipe)


def _not_a_limit(limit: str) -> str:
    cause = f"memory_limit: {limit} is neither a size nor a share above 0"
    number = limit.replace("%", "").strip()
    if limit.strip().endswith("%") and number.replace(".", "", 1).isdecimal() and float(number) > 100:
        cause = f"memory_limit: {limit} is more than the device has"
    elif limit.replace(".", "", 1).isdecimal() and float(limit) > 0:
        cause = f"memory_limit: {limit} has no unit"
    return f"{cause}; write it like 24GiB, 24GB or 80%"


def _tiles(recipe: Recipe) -> Iterator[str]:
    batch, length = recipe.per_device_train_batch_size, recipe.max_seq_length
    if recipe.mlp_tiles != "auto" and recipe.mlp_tiles > batch * length:
        yield (
            f"mlp_tiles: {recipe.mlp_tiles} is more than the tokens of a microbatch "
            f"(per_device_train_batch_size: {batch} × max_seq_length: {length}); give at most {batch * length}"
        )


def _template(recipe: Recipe) -> Iterator[str]:
    taken = [name for name in TEMPLATE_NAMES if name in recipe.data.chat_template_kwargs]
    if taken:
        them = "it" if len(taken) == 1 else "them"
        keys = " ".join(f"data.chat_template_kwargs.{name}=null" for name in taken)
        yield (
            f"data.chat_template_kwargs sets {', '.join(taken)}, which every chat template receives anyway; "
            f"leave {them} out ({keys})"
        )


def _evaluation(recipe: Recipe) -> Iterator[str]:
    held_out = recipe.data.eval_share and not recipe.data.streaming
    sets = recipe.data.eval.domain or recipe.data.eval.general or held_out
    if recipe.eval_steps and not (sets or recipe.probe or recipe.answers or recipe.prompts):
        yield (
            f"eval_steps: {recipe.eval_steps} is set and there is nothing to evaluate; "
            "name a set under data.eval, set data.eval_share, or leave eval_steps out (eval_steps=null)"
        )


def _early_stopping(recipe: Recipe) -> Iterator[str]:
    patience = recipe.early_stopping_patience
    if patience is None:
        if recipe.early_stopping_threshold:
            yield (
                f"early_stopping_threshold: {recipe.early_stopping_threshold:g} has no effect without "
                "early_stopping_patience; set early_stopping_patience, or leave it out "
                "(early_stopping_threshold=null)"
            )
        return
    if recipe.eval_steps is None:
        yield (
            f"early_stopping_patience: {patience} counts evaluations, and none take place during training; set "
            "eval_steps"
        )
    if not has_domain_set(recipe):
        set_one = (
            "name data.eval.domain"
            if recipe.data.streaming
            else "name data.eval.domain or set data.eval_share"
        )
        yield (
            f"early_stopping_patience: {patience} depends on the loss on the domain set, and there is none; {set_one}"
        )


def has_domain_set(recipe: Recipe) -> bool:
    """Whether there is a domain evaluation set; its loss selects the best checkpoint and controls early stopping."""
    held_out = recipe.data.eval_share > 0 and not recipe.data.streaming
    return bool(recipe.data.eval.domain) or held_out


def _lora(recipe: Recipe) -> Iterator[str]:
    lora = recipe.lora
    if lora is None:
        return
    given = [key for key in type(lora).model_fields if key != "adapter" and _changed(lora, key)]
    if lora.adapter is not None and given:
        keys = ", ".join(f"lora.{key}" for key in given)
        nulls = " ".join(f"lora.{key}=null" for key in given)
        yield (
            f"lora.adapter: {lora.adapter} has its own {given[0]}; leave {keys} out ({nulls}), or train a new "
            "adapter (lora.adapter=null)"
        )
    if (
        recipe.model.added_tokens
        and lora.adapter is None
        and not any(name.rpartition(".")[2] == "embed_tokens" for name in lora.modules_to_save)
    ):
        yield (
            "model.added_tokens adds rows to the embedding that adapters do not train; list embed_tokens in "
            "lora.modules_to_save (and lm_head, if the model has an untied head)"
        )


def _quantized(recipe: Recipe) -> Iterator[str]:
    if recipe.load_in_4bit and recipe.load_in_8bit:
        yield (
            "load_in_4bit: true and load_in_8bit: true are both given; keep one of them: set load_in_4bit=null or "
            "load_in_8bit=null"
        )
    elif recipe.load_in_4bit or recipe.load_in_8bit:
        key, bits = ("load_in_4bit", 4) if recipe.load_in_4bit else ("load_in_8bit", 8)
        if recipe.lora is None:
            yield (
                f"{key}: true quantizes the weights to {bits} bits, which cannot be trained; train adapters "
                f"(lora: {{r: 16}}), or set {key}: false"
            )
    elif recipe.dequantized_layers not in ("auto", 0):
        yield (
            f"dequantized_layers: {recipe.dequantized_layers} has no effect without quantized weights; leave it out "
            "(dequantized_layers=null), or set load_in_4bit: true or load_in_8bit: true"
        )
    if not recipe.bnb_4bit_use_double_quant and not recipe.load_in_4bit:
        yield (
            "bnb_4bit_use_double_quant has no effect without load_in_4bit: true; leave it out "
            "(bnb_4bit_use_double_quant=null), or set load_in_4bit: true"
        )


def _changed(lora: Lora, key: str) -> bool:
    """Whether a key differs from its default; a dumped recipe contains the defaults too."""
    return bool(getattr(lora, key) != type(lora).model_fields[key].default)
