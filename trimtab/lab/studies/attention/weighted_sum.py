"""Times the weighted sum of docs/writing-a-kernel.md: torch's version and the Triton kernel, on the same inputs."""

# N rows, D columns

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from trimtab.kernels.triton_support import runs_triton
from trimtab.kernels.weighted_sum import weighted_sum
from trimtab.kernels.weighted_sum.spec import Case, make_inputs
from trimtab.lab.contests import disagreement
from trimtab.lab.studies.attention.results import PassTimes
from trimtab.lab.studies.attention.settings import WeightedSumSettings
from trimtab.lab.study import NotSupported
from trimtab.lab.timing import Run, cache_state, time_samples

CHECKED = Case("check", N=64, D=1024)
RESULTS = ("y", "dx", "dw")


class WrongSum(Exception):
    """An implementation has a larger error than allowed; it is not timed."""


def measure_weighted_sum(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one cell of the weighted sum.

    Example:
        >>> cell = WeightedSumSettings("reference", rows=4, columns=8, repetitions=2)
        >>> len(measure_weighted_sum(cell.to_dict())["backward"]["times_ms"])
        2
    """
    s = WeightedSumSettings.from_dict(settings)
    if s.impl == "triton" and not runs_triton(torch.device(s.device)):
        raise NotSupported(
            "Triton must be installed, and needs a CUDA GPU with compute capability 7.5 or newer"
        )
    _verify(s.impl, s.dtype, s.device)
    x_ND, w_D = make_inputs(Case("timed", s.rows, s.columns), s.dtype, s.device)
    inputs = (x_ND.requires_grad_(), w_D.requires_grad_())
    gradient_N = torch.randn(s.rows, device=s.device).to(x_ND.dtype)

    def forward() -> torch.Tensor:
        return weighted_sum(*inputs, impl=s.impl)

    def prepare_backward() -> Run:
        y_N = forward()
        return lambda: torch.autograd.grad(y_N, inputs, gradient_N)

    forward_ms, backward_ms = (
        time_samples(
            prepare, device=s.device, repetitions=s.repetitions, budget_ms=1e3 * s.seconds / 2, warm_up=2
        )
        for prepare in (lambda: forward, prepare_backward)
    )
    return PassTimes(forward_ms, backward_ms, cache_state(s.device)).to_dict()


@cache
def _verify(impl: str, dtype: str, device: str) -> None:
    """Compares the sum and its gradients with torch's in fp64; raises WrongSum if the error is too large."""
    truth, same_dtype, got = (
        _results(implementation, precision, device)
        for implementation, precision in (("reference", "fp64"), ("reference", dtype), (impl, dtype))
    )
    sentence = disagreement(RESULTS, got, truth, same_dtype, dtype)
    if sentence is not None:
        raise WrongSum(f"{impl} in {dtype} is not timed: {sentence}")


def _results(impl: str, dtype: str, device: str) -> list[torch.Tensor]:
    inputs = [x.requires_grad_() for x in make_inputs(CHECKED, dtype, device)]
    y_N = weighted_sum(*inputs, impl=impl)
    gradient_N = torch.arange(CHECKED.N, device=device).remainder(7).sub(3).to(y_N.dtype)
    return [y_N.detach(), *torch.autograd.grad(y_N, inputs, gradient_N)]
