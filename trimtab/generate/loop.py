"""The generation loop, for one prompt or a batch.

Prompts of different lengths share a batch by left padding: all rows end at the same column, each row has its own
positions, and no token attends to padding. One prefill pass (in chunks, if the batch is large) fills the KV cache
with all prompts, then each decoding pass adds one token per row. A row's result does not depend on the other
rows, except that matrix products of other shapes may round differently. Prompts are sorted by length so that
batches need little padding. Legend: B rows, T tokens of a pass, C hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from trimtab.facts.arguments import check_int
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.generate.cache import KVCache, PromptCache, WeightState
from trimtab.generate.completion import Completion, GenerationState
from trimtab.generate.options import SamplingOptions
from trimtab.generate.sampling import sample_tokens
from trimtab.generate.threads import limit_threads
from trimtab.kernels.attention import Layout
from trimtab.model.decoder import Decoder
from trimtab.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
DEFAULT_NEW_TOKENS = 128
DEFAULT_OPTIONS = SamplingOptions()
_SPREAD = 64
"""Prompts may share a batch if their lengths differ by at most this many tokens, whatever the share of padding."""
_PREFILL_TOKENS = 8192
"""Tokens per prefill pass, padding included; bounds the memory of activations and attention mask."""


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: Prompt,
    options: SamplingOptions = DEFAULT_OPTIONS,
    *,
    index: int = 0,
    stream: Callable[[str], None] | None = None,
    cache: PromptCache | None = None,
) -> Completion:
    """Continue one prompt.

    Args:
        decoder: the model, on any device.
        tokenizer: its tokenizer; its stop ids end the generation.
        prompt: a text (the tokenizer's special tokens are added), or token ids used unchanged.
        options: length, sampling and stop strings; greedy decoding by default.
        index: number of the prompt; together with the seed it determines the samples.
        stream: called with each piece of final text; the pieces concatenate to the result's text.
        cache: prefix cache for several calls; a prompt that begins like the last one (the next message of a
            conversation) is prefilled only from where they differ.

    Example:
        >>> generate(decoder, tokenizer, "2 + 2 =", SamplingOptions(max_new_tokens=4)).text  # doctest: +SKIP
        ' 4'
    """
    states = _prepare_states(decoder, tokenizer, [prompt], options, stream, index)
    return _complete(decoder, states, options, batch_size=1, prompt_cache=cache)[0]


def generate_many(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    options: SamplingOptions = DEFAULT_OPTIONS,
    *,
    first_index: int = 0,
    batch_size: int = 64,
) -> list[Completion]:
    """Continue many prompts in batches, much faster than one `generate` call per prompt; results keep the order.

    The samples of a prompt depend on the seed and on its number (counted from `first_index`), not on the batch size
    or the other prompts.

    Example:
        >>> [c.text for c in generate_many(decoder, tokenizer, ["1 + 1 =", "2 + 3 ="])]    # doctest: +SKIP
        [' 2', ' 5']
    """
    if isinstance(prompts, str):
        raise RecipeError("prompts is a single string", "pass a list of strings, or call generate")
    batch_size = check_int(batch_size, "batch_size", least=1)
    first_index = check_int(first_index, "first_index")
    states = _prepare_states(decoder, tokenizer, prompts, options, None, first_index)
    return _complete(decoder, states, options, batch_size=batch_size)


def check_prompt(
    decoder: Decoder, ids: Sequence[int], max_new_tokens: int | None, name: str = "the prompt"
) -> int:
    """Return how many tokens may follow a prompt; ModelError for too long a prompt or unknown token ids."""
    shape = decoder.shape
    unknown = next((token_id for token_id in ids if not 0 <= token_id < shape.vocab_size), None)
    if unknown is not None:
        raise ModelError(
            f"{name} has the token id {unknown}, and the model's vocabulary has {shape.vocab_size} tokens",
            "use the tokenizer that belongs to the model",
        )
    room = shape.max_positions - len(ids)
    if room < (max_new_tokens or 1):
        raise ModelError(
            f"{name} has {len(ids)} tokens, which with {max_new_tokens or 1} new ones "
            f"exceed the model's {shape.max_positions} positions",
            "shorten the prompt or lower max_new_tokens",
        )
    return max_new_tokens or min(DEFAULT_NEW_TOKENS, room)


def _prepare_states(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    stream: Callable[[str], None] | None,
    first_index: int,
) -> list[GenerationState]:
    """Tokenize and validate every prompt before generation begins."""
    stop = tuple(options.stop or ())
    states = []
    for index, prompt in enumerate(prompts, first_index):
        ids = prompt_ids(tokenizer, prompt)
        name = "the prompt" if len(prompts) == 1 else f"prompt {index + 1}"
        count = check_prompt(decoder, ids, options.max_new_tokens, name)
        states.append(GenerationState(index, ids, count, tokenizer, stop, stream))
    return states


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; an empty prompt becomes the BOS token, or a ModelError if the tokenizer has none."""
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise ModelError(
            "the prompt is empty and the tokenizer has no BOS token",
            "give a prompt of at least one word",
        )
    return [tokenizer.bos_id]


def _complete(
    decoder: Decoder,
    states: list[GenerationState],
    options: SamplingOptions,
    *,
    batch_size: int,
    prompt_cache: PromptCache | None = None,
) -> list[Completion]:
    start = time.perf_counter()
    was_training = decoder.training
    decoder.eval()
    try:
        for rows in _batches(states, batch_size):
            _run_batch(decoder, rows, options, prompt_cache)
    finally:
        decoder.train(was_training)
    seconds = max(time.perf_counter() - start, 1e-9)
    rate = sum(len(w.ids) for w in states) / seconds
    done = []
    for w in states:
        assert w.finish_reason is not None
        done.append(Completion(w.text, w.ids, w.finish_reason, rate))
    return done


def _batches(states: list[GenerationState], batch_size: int) -> Iterator[list[GenerationState]]:
    """Batches of similar lengths: at most half of a batch is padding, unless the lengths differ by little."""
    batch: list[GenerationState] = []
    total = 0
    for state in sorted(states, key=lambda w: len(w.prompt)):
        length = len(state.prompt)
        padded = batch and length - len(batch[0].prompt) > _SPREAD
        if len(batch) == batch_size or (padded and length * (len(batch) + 1) > 2 * (total + length)):
            yield batch
            batch, total = [], 0
        batch.append(state)
        total += length
    if batch:
        yield batch


@torch.no_grad()
def _run_batch(
    decoder: Decoder, rows: list[GenerationState], options: SamplingOptions, prompt_cache: PromptCache | None
) -> None:
    parameters = decoder.shape.num_parameters
    windows = [block.mixer.window for block in decoder.shape.blocks]
    longest = max(len(row.prompt) for row in rows)
    padding = [longest - len(row.prompt) for row in rows]
    next_BT = [[0] * count + row.prompt for count, row in zip(padding, rows, strict=True)]
    if prompt_cache is None:
        cache = KVCache(len(windows), windows=windows)
    else:
        assert len(rows) == 1, "a prompt cache serves one prompt at a time"
        cache = prompt_cache.begin(
            len(windows), rows[0].prompt, windows=windows, weights=WeightState(decoder)
        )
        next_BT = [next_BT[0][cache.length :]]
    while True:
        if prompt_cache is not None:
            prompt_cache.ids += next_BT[0]
        logits_BV = _last_logits(decoder, next_BT, padding, cache, parameters)
        drawn = sample_tokens(logits_BV, options, [(row.index, len(row.ids)) for row in rows]).tolist()
        if not bool(torch.isfinite(logits_BV.amax(dim=-1)).all()):
            raise ModelError(
                "the model's logits are not finite", "get the weights again, or load the model in fp32"
            )
        for row, token_id in zip(rows, drawn, strict=True):
            if row.finish_reason is None:
                row.push(token_id)
        next_BT = [[token_id] for token_id in drawn]
        live = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if not live:
            return
        if 2 * len(live) <= len(rows):
            # Finished rows remain in the batch until half are done: dropping rows copies the cache.
            rows, next_BT = [rows[i] for i in live], [next_BT[i] for i in live]
            unused = min(padding[i] for i in live)
            cache.select(live, start=unused)
            padding = [padding[i] - unused for i in live]


def _last_logits(
    decoder: Decoder, ids_BT: list[list[int]], padding: list[int], cache: KVCache, parameters: int
) -> torch.Tensor:
    """Run the model on new tokens, in chunks if there are many; returns logits_BV of the last token."""
    device = decoder.head_weight.device
    B, T = len(ids_BT), len(ids_BT[0])
    chunk = T if B == 1 else max(1, _PREFILL_TOKENS // B)
    for begin in range(0, T, chunk):
        part_BT = torch.tensor([ids[begin : begin + chunk] for ids in ids_BT])
        start, end = cache.length, cache.length + part_BT.shape[1]
        positions_BT = layout = None
        if any(padding):
            places_BT = torch.arange(start, end) - torch.tensor(padding)[:, None]
            positions_BT, layout = places_BT.clamp(min=0).to(device), Layout.left_padded(padding, end)
        with limit_threads(parameters, part_BT.numel(), device):
            hidden_BTC = decoder(part_BT.to(device), positions_BT, layout, cache)
    with limit_threads(parameters, B, device):
        return decoder.logits(hidden_BTC[:, -1:])[:, 0]
