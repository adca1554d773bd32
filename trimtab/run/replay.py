"""Replayed text that belongs to one model: what the starter was pretrained on says nothing of another model's past."""

from __future__ import annotations

from pathlib import Path

from trimtab import text
from trimtab.facts.errors import RecipeError
from trimtab.recipe import Recipe
from trimtab.run.adapter_tokens import unknown_tokens
from trimtab.run.places import STARTER, tokenizer_of
from trimtab.starter import base_folder

REPLAY = "starter:replay"
"""Text of the kind that the starter was pretrained on."""


def check_replay(recipe: Recipe, model: Path) -> None:
    """RecipeError where `starter:replay` would be mixed into the training of another model than the starter.

    A model that came from the starter has its tokenizer, and keeps its replay.
    """
    replay = recipe.data.replay
    if replay is None or recipe.model.name == STARTER:
        return
    if all(source.source != REPLAY for source in replay.sources):
        return
    if not unknown_tokens(text.load(base_folder()), tokenizer_of(recipe, model, None)[0]):
        return
    raise RecipeError(
        f"data.replay mixes in {REPLAY}, which is text that the starter was pretrained on, and model.name is "
        f"{recipe.model.name}",
        "set data.replay=null to train without replay, or name general text of your own: "
        "data.replay.sources=[./general-text]",
    )
