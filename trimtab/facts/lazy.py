"""Lazy imports of a package's public names, so that importing its `spec` does not import torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Returns a package's `__getattr__` (PEP 562).

    Args:
        package: its `__name__`.
        modules: public name → the module inside the package that defines it.
        renamed: former public name → current name; using a former name gives a FutureWarning.

    Example:
        >>> find = lazy_attributes("trimtab.facts", {"format_bytes": "units"})
        >>> find("format_bytes")(2048)
        '2.00 KiB'
    """

    def find(name: str) -> Any:
        current = (renamed or {}).get(name)
        if current is not None:
            warnings.warn(
                f"{package}.{name} is now called {current}; the former name still works",
                FutureWarning,
                stacklevel=2,
            )
            name = current
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
