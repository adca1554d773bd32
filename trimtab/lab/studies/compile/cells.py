"""Validates the options of the compile study and returns its cells. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.lab.choices import check_counts, choose_members
from trimtab.lab.studies.compile.settings import Backend, Method, Scope, Shapes
from trimtab.lab.study import FRESH, Cell
from trimtab.lab.study_models import is_study_model, model_settings, named_shape

STUDY = "compile"
SIZES = ("small",)
LENGTHS = (256, 192, 320, 128)
"""In this order: the first one is timed, the others show which changes of length recompile."""
BATCH = 1
PRECISIONS = {"cpu": "fp32", "cuda": "bf16"}
STEPS = 5


def cells(
    *,
    device: str,
    sizes: Sequence[str] = (),
    methods: Sequence[str] = (),
    scopes: Sequence[str] = (),
    shapes: Sequence[str] = (),
    lengths: Sequence[int] = (),
    batch: int = BATCH,
    precision: str | None = None,
    backend: str = Backend.INDUCTOR.value,
    steps: int = STEPS,
) -> list[Cell]:
    """One cell for each combination, each measured in a new process.

    Args:
        device: cpu, cuda or cuda:N.
        sizes: study models, recipes, or any model that `trimtab plan` accepts; `small` by default.
        methods: full, qlora; both by default. A recipe uses its own method.
        scopes: regions (each block, like `torch_compile: true`), whole; both by default.
        shapes: dynamic, static, auto (torch's default, only for the whole model); by default dynamic and static for
            regions, auto for the whole model.
        lengths: sequence lengths in the order in which they run; the first one is timed.
        batch: sequences per step.
        precision: fp32, bf16 or fp16; by default fp32 on a CPU, bf16 on a GPU, and for a recipe its own dtype.
        backend: inductor, or aot_eager and eager, which only trace.
        steps: timed steps.

    Raises:
        RecipeError: an unknown word, with the nearest one; a number too small; a length beyond the model's positions.

    Example:
        >>> found = cells(device="cpu", sizes=["tiny"], methods=["qlora"])
        >>> [(cell.settings["scope"], cell.settings["shapes"]) for cell in found]
        [('regions', 'dynamic'), ('regions', 'static'), ('whole', 'auto')]
    """
    check_counts([batch], "--batch")
    check_counts([steps], "--steps")
    tokens = check_counts(lengths or LENGTHS, "--contexts", least=2)
    kind = device.split(":")[0]
    (chosen_backend,) = choose_members(Backend, [backend], "--backend")
    chosen_methods = choose_members(Method, methods or ("full", "qlora"), "--methods")
    chosen_scopes = choose_members(Scope, scopes or ("regions", "whole"), "--scopes")
    cells = []
    for name in dict.fromkeys(sizes or SIZES):
        _check_lengths(name, tokens)
        method_names = [method.value for method in chosen_methods] if is_study_model(name) else [None]
        for method, scope in itertools.product(method_names, chosen_scopes):
            for shape in _shapes(scope, shapes):
                settings: dict[str, Any] = {
                    **_model(name),
                    "method": method,
                    "scope": scope.value,
                    "shapes": shape.value,
                    "lengths": tokens,
                    "batch": batch,
                    "precision": _precision(name, precision, kind),
                    "backend": chosen_backend.value,
                    "steps": steps,
                    "device": kind,
                    FRESH: True,
                }
                cells.append(Cell(STUDY, settings))
    if not cells:
        raise RecipeError(
            "--shapes auto works only for the whole model", "use --shapes dynamic or --scopes whole"
        )
    return cells


def _check_lengths(name: str, tokens: Sequence[int]) -> None:
    most = named_shape(name).max_positions
    if max(tokens) > most:
        raise RecipeError(
            f"--contexts {max(tokens)} is longer than the {most} positions of {name}", f"use at most {most}"
        )


def _shapes(scope: Scope, words: Sequence[str]) -> list[Shapes]:
    chosen = choose_members(Shapes, words, "--shapes")
    if not chosen:
        chosen = [Shapes.DYNAMIC, Shapes.STATIC] if scope is Scope.REGIONS else [Shapes.AUTO]
    return [shape for shape in chosen if shape is not Shapes.AUTO or scope is Scope.WHOLE]


def _model(name: str) -> dict[str, str]:
    """Identifies a model; for a file by a checksum too, since a recipe contains more than its model's shape."""
    identity = model_settings(name)
    path = Path(name).expanduser()
    if path.is_file():
        identity["checksum"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return identity


def _precision(name: str, requested: str | None, device: str) -> str | None:
    """The precision of a study model; None for a recipe's own dtype."""
    if requested is None:
        return PRECISIONS[device] if is_study_model(name) else None
    known = ("fp32", "bf16", "fp16")
    if requested not in known:
        raise RecipeError(f"--precision {requested!r} is unknown", f"choose from {', '.join(known)}")
    return requested
