"""Inverse questions: the longest sequence, the largest batch, the fastest setting, the smallest or cheapest GPU.

Each answer has the recipe keys to set and the resulting plan, so that printed figures are planned, not extrapolated.
The function that resolves a recipe for a device is passed in (`Planner`): this package only plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError, TrimtabError
from trimtab.facts.units import format_bytes, format_rate
from trimtab.kernels.linear_cross_entropy.choice import MEMORY_DIVISOR
from trimtab.plan import memory_search
from trimtab.plan.changes import recipe_line
from trimtab.plan.checkpoints import background_bytes
from trimtab.plan.fit import fits
from trimtab.plan.job import Job
from trimtab.plan.limits import limit_of
from trimtab.plan.make import Plan
from trimtab.plan.max_seq_length import STEP, largest_fitting, longest_tokens
from trimtab.recipe import build
from trimtab.recipe.keys import Recipe

QUESTIONS = ("max_seq_length", "batch_size", "fastest", "smallest_gpu", "cheapest")
LARGEST_BATCH = 1 << 16
"""The largest per-device batch that is tried."""
MAX_BATCHES = 12
"""How many divisors of the global batch `fastest` plans: the largest that fit."""
NEXT_GPUS = 4
"""How many GPUs are listed after the smallest."""

Planner = Callable[[Recipe, DeviceFacts], Plan]
"""Resolves a recipe for a device and plans it."""
Progress = Callable[[str, int, int], None]
"""Called with (current item, items done, total items)."""


@dataclass(frozen=True)
class Option:
    """A planned candidate."""

    name: str
    """A description of the setting, or a GPU's name for `--gpu`."""
    keys: dict[str, Any]
    """Recipe keys of the candidate; empty for a GPU."""
    plan: Plan
    tokens_per_second: float | None
    dollars_per_million_tokens: float | None = None
    usd_per_hour: float | None = None
    price_source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "name": self.name,
            "recipe": dict(self.keys),
            "needed": self.plan.needed,
            "available": min(self.plan.limit, self.plan.device.available_bytes),
            "tokens_per_second": self.tokens_per_second,
            "dollars_per_million_tokens": self.dollars_per_million_tokens,
            "usd_per_hour": self.usd_per_hour,
            "price_source": self.price_source or None,
            "recompute": self.plan.resolved.memory_plan.description,
        }


