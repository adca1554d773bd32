"""How a run's weights are updated: its optimizer, as the recipe has it."""

from __future__ import annotations

from typing import Any

import torch

from trimtab import optim
from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.facts.errors import RecipeError
from trimtab.parallel import Mesh
from trimtab.recipe import Recipe
from trimtab.run.choices import Choices


def make_optimizer(recipe: Recipe, choices: Choices, parameters: dict[str, torch.nn.Parameter]) -> Any:
    """Over what is trained, by name."""
    return optim.build(
        recipe.optim,
        parameters.items(),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
        decay_all=recipe.decay_all,
        seed=recipe.seed,
        impl=choices.optimizer.get("impl", "reference"),
        lr_scales=_rates(recipe, parameters),
    )


def _rates(recipe: Recipe, parameters: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    """Embeddings and head, where the recipe gives them a learning rate of their own, as shares of the others'."""
    own = recipe.embedding_learning_rate
    if own is None:
        return {}
    return {
        name: own / recipe.learning_rate
        for name in parameters
        if name.startswith((f"{EMBEDDING}.", f"{HEAD}."))
    }


def make_in_backward(recipe: Recipe, choices: Choices, optimizer: Any, mesh: Mesh) -> Any:
    """Updates inside the backward pass, where the recipe asks for them; None elsewhere."""
    if not recipe.optim_in_backward:
        return None
    if mesh.size > 1 or choices.dtype == "fp16":
        raise RecipeError(
            "optim_in_backward: true works in one process and without loss scaling: every process's gradients have "
            "to be added up before they are used",
            "set optim_in_backward: false",
        )
    return optim.InBackward(optimizer)
