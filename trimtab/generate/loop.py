"""The generating loop, for one prompt or many at once.

Prompts of different lengths share a batch without padding: all rows stand at the same position. As many
tokens as the shortest prompt has are read in one pass; then, token by token, a row whose prompt is longer is
given its own next token and the others the one they drew. Every row is what it would be alone. Prompts are
sorted so that rows of a batch have similar lengths. Legend: B rows, T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.generate.cache import KVCache
from trimtab.generate.completion import Completion, Writing
from trimtab.generate.sampling import Sampling
from trimtab.model.decoder import Decoder
from trimtab.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
DEFAULT_NEW_TOKENS = 256
_MAX_SPREAD = 64
"""Longest minus shortest prompt of a batch: each token of it costs a pass for few rows."""


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    seed: int = 0,
    stream: Callable[[str], None] | None = None,
) -> Completion:
    """Continue one prompt.

    Args:
        decoder: the model, on any device.
        tokenizer: its tokenizer; the model's stop ids end the text.
        prompt: a text (it gets the tokenizer's own beginning), or ids used as they are.
        max_new_tokens: at most; None for 256, or fewer where the model has no more positions.
        temperature, top_p, top_k, seed: see `Sampling`; temperature 0 always takes the likeliest token.
        stop: texts that end the generation; they are not part of the result.
        stream: called with each piece of text as it is certain; the pieces add up to the result's text.

    Example:
        >>> generate(decoder, tokenizer, "2 + 2 =", max_new_tokens=4).text     # doctest: +SKIP
        ' 4'
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    writings = _writings(decoder, tokenizer, [prompt], max_new_tokens, stop, stream)
    return _complete(decoder, writings, sampling, batch_size=1)[0]


def generate_many(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    seed: int = 0,
    batch_size: int = 64,
) -> list[Completion]:
    """Continue many prompts, in batches; `generate` for each, in their order, much faster.

    Example:
        >>> [c.text for c in generate_many(decoder, tokenizer, ["1 + 1 =", "2 + 3 ="])]    # doctest: +SKIP
        [' 2', ' 5']
    """
    if isinstance(prompts, str):
        raise RecipeError("prompts is one text", "give a list of texts, or call generate")
    if batch_size < 1:
        raise RecipeError(f"batch_size is {batch_size}", "give at least 1")
    sampling = Sampling(temperature, top_k, top_p, seed)
    writings = _writings(decoder, tokenizer, prompts, max_new_tokens, stop, None)
    return _complete(decoder, writings, sampling, batch_size=batch_size)


def _writings(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    max_new_tokens: int | None,
    stop: Sequence[str],
    stream: Callable[[str], None] | None,
) -> list[Writing]:
    """Check everything that can be checked before the first token."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RecipeError(f"max_new_tokens is {max_new_tokens}", "give at least 1")
    shape = decoder.shape
    writings = []
    for index, prompt in enumerate(prompts):
        ids = _prompt_ids(tokenizer, prompt)
        if max(ids) >= shape.vocab_size or min(ids) < 0:
            raise ModelError(
                f"the prompt holds the token {max(ids)}, the model has {shape.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        room = shape.max_positions - len(ids)
        if room < (max_new_tokens or 1):
            raise ModelError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens or 1} new ones "
                f"exceed the model's {shape.max_positions} positions",
                "shorten the prompt or lower max_new_tokens",
            )
        count = max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
        writings.append(Writing(index, ids, count, tokenizer, stop, stream))
    return writings


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
    if ids:
        return ids
    if tokenizer.bos_id is None:
        raise ModelError(
            "the prompt is empty and the tokenizer has no beginning token",
            "give a prompt of at least one word",
        )
    return [tokenizer.bos_id]


def _complete(
    decoder: Decoder, writings: list[Writing], sampling: Sampling, *, batch_size: int
) -> list[Completion]:
    start = time.perf_counter()
    was_training = decoder.training
    decoder.eval()
    try:
        for rows in _batches(writings, batch_size):
            _run_batch(decoder, rows, sampling)
    finally:
        decoder.train(was_training)
    seconds = max(time.perf_counter() - start, 1e-9)
    rate = sum(len(w.ids) for w in writings) / seconds
    done = []
    for w in writings:
        assert w.finish_reason is not None
        done.append(Completion(w.text, w.ids, w.finish_reason, rate))
    return done


def _batches(writings: list[Writing], batch_size: int) -> Iterator[list[Writing]]:
    batch: list[Writing] = []
    for writing in sorted(writings, key=lambda w: len(w.prompt)):
        if batch and (len(batch) == batch_size or len(writing.prompt) - len(batch[0].prompt) > _MAX_SPREAD):
            yield batch
            batch = []
        batch.append(writing)
    if batch:
        yield batch


@torch.no_grad()
def _run_batch(decoder: Decoder, rows: list[Writing], sampling: Sampling) -> None:
    device = decoder.head_weight.device
    cache = KVCache(decoder.shape.num_layers)
    length = min(len(row.prompt) for row in rows)
    next_BT = [row.prompt[:length] for row in rows]
    while True:
        hidden_BTC = decoder(torch.tensor(next_BT, device=device), cache=cache)
        logits_BV = decoder.logits(hidden_BTC[:, -1:])[:, 0]
        drawn = sampling.pick(logits_BV, [(row.index, len(row.ids)) for row in rows]).tolist()
        if not bool(torch.isfinite(logits_BV.amax(dim=-1)).all()):
            raise ModelError(
                "the model's output is not finite", "its weights are damaged or the dtype too narrow"
            )
        next_BT = []
        for row, token_id in zip(rows, drawn, strict=True):
            if length < len(row.prompt):
                token_id = row.prompt[length]
            elif row.finish_reason is None:
                row.push(token_id)
            next_BT.append([token_id])
        length += 1
        live = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if not live:
            return
        if 2 * len(live) <= len(rows):
            # Finished rows ride along until half are done: dropping them copies the cache.
            cache.select(live)
            rows, next_BT = [rows[i] for i in live], [next_BT[i] for i in live]
