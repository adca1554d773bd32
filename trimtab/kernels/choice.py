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


def choose_pointwise(*, triton: bool, autocast: bool) -> ImplChoice:
    """Selects the implementation of norms, RoPE and gated activations of a model.

    Args:
        triton: whether Triton runs on the device.
        autocast: whether products are computed in another dtype than that of the weights.

    Example:
        >>> choose_pointwise(triton=True, autocast=False).impl, choose_pointwise(triton=True, autocast=True).impl
        ('triton', 'reference')
    """
    if not triton:
        return ImplChoice("reference", "torch operators, on any device")
    if autocast:  # the residual stream is fp32 and layer outputs are 16 bits: the kernels require one dtype
        return ImplChoice("reference", "torch operators, which support autocast")
    return ImplChoice("triton", "norms, RoPE and gates in one kernel each")
