"""Model → model: changes to a plain decoder, applied from outside, in one visible order.

Names resolve when they are used (PEP 562), so that the specs import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.adapt.quantized import QuantizedLinear, quantize_layout

_PLACES = {"QuantizedLinear": "quantized", "quantize_layout": "quantized"}

__all__ = ["QuantizedLinear", "quantize_layout"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
