"""Resolves recipes; builds, starts, resumes and ends runs. The only package that imports all training packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.run.build import Run, build_model, build_run
    from trimtab.run.folder import RunFolder
    from trimtab.run.models import OpenedModel, open_model

_MODULES = {
    "OpenedModel": "models",
    "Run": "build",
    "RunFolder": "folder",
    "build_model": "build",
    "build_run": "build",
    "open_model": "models",
}

__all__ = ["OpenedModel", "Run", "RunFolder", "build_model", "build_run", "open_model"]

__getattr__ = lazy_attributes(__name__, _MODULES)
