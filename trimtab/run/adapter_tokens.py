"""Added tokens of an adapter: compares its tokenizer with the model's and with the recipe's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trimtab import text
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.recipe import Recipe
from trimtab.run.locate import tokenizer_of
from trimtab.text import Tokenizer


def adapter_tokenizer(adapter: Path) -> Tokenizer | None:
    """The tokenizer in an adapter's folder; None if there is none."""
    return text.load(adapter) if (adapter / "tokenizer.json").is_file() else None


def unknown_tokens(own: Tokenizer, other: Tokenizer) -> list[str]:
    """Tokens that the other tokenizer lacks or has under another id, in the order of their ids."""
    ids = own.backend.get_vocab(with_added_tokens=True)
    known = other.backend.get_vocab(with_added_tokens=True)
    return sorted((token for token, id in ids.items() if known.get(token) != id), key=ids.__getitem__)


def with_adapter_tokens(shape: ModelShape, model: Path, adapter: Path) -> tuple[ModelShape, Path]:
    """(shape, folder of the tokenizer) of a model that an adapter will be loaded into.

    An adapter with added tokens or another chat template has its own tokenizer, and embedding rows for the tokens.
    """
    own = adapter_tokenizer(adapter)
    if own is None or not _differs(own, model):
        return shape, model
    return dataclasses.replace(shape, vocab_size=max(shape.vocab_size, own.vocab_size)), adapter


def _differs(own: Tokenizer, model: Path) -> bool:
    try:
        models = text.load(model)
    except ModelError:  # the model has no tokenizer
        return True
    return own.chat_template not in (None, models.chat_template) or bool(unknown_tokens(own, models))


def check_known(adapter: Path, tokenizer: Tokenizer) -> None:
    """Raises RecipeError for an adapter with tokens that an opened model's tokenizer lacks."""
    own = adapter_tokenizer(adapter)
    tokens = unknown_tokens(own, tokenizer) if own is not None else []
    if tokens:
        raise RecipeError(
            f"the adapter {adapter} has added tokens that this model does not have: {_list_some(tokens)}",
            "load it together with the model: trimtab.load(…, adapter=…)",
        )


def check_same_tokens(recipe: Recipe, model: Path) -> None:
    """Raises RecipeError if a recipe starts from an adapter and lacks or renumbers the adapter's tokens."""
    if recipe.lora is None or recipe.lora.adapter is None:
        return
    own = adapter_tokenizer(Path(recipe.lora.adapter))
    if own is None:
        return
    tokens = unknown_tokens(own, tokenizer_of(recipe, model, None)[0])
    if not tokens:
        return
    plain = recipe.model_copy(update={"model": recipe.model.model_copy(update={"added_tokens": []})})
    added = unknown_tokens(own, tokenizer_of(plain, model, None)[0])
    raise RecipeError(
        f"lora.adapter: {recipe.lora.adapter} was trained with tokens that this recipe lacks or orders differently: "
        + _list_some(tokens),
        f"set model.added_tokens: [{', '.join(map(repr, added))}]"
        if len(added) <= _MANY
        else "set model.tokenizer to the tokenizer that it was trained with",
    )


_MANY = 100
"""If more tokens than this differ, the error names model.tokenizer instead of listing the tokens."""


def _list_some(tokens: list[str]) -> str:
    shown = ", ".join(map(repr, tokens[:3]))
    return shown if len(tokens) <= 3 else f"{shown} and {len(tokens) - 3} more"
