"""Lazy imports of a package's public names, so that importing its `spec` does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__` (PEP 562).

    Args:
        package: its `__name__`.
        places: public name → the module inside the package that defines it.

    Example:
        >>> find = lazily("trimtab.facts", {"format_bytes": "units"})
        >>> find("format_bytes")(2048)
        '2.00 KiB'
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return find
