"""Labels the matrix products of a block, so that recompute policies can distinguish them.

A label is metadata and does not affect the computation. It is attached with `torch.fx.traceback.annotate`, so that it
applies to operators in eager mode and, in a compiled block, to the nodes of the traced graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.fx import traceback

_PROJECTION, _FACTOR = "trimtab_projection", "trimtab_factor"


class ProductLabel(NamedTuple):
    """The matrix product that an operator is part of.

    Example:
        >>> with in_projection("down"), with_factor("adapter_a"):
        ...     current_label()
        ProductLabel(projection='down', factor='adapter_a')
        >>> current_label()
        ProductLabel(projection=None, factor='weight')
    """

    projection: str | None
    """"attention" (q, k, v and o), "gate_up" or "down"; None outside of projections."""
    factor: str
    """The other factor of the product: "weight", "adapter_a" or "adapter_b"."""


def in_projection(name: str) -> AbstractContextManager[None]:
    """Labels the operators inside with a projection of the block; a no-op without gradients."""
    return traceback.annotate({_PROJECTION: name}) if torch.is_grad_enabled() else nullcontext()


def with_factor(name: str) -> AbstractContextManager[None]:
    """Labels the operators inside with the second factor of their products; unlabeled products have "weight"."""
    return traceback.annotate({_FACTOR: name})


def current_label() -> ProductLabel:
    """The label of the operator that is being dispatched or traced."""
    custom = traceback.get_current_meta().get("custom") or {}
    return ProductLabel(custom.get(_PROJECTION), custom.get(_FACTOR, "weight"))
