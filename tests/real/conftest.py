"""What all tests of the real model begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from smollm2 import smollm2_path


@pytest.fixture(scope="session")
def path() -> Path:
    """SmolLM2-135M-Instruct's GGUF file."""
    return smollm2_path()
