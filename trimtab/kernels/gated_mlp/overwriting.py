"""Whether gates may write their gradients over their inputs. No torch: also where there is no Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def overwriting() -> Iterator[None]:
    """The gradients of "triton" gates that are computed inside, on this thread, are written over gate and up.

    For layers whose gate and up are computed again for the backward pass, which nobody else reads: it holds a tensor of
    the layer's width less at its peak. Where gate and up were kept, another backward pass raises. Views of one tensor
    are not written to.

    Example:
        >>> with overwriting():
        ...     allowed()
        True
        >>> allowed()
        False
    """
    before = allowed()
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = before


def allowed() -> bool:
    """Whether this thread is inside `overwriting`."""
    return getattr(_thread, "inside", False)
