"""A tokenizer with more tokens than it came with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tokenizers

from trimtab.facts.errors import RecipeError
from trimtab.text.tokenizer import Tokenizer


def with_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer with these tokens at the end of its vocabulary; text that spells one becomes its id.

    Raises:
        RecipeError: an empty token, one given twice, or one that the tokenizer has already.

    Example:
        >>> grown = with_tokens(tokenizer, ["<|tool|>"])           # doctest: +SKIP
        >>> grown.vocab_size - tokenizer.vocab_size                # doctest: +SKIP
        1
    """
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    for token in tokens:
        if not token.strip():
            raise RecipeError("model.added_tokens holds an empty token", "leave it out")
        if token in known:
            raise RecipeError(f"model.added_tokens: the tokenizer has {token!r} already", "leave it out")
    if len(set(tokens)) != len(tokens):
        raise RecipeError("model.added_tokens names a token twice", "give each once")
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    # Found in text as they are written: a normalizer would not find a token in capitals.
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return dataclasses.replace(tokenizer, backend=backend)
