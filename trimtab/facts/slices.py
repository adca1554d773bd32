"""Slices of parameters: a range of rows or of columns. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trimtab.facts.errors import ModelError

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """`tensor[start:stop]` (dim 0: rows of a matrix, elements of a vector) or `tensor[:, start:stop]` (dim 1).

    Example:
        >>> Slice(0, 16, 32).dims_of((64, 8)), Slice(1, 0, 2).dims_of((64, 8))
        ((16, 8), (64, 2))
    """

    dim: int
    start: int
    stop: int

    @classmethod
    def whole(cls, dims: Dims) -> Slice:
        """Returns the slice of all rows of a tensor of these dimensions.

        Example:
            >>> Slice.whole((64, 8))
            Slice(dim=0, start=0, stop=64)
        """
        return cls(0, 0, dims[0])

    def dims_of(self, dims: Dims) -> Dims:
        """Returns the dimensions of this slice of a tensor of dimensions `dims`."""
        return (*dims[: self.dim], self.stop - self.start, *dims[self.dim + 1 :])

    def along(self, dim: int, dims: Dims) -> tuple[int, int]:
        """Returns (start, stop) along a dimension: the full range unless it is the sliced dimension.

        Example:
            >>> Slice(1, 2, 5).along(1, (64, 8)), Slice(1, 2, 5).along(0, (64, 8))
            ((2, 5), (0, 64))
        """
        return (self.start, self.stop) if dim == self.dim else (0, dims[dim])


def row_chunks(dims: Dims, max_elements: int) -> Iterator[Slice]:
    """Yields consecutive row slices that cover a tensor, of at most `max_elements` elements each (at least one row).

    Example:
        >>> [(piece.start, piece.stop) for piece in row_chunks((5, 10), 20)]
        [(0, 2), (2, 4), (4, 5)]
    """
    row = 1
    for dim in dims[1:]:
        row *= dim
    step = max(1, max_elements // max(1, row))
    for start in range(0, dims[0], step):
        yield Slice(0, start, min(start + step, dims[0]))


def check_parameter_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ModelError for the first name that is not a parameter of the model.

    Example:
        >>> check_parameter_names(["model.norm.weight"], {"model.norm.weight"})
    """
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(str(name), known, n=1)
            raise ModelError(
                f"the model has no parameter {name!r}",
                f"did you mean {similar[0]!r}?" if similar else "`ModelShape.parameters()` lists their names",
            )


def check_slices(slices: Mapping[str, Slice], parameters: Mapping[str, Dims]) -> None:
    """Raises ModelError for a slice of an unknown parameter, along a dimension that it does not have, or out of range.

    Args:
        slices: parameter name → slice; an empty range is valid.
        parameters: name → dimensions of every parameter, `dict(shape.parameters())`.

    Example:
        >>> check_slices({"lm_head.weight": Slice(0, 0, 32)}, {"lm_head.weight": (64, 8)})
    """
    check_parameter_names(slices, parameters)
    for name, part in slices.items():
        dims = parameters[name]
        if part.dim not in range(min(len(dims), 2)):
            raise ModelError(
                f"{name} has dimensions {list(dims)} and cannot be sliced along dimension {part.dim!r}",
                "slice dimension 0" + (" or 1" if len(dims) > 1 else ""),
            )
        size = dims[part.dim]
        whole = isinstance(part.start, int) and isinstance(part.stop, int)
        if not whole or not 0 <= part.start <= part.stop <= size:
            raise ModelError(
                f"{name}: the slice {part.start}:{part.stop} is out of range for dimension {part.dim} of {list(dims)}",
                f"give whole numbers with 0 <= start <= stop <= {size}",
            )
