"""Counts the parameters of one model; runs in the calling process and imports no torch."""

from __future__ import annotations

from typing import Any

from trimtab.lab.studies.sizes.counts import count_model
from trimtab.lab.study_models import named_shape


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Counts the parameters of a model by part, exactly and by the formula."""
    return count_model(named_shape(settings["size"])).to_dict()