@dataclass(frozen=True)
class Answer:
    """The answer to a question as a sentence and as recipe keys, with the compared candidates."""

    question: str
    sentence: str
    keys: dict[str, Any] = field(default_factory=dict)
    """Recipe keys to set; empty if nothing fits or the answer is a GPU."""
    plan: Plan | None = None
    """The plan with these keys or on that GPU; None if nothing fits."""
    options: tuple[Option, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The recipe lines to paste."""
        return tuple(recipe_line(key, value) for key, value in self.keys.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "question": self.question,
            "answer": self.sentence,
            "recipe": dict(self.keys),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "options": [option.to_dict() for option in self.options],
        }


def changed_recipe(recipe: Recipe, keys: dict[str, Any]) -> Recipe:
    """Returns the recipe with other values of some keys, validated like a file.

    Example:
        >>> from trimtab.recipe import loads
        >>> changed_recipe(loads("model: a\\ndata: {train: x}"), {"max_seq_length": 64}).max_seq_length
        64
    """
    plain = recipe.model_dump(mode="json", exclude_unset=True)
    if "recompute" in keys:
        plain.pop("gradient_checkpointing", None)
    return build(plain | keys)


def solve_max_seq_length(plan: Plan, planner: Planner) -> Answer:
    """Finds the longest `max_seq_length` whose plan fits, with recomputation, tiles and offloading chosen for it."""
    recipe, device = plan.recipe, plan.device
    limit_name = limit_of(recipe, device)[1]
    memory_keys = _auto_memory_keys(recipe)
    positions = plan.shape.max_positions
    tokens = find_longest(plan, planner)
    if tokens < min(plan.job.tokens, positions) and fits(plan):
        return _current_answer("max_seq_length", plan, f"{plan.job.tokens:,} tokens per sequence", limit_name)
    if tokens == 0:
        return Answer("max_seq_length", f"not even {STEP} tokens per sequence fit {limit_name}")
    keys = {"max_seq_length": tokens} | memory_keys
    best = planner(changed_recipe(recipe, keys), device)
    options = [_option(f"{tokens:,} tokens", keys, best)]
    limit = _limit_without_checkpoints(plan)
    sentence = f"sequences of up to {tokens:,} tokens fit {limit_name}"
    if tokens == positions:
        longest = longest_tokens(plan.job, device, limit)
        if longest > positions:
            sentence = f"{longest:,} tokens per sequence fit in memory; the model has {positions:,} positions"
    safe = min(longest_tokens(plan.job, device, limit, slack=True), positions)
    if 0 < safe < tokens:
        keys_of_safe = {"max_seq_length": safe} | memory_keys
        options.append(
            _option(f"{safe:,} tokens", keys_of_safe, planner(changed_recipe(recipe, keys_of_safe), device))
        )
        sentence += f"; {_with_slack(f'{safe:,} tokens')}"
    return Answer("max_seq_length", sentence, keys, best, tuple(options))


def find_longest(plan: Plan, planner: Planner) -> int:
    """Returns the largest multiple of `STEP` tokens, or the model's positions, whose plan fits; 0 if there is none."""
    recipe, device, memory_keys = plan.recipe, plan.device, _auto_memory_keys(plan.recipe)

    def planned(tokens: int) -> Plan:
        return planner(changed_recipe(recipe, {"max_seq_length": tokens} | memory_keys), device)

    guess = longest_tokens(plan.job, device, _limit_without_checkpoints(plan))
    return _largest_planned(guess, planned, plan.shape.max_positions, STEP)


def solve_batch_size(plan: Plan, planner: Planner) -> Answer:
    """Finds the largest per-device batch that fits and divides the recipe's global batch, so that the number of tokens
    per optimizer step is unchanged; with `optim_in_backward`, which excludes accumulation, the largest up to it."""
    recipe, device = plan.recipe, plan.device
    limit_name = limit_of(recipe, device)[1]
    total = plan.job.batch * plan.job.accumulation
    memory_keys = _auto_memory_keys(recipe)

    def planned(batch: int, accumulation: int = 1) -> Plan:
        return planner(changed_recipe(recipe, _batch_keys(batch, accumulation) | memory_keys), device)

    job = plan.job.changed(accumulation=1)
    largest = _largest_planned(largest_batch(plan, job), planned, LARGEST_BATCH)
    if largest < total and not recipe.optim_in_backward:
        # Accumulating gradients needs more memory than a single microbatch per step.
        job = job.changed(accumulation=2)
        guess = largest_batch(plan, job)
        largest = _largest_planned(guess, lambda batch: planned(batch, -(-total // batch)), total - 1)
    if largest < plan.job.batch and fits(plan):
        return _current_answer("batch_size", plan, f"{plan.job.batch:,} sequences per microbatch", limit_name)
    if largest == 0:
        return Answer("batch_size", f"not even one sequence of {plan.job.tokens} tokens fits {limit_name}")
    batch = min(largest, total)
    if not recipe.optim_in_backward:
        batch = max(count for count in range(1, batch + 1) if total % count == 0)
    accumulation = max(total // batch, 1) if not recipe.optim_in_backward else 1
    keys = _batch_keys(batch, accumulation) | memory_keys
    best = planned(batch, accumulation)
    sentence = f"up to {largest:,} sequences per microbatch fit {limit_name}"
    if 0 < (safe := largest_batch(plan, job, slack=True)) < largest:
        sentence += f" ({_with_slack(str(safe))})"
    if batch * accumulation != total:
        sentence += f"; optim_in_backward updates after each microbatch, so the global batch becomes {batch}"
    elif batch < largest:
        sentence += f"; {batch} keeps the global batch at {total}"
    options = [_option(f"{batch} per device", keys, best)]
    if largest > batch:
        accumulation = 1 if largest >= total else -(-total // largest)
        keys_of_largest = _batch_keys(largest, accumulation) | memory_keys
        options.append(_option(f"{largest:,} per device", keys_of_largest, planned(largest, accumulation)))
    return Answer("batch_size", sentence, keys, best, tuple(options))


def _with_slack(what: str) -> str:
    return f"{what} leave {memory_search.SLACK:.0%} of the memory for activations and gradients free"


def _largest_planned(guess: int, planned: Callable[[int], Plan], maximum: int, step: int = 1) -> int:
    """Returns the largest count whose plan fits in every phase: a multiple of `step`, or `maximum`; 0 if none fits.

    The plans of two counts decide if the guess is the answer; otherwise the search gallops away from it and bisects.
    """
    top = -(-maximum // step)
    low, high = 0, top + 1  # positions are counts divided by the step; `low` fits and `high` does not
    position, stride = min(max(-(-guess // step), 1), top), 1
    while high - low > 1:
        if fits(planned(min(position * step, maximum))):
            low = position
        else:
            high = position
        if low and high <= top:
            following = (low + high) // 2
        else:
            following = low + stride if low else high - stride
            stride *= 2
        position = min(max(following, low + 1), high - 1)
    return min(low * step, maximum)


def _current_answer(question: str, plan: Plan, what: str, limit_name: str) -> Answer:
    """The recipe as it is: it fits, and the next candidate of the search does not."""
    sentence = f"the recipe's {what} just fit {limit_name}; no larger candidate does"
    return Answer(question, sentence, {}, plan, (_option(what, {}, plan),))


def solve_fastest(plan: Plan, planner: Planner, progress: Progress | None = None) -> Answer:
    """Finds the per-device batch with the most tokens per second for the same global batch, with `auto` memory keys."""
    recipe, device = plan.recipe, plan.device
    _require_rates(plan)
    limit_name = limit_of(recipe, device)[1]
    total = plan.job.batch * plan.job.accumulation
    largest = max(largest_batch(plan, plan.job.changed(accumulation=count)) for count in (1, 2))
    batches = [item for item in range(min(largest, total), 0, -1) if total % item == 0][:MAX_BATCHES]
    if recipe.optim_in_backward:  # no accumulation: only this microbatch keeps the global batch
        batches = [total] if largest else []
    options = []
    for done, batch in enumerate(batches):
        _report(progress, f"{batch} sequences per microbatch", done, len(batches))
        keys = _batch_keys(batch, total // batch) | _auto_memory_keys(recipe)
        candidate = planner(changed_recipe(recipe, keys), device)
        if fits(candidate):
            options.append(_option(f"{batch} × {total // batch}", keys, candidate))
    if not options:
        return Answer("fastest", f"no setting fits {limit_name}")
    options.sort(key=lambda item: -(item.tokens_per_second or 0.0))
    best = options[0]
    current = plan.time.tokens_per_second
    sentence = f"{format_rate(best.tokens_per_second or 0.0)} tokens per second"
    if current is not None and fits(plan):
        sentence += f"; the current recipe reaches {format_rate(current)}"
    return Answer("fastest", sentence, best.keys, best.plan, tuple(options))


def solve_smallest_gpu(
    plan: Plan, planner: Planner, gpus: Sequence[DeviceFacts], progress: Progress | None = None
) -> Answer:
    """Finds the GPU with the least memory that fits the job, and the next larger; of equal memory the fastest first."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.memory_bytes, -_speed(gpu)))
    options: list[Option] = []
    for option in _fitting_gpus(plan, planner, ordered, progress):
        options.append(option)
        if len(options) > NEXT_GPUS:
            break
    if not options:
        return Answer("smallest_gpu", "no GPU with a data sheet has enough memory for this job")
    best = options[0]
    memory = format_bytes(best.plan.device.memory_bytes)
    sentence = f"{best.name} ({memory}): the job needs {format_bytes(best.plan.needed, up=True)}"
    return Answer("smallest_gpu", sentence, {}, best.plan, tuple(options))


def solve_cheapest(
    plan: Plan,
    planner: Planner,
    prices: Iterable[tuple[DeviceFacts, float, str]],
    progress: Progress | None = None,
) -> Answer:
    """Finds the GPU with the lowest price per million tokens.

    Args:
        plan: the job, planned for any device.
        planner: plans the job for each GPU.
        prices: (GPU, dollars per hour, source of the price).
        progress: called for each GPU.
    """
    offers = list(prices)
    options = []
    for option in _fitting_gpus(plan, planner, [gpu for gpu, _, _ in offers], progress):
        per_hour, source = next((p, s) for gpu, p, s in offers if gpu == option.plan.device)
        if option.tokens_per_second:
            dollars = per_hour / 3600 / option.tokens_per_second * 1e6
            options.append(
                dataclasses.replace(
                    option, dollars_per_million_tokens=dollars, usd_per_hour=per_hour, price_source=source
                )
            )
    if not options:
        return Answer("cheapest", "the job fits no GPU with a known price and speed")
    options.sort(key=lambda option: option.dollars_per_million_tokens or 0.0)
    best = options[0]
    sentence = (
        f"{best.name}: ${best.dollars_per_million_tokens:.3g} per million tokens at ${best.usd_per_hour:.2f} per hour "
        f"(price: {best.price_source})"
    )
    return Answer("cheapest", sentence, {}, best.plan, tuple(options))


def largest_batch(plan: Plan, job: Job | None = None, *, slack: bool = False) -> int:
    """Returns the largest microbatch whose training steps fit with the lowest-memory setting; 0 if none does.

    Args:
        plan: the plan with the device and its limit.
        job: the training job; None for the plan's.
        slack: whether the memory that searches leave free for prediction errors stays free.
    """
    limit = _limit_without_checkpoints(plan)
    job = (job or plan.job).changed(dequantized_layers=0)
    budget = memory_search.usable_bytes(job, limit) if slack else limit
    return largest_fitting(
        lambda batch: _lowest_memory_job(job, batch, limit), plan.device, budget, LARGEST_BATCH
    )


def _limit_without_checkpoints(plan: Plan) -> int:
    """Bytes for training steps: the limit without what checkpoints need at the same time."""
    return limit_of(plan.recipe, plan.device)[0] - background_bytes(plan.job, plan.disk)


def _lowest_memory_job(job: Job, batch: int, limit: int) -> Job:
    memory = limit // MEMORY_DIVISOR if job.loss_impl == "triton" else job.loss_memory
    return job.changed(batch=batch, loss_memory=memory, policies=(), mlp_tiles=1)


def _fitting_gpus(
    plan: Plan, planner: Planner, gpus: Sequence[DeviceFacts], progress: Progress | None
) -> Iterator[Option]:
    """Yields the GPUs that fit the job and support its dtypes."""
    weight_bytes = plan.job.trained.weight_bytes if plan.job.weights_dtype == "bf16" else 0
    for done, gpu in enumerate(gpus):
        _report(progress, gpu.name, done, len(gpus))
        if gpu.memory_bytes < weight_bytes:
            continue
        try:
            candidate = planner(plan.recipe, gpu)
        except TrimtabError:
            continue
        if fits(candidate):
            yield _option(gpu_name(gpu), {}, candidate)


def gpu_name(gpu: DeviceFacts) -> str:
    """Returns the `--gpu` name of a device with a data sheet; the driver's name of others.

    Example:
        >>> gpu_name(DeviceFacts("a GPU", "cuda", 24 * 10**9))
        'a GPU'
    """
    return gpu.name if gpu.sheet is None else gpu.sheet.id


def _batch_keys(batch: int, accumulation: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


def _auto_memory_keys(recipe: Recipe) -> dict[str, Any]:
    """Sets memory keys with explicit values in the recipe to `auto`, because the search chose new values."""
    keys: dict[str, Any] = {}
    if recipe.recompute != "auto" or recipe.gradient_checkpointing is not None:
        keys["recompute"] = "auto"
    for key in ("mlp_tiles", "dequantized_layers"):
        if getattr(recipe, key) != "auto":
            keys[key] = "auto"
    return keys


def _option(name: str, keys: dict[str, Any], plan: Plan) -> Option:
    return Option(name, keys, plan, plan.time.tokens_per_second)


def _speed(gpu: DeviceFacts) -> float:
    ceiling = gpu.ceiling("bf16") or gpu.ceiling("fp16") or gpu.ceiling("fp32")
    return ceiling[0] if ceiling is not None else 0.0


def _require_rates(plan: Plan) -> None:
    if plan.time.tokens_per_second is None:
        raise ResourceError(
            f"the speed of {plan.device.name} is not known",
            "measure it with `trimtab plan --calibrate`, or select a GPU with a data sheet with --gpu",
        )


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def check_question(question: str) -> str:
    """Returns the question if it is one of `QUESTIONS`; raises a RecipeError with the list otherwise."""
    if question not in QUESTIONS:
        raise RecipeError(
            f"--solve {question} is not a known question", f"choose one of {', '.join(QUESTIONS)}"
        )
    return question
