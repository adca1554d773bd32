"""Resolves names of models and datasets: a hub id to a folder pinned to a commit, a local path to itself. No torch.

from trimtab import hub

model = hub.resolve_model("HuggingFaceTB/SmolLM2-135M")
model.path, model.commit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.hub.datasets import resolve_dataset
    from trimtab.hub.local_files import LocalFiles
    from trimtab.hub.models import resolve_model

_MODULES = {"LocalFiles": "local_files", "resolve_dataset": "datasets", "resolve_model": "models"}

__all__ = ["LocalFiles", "resolve_dataset", "resolve_model"]

__getattr__ = lazy_attributes(__name__, _MODULES)
