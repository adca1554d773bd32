"""Fixtures of the cases: a tiny model, shared runs and adapters, and a temporary folder per case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cases import World
from huggingface_hub import constants
from shared import MAKERS
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("shared")

    def made(name: str) -> Path:
        if not (place / name).exists():
            MAKERS[name](place / name, made)
        return place / name

    write_tiny_model(place / "model")
    return made


@pytest.fixture
def world(
    tmp_path: Path, shared_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as closing:
        yield World(tmp_path, shared_folder("model"), shared_folder, monkeypatch, closing)
