"""Loads weights into an embedding and a head with additional rows, for added tokens."""

# V rows of the base, C hidden size

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trimtab.facts.shapes import ModelShape
from trimtab.model.decoder import Decoder


def load_with_new_tokens(decoder: Decoder, base: ModelShape, load: Callable[[], object]) -> None:
    """Calls `load` with the decoder temporarily in the shape `base`, with fewer tokens; then initializes the new rows.

    Each new row is the mean of the others, so that a new token's initial logit is the mean of the others' logits.

    Example:
        >>> base = read_shape("my-model")  # doctest: +SKIP
        >>> load_with_new_tokens(decoder, base, lambda: load_weights(decoder, "my-model"))  # doctest: +SKIP
    """
    if base.vocab_size == decoder.shape.vocab_size:
        load()
        return
    with _without_new_rows(decoder, base):
        load()
    with torch.no_grad():
        for module in _tables(decoder):
            weight = module._parameters["weight"]
            assert weight is not None
            weight[base.vocab_size :] = (
                weight[: base.vocab_size].mean(0, dtype=torch.float32).to(weight.dtype)
            )


@contextmanager
def _without_new_rows(decoder: Decoder, base: ModelShape) -> Iterator[None]:
    """Temporarily replaces embedding and head by views of their first rows."""
    shape, whole = decoder.shape, {module: module._parameters["weight"] for module in _tables(decoder)}
    try:
        decoder.shape = base
        for module, weight in whole.items():
            assert weight is not None
            module._parameters["weight"] = nn.Parameter(weight.data[: base.vocab_size], requires_grad=False)
        yield
    finally:
        decoder.shape = shape
        for module, weight in whole.items():
            module._parameters["weight"] = weight


def _tables(decoder: Decoder) -> list[nn.Module]:
    return [module for module in (decoder.model.embed_tokens, decoder.lm_head) if module is not None]
