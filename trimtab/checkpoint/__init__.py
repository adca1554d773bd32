"""Save, load and verify training state: safetensors and JSON with checksums, published atomically.

    store = Store("run/checkpoints", keep_last=2)
    store.save(step, tensors, scalars, tags={"best"})
    found = store.latest()
    scalars = store.load(found, tensors)

`spec` (sizes on disk and in host memory) imports no torch. The format is described in docs/checkpoints.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.checkpoint.lock import RunLock
    from trimtab.checkpoint.manifest import Manifest, read_manifest, verify
    from trimtab.checkpoint.store import SavedCheckpoint, Store

_MODULES = {
    "SavedCheckpoint": "store",
    "Manifest": "manifest",
    "RunLock": "lock",
    "Store": "store",
    "read_manifest": "manifest",
    "verify": "manifest",
}

__all__ = ["Manifest", "RunLock", "SavedCheckpoint", "Store", "read_manifest", "verify"]

__getattr__ = lazy_attributes(__name__, _MODULES, {"Found": "SavedCheckpoint"})
