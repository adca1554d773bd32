"""Where a model lies, by any name a person may give it. No torch: planning needs no more than this."""

from __future__ import annotations

from pathlib import Path

from trimtab import hub
from trimtab.starter import base_folder

STARTER = "starter"
"""The name of the model that ships with trimtab."""


def model_folder(name: str, *, revision: str | None = None, weights: bool = True) -> tuple[Path, str | None]:
    """(local folder or GGUF file, commit) of a model by any name but a run folder's.

    Without `weights` only config and tokenizer of a hub id are fetched: enough to plan.
    """
    if name == STARTER:
        return base_folder(), None
    resolved = hub.resolve_model(name, revision=revision, weights=weights)
    return resolved.path, resolved.commit
