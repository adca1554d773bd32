"""Export of models and adapters; each export is verified and writes a receipt of the checks.

Names are imported lazily (PEP 562), so that importing the package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.export.hf import export_hf
    from trimtab.export.merged import export_merged
    from trimtab.export.peft import export_peft
    from trimtab.export.receipt import Check, Receipt

_MODULES = {
    "Check": "receipt",
    "Receipt": "receipt",
    "export_hf": "hf",
    "export_merged": "merged",
    "export_peft": "peft",
}

__all__ = ["Check", "Receipt", "export_hf", "export_merged", "export_peft"]

__getattr__ = lazy_attributes(__name__, _MODULES)
