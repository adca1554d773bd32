"""The software and machine of a run: an allow-list of versions and facts, without tokens, paths or secrets."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from trimtab.facts.openmp import USER_SETTINGS

PACKAGES = (
    "trimtab",
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "pyarrow",
    "gguf",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions of Python and packages, the processor or GPU and the thread count."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in USER_SETTINGS if name in os.environ},
        "byteorder": sys.byteorder,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    else:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts
