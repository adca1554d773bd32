"""Shared fixtures; blocks network access and skips GPU tests without a GPU."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from trimtab.adapt.compiling import use_cache_folder

torch.set_num_threads(1)
# Compiled code is shared by the processes of this run, and with no other source.
use_cache_folder(Path(tempfile.gettempdir()) / "trimtab-tests")

# A calibration of the developer's machine would change what plans say.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / "trimtab-tests-cache")

# A shell ignores Ctrl-C in background jobs, and tests that interrupt a process would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long a draw takes says how busy the machine is, and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random generators, so that results do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
