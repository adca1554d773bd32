"""Tokens that an adapter brings along: its tokenizer beside the model's, and beside the one that a recipe asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trimtab import text
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.recipe import Recipe
from trimtab.run.locate import tokenizer_of
from trimtab.text import Tokenizer


def tokenizer_beside(adapter: Path) -> Tokenizer | None:
    """The tokenizer in an adapter's folder; None where it has none."""
    return text.load(adapter) if (adapter / "tokenizer.json").is_file() else None


def unknown_tokens(own: Tokenizer, other: Tokenizer) -> list[str]:
    """Tokens that the other tokenizer has not, or under another id, in the order of their ids."""
    ids = own.backend.get_vocab(with_added_tokens=True)
    known = other.backend.get_vocab(with_added_tokens=True)
    return sorted((token for token, id in ids.items() if known.get(token) != id), key=ids.__getitem__)


def with_its_tokens(shape: ModelShape, model: Path, adapter: Path) -> tuple[ModelShape, Path]:
    """(shape, where the tokenizer is) of a model that an adapter will be put on.

    An adapter with tokens or a chat template of its own brings its tokenizer, and an embedding with rows for them.
    """
    own = tokenizer_beside(adapter)
    if own is None or not _is_other(own, model):
        return shape, model
    return dataclasses.replace(shape, vocab_size=max(shape.vocab_size, own.vocab_size)), adapter


def _is_other(own: Tokenizer, model: Path) -> bool:
    try:
        models = text.load(model)
    except ModelError:  # it has none
        return True
    return own.chat_template not in (None, models.chat_template) or bool(unknown_tokens(own, models))


def check_known(adapter: Path, tokenizer: Tokenizer) -> None:
    """RecipeError for an adapter with tokens that an opened model's tokenizer does not know."""
    own = tokenizer_beside(adapter)
    tokens = unknown_tokens(own, tokenizer) if own is not None else []
    if tokens:
        raise RecipeError(
            f"the adapter {adapter} has tokens of its own, which this model does not know: {_some(tokens)}",
            "load it together with the model: trimtab.load(…, adapter=…)",
        )


def check_same_tokens(recipe: Recipe, model: Path) -> None:
    """RecipeError where a recipe goes on with an adapter and its tokenizer would give the tokens other ids."""
    if recipe.lora is None or recipe.lora.adapter is None:
        return
    own = tokenizer_beside(Path(recipe.lora.adapter))
    if own is None:
        return
    tokens = unknown_tokens(own, tokenizer_of(recipe, model, None)[0])
    if not tokens:
        return
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"added_tokens": []})})
    added = unknown_tokens(own, tokenizer_of(plain, model, None)[0])
    raise RecipeError(
        f"lora.adapter: {recipe.lora.adapter} was trained with tokens that this recipe has not, or in another order: "
        + _some(tokens),
        f"set model.added_tokens: [{', '.join(map(repr, added))}]"
        if len(added) <= _MANY
        else "name the tokenizer that it was trained with as model.tokenizer",
    )


_MANY = 100
"""Tokens beyond which two tokenizers are others, not one with some more."""


def _some(tokens: list[str]) -> str:
    shown = ", ".join(map(repr, tokens[:3]))
    return shown if len(tokens) <= 3 else f"{shown} and {len(tokens) - 3} more"
