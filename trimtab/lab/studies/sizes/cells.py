"""The cells of the sizes study."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.study import Cell
from trimtab.lab.study_models import STUDY_MODELS, model_settings


def cells(sizes: Sequence[str] = ()) -> list[Cell]:
    """One cell per model; all study models by default.

    Args:
        sizes: study models by name, recipes, or any model that `trimtab plan` accepts.

    Example:
        >>> [cell.settings["size"] for cell in cells(["small", "Qwen/Qwen3-0.6B"])]
        ['small', 'Qwen/Qwen3-0.6B']
    """
    return [Cell("sizes", model_settings(name)) for name in dict.fromkeys(sizes or STUDY_MODELS)]
