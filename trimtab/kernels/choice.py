"""The implementation of a kernel that is selected for a run, with the reason. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImplChoice:
    """A selected implementation, the reason for it, and the reasons against the others.

    Example:
        >>> ImplChoice("triton", "one kernel for all weights").rejected
        ()
    """

    impl: str
    """The value of the kernel's `impl=`."""
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(implementation, reason against it) of the alternatives, if they are reported."""
