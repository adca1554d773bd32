"""A hub on loopback for each test, and no token of the user who runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import LoopbackHub


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as server:
        yield server


@pytest.fixture(autouse=True)
def no_stored_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
