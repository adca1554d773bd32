"""Recipes: schema, loading, overrides, resume rules. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.recipe.docs import schema
    from trimtab.recipe.keys import Recipe
    from trimtab.recipe.loading import build, dump, load, loads, to_dict
    from trimtab.recipe.resume import CHANGEABLE_ON_RESUME, check_resume

__all__ = [
    "CHANGEABLE_ON_RESUME",
    "Recipe",
    "build",
    "check_resume",
    "dump",
    "load",
    "loads",
    "schema",
    "to_dict",
]

_MODULES = {
    "Recipe": "keys",
    "build": "loading",
    "dump": "loading",
    "load": "loading",
    "loads": "loading",
    "to_dict": "loading",
    "CHANGEABLE_ON_RESUME": "resume",
    "check_resume": "resume",
    "schema": "docs",
}

__getattr__ = lazy_attributes(__name__, _MODULES)
