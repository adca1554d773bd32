"""Adding tokens to a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tokenizers

from trimtab.facts.errors import RecipeError
from trimtab.text.tokenizer import Tokenizer


def with_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with these tokens appended to its vocabulary; they are matched in text.

    Raises:
        RecipeError: an empty or duplicate token, or one that the tokenizer already has.

    Example:
        >>> grown = with_tokens(tokenizer, ["<|tool|>"])           # doctest: +SKIP
        >>> grown.vocab_size - tokenizer.vocab_size                # doctest: +SKIP
        1
    """
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    for token in tokens:
        if not token.strip():
            raise RecipeError("model.added_tokens contains an empty token", "leave it out")
        if token in known:
            raise RecipeError(f"model.added_tokens: the tokenizer has {token!r} already", "leave it out")
    if len(set(tokens)) != len(tokens):
        raise RecipeError("model.added_tokens names a token twice", "give each once")
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    # Matched in the unnormalized text: a lowercasing normalizer would hide tokens with capitals.
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return dataclasses.replace(tokenizer, backend=backend)
