"""Save, load and verify training state: safetensors and JSON, checksummed, published atomically.

    store = Store("run/checkpoints", keep_last=2)
    store.save(step, tensors, scalars, tags={"best"})
    found = store.latest()
    scalars = store.load(found, tensors)

`spec` (sizes on disk and in host memory) imports no torch. The format is described in docs/checkpoints.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.checkpoint.lock import RunLock
    from trimtab.checkpoint.manifest import Manifest, read_manifest, verify
    from trimtab.checkpoint.store import Found, Store

_HOMES = {
    "Found": "trimtab.checkpoint.store",
    "Manifest": "trimtab.checkpoint.manifest",
    "RunLock": "trimtab.checkpoint.lock",
    "Store": "trimtab.checkpoint.store",
    "read_manifest": "trimtab.checkpoint.manifest",
    "verify": "trimtab.checkpoint.manifest",
}

__all__ = ["Found", "Manifest", "RunLock", "Store", "read_manifest", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
