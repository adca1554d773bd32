"""The implementation of a kernel that was chosen for a run, with the reason. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImplChoice:
    """An implementation, why it was chosen, and why others were not.

    Example:
        >>> ImplChoice("triton", "one kernel for all weights").rejected
        ()
    """

    impl: str
    """The value of the kernel's `impl=`."""
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(implementation, reason against it) of the alternatives, where they are reported."""
