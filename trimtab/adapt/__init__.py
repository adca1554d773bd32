"""Model → model: compiled regions. Nothing here trains.

Names resolve when they are used (PEP 562), so that the room's `spec.py` files import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.adapt.compiling import compilations, compile_regions

_PLACES = {
    "compilations": "compiling",
    "compile_regions": "compiling",
}

__all__ = [
    "compilations",
    "compile_regions",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
