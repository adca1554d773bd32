"""The target of `trimtab profile`: a planned recipe with local weights, or with random ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import HubError
from trimtab.plan import Plan
from trimtab.plan.resolved import CompileConfig, CudaGraphsConfig
from trimtab.recipe import Recipe
from trimtab.run.device import detect
from trimtab.run.locate import model_folder
from trimtab.run.prepare import Prepared, prepare, prepare_shape
from trimtab.run.target import known_shape, plan_shape

OFF = "off while profiling by operation"


@dataclass(frozen=True)
class ProfileTarget:
    """A planned recipe, ready to be built."""

    prepared: Prepared
    weights: Path
    """Folder or file of the weights; not used if they are random."""
    notes: tuple[str, ...]

    @property
    def is_eager(self) -> bool:
        """Whether the recipe runs without torch.compile and CUDA graphs."""
        resolved = self.prepared.resolved
        return not (resolved.compile.enabled or resolved.graphs.enabled)

    def eager(self) -> Prepared:
        """The same run without torch.compile and CUDA graphs, so that each operation is visible."""
        resolved = dataclasses.replace(
            self.prepared.resolved,
            compile=CompileConfig(reason=OFF),
            graphs=CudaGraphsConfig(reason=OFF),
        )
        return dataclasses.replace(self.prepared, resolved=resolved)

    def plan_for(self, recipe: Recipe, device: DeviceFacts) -> Plan:
        """The same model with another recipe."""
        return plan_shape(recipe, self.prepared.shape, device)


def find_target(recipe: Recipe) -> ProfileTarget:
    """Plans a recipe for its device as `trimtab train` does, and looks for local weights; it downloads none.

    Example:
        >>> find_target(recipe).notes                                                # doctest: +SKIP
        ('the weights of Qwen/Qwen3-0.6B are not on this machine: random ones of the same shape are used, which …',)
    """
    prepared = _prepared(recipe)
    recipe, notes = prepared.recipe, list(prepared.plan.notes)
    weights = None if recipe.model.init == "random" else local_weights(recipe)
    if weights is None and recipe.model.init != "random":
        notes.append(
            f"the weights of {recipe.model.name} are not on this machine: random ones of the same shape are used, "
            "which take the same time and memory"
        )
        model = recipe.model.model_copy(update={"init": "random"})
        prepared = dataclasses.replace(prepared, recipe=recipe.model_copy(update={"model": model}))
    return ProfileTarget(prepared, weights or Path(), tuple(notes))


def _prepared(recipe: Recipe) -> Prepared:
    """Plans from the catalogue if it has the model's shape, else from the model's files."""
    known = known_shape(recipe)
    if known is None:
        return prepare(recipe)
    return prepare_shape(recipe, known[0], detect(recipe.device))


def local_weights(recipe: Recipe) -> Path | None:
    """The folder or file with a model's weights, if it is on this machine; None if it would have to be downloaded."""
    try:
        return model_folder(recipe.model.name, revision=recipe.model.revision, offline=True)[0]
    except HubError:
        return None
