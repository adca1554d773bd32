"""The starter: a small base model, its text files and recipes, and the mathematics corpus. No torch.

    base_folder()                     the base model, a Hugging Face folder
    data_file("general")              held-out general text; data_file("replay") text it was trained on
    recipe_file("demo")               its recipes
    math_documents(seed, count)       the mathematics corpus; math_problems(seed, count) held-out problems
    math_chats(seed, count)           the same problems as conversations

Names are imported lazily (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.starter.files import base_folder, data_file, general_text, recipe_file
    from trimtab.starter.math import FIELDS, Problem, check, math_chats, math_documents, math_problems

_MODULES = {
    "FIELDS": "math",
    "Problem": "math",
    "base_folder": "files",
    "check": "math",
    "data_file": "files",
    "general_text": "files",
    "math_chats": "math",
    "math_documents": "math",
    "math_problems": "math",
    "recipe_file": "files",
}

__all__ = [
    "FIELDS",
    "Problem",
    "base_folder",
    "check",
    "data_file",
    "general_text",
    "math_chats",
    "math_documents",
    "math_problems",
    "recipe_file",
]

__getattr__ = lazy_attributes(__name__, _MODULES)
