"""Data parallelism: the mesh of processes and its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.parallel.mesh import Mesh

__all__ = ["Mesh"]


def __getattr__(name: str) -> Any:
    if name == "Mesh":
        from trimtab.parallel.mesh import Mesh

        return Mesh
    raise AttributeError(f"module 'trimtab.parallel' has no attribute {name!r}")
