"""The timed operations of a calibration, with the costs that their specs declare.

A probe is one pass of one operation on prepared inputs. A group of probes shares inputs, and is built just before it is
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.facts.calibration import KernelSample
from trimtab.facts.operations import OperationKind


@dataclass(frozen=True)
class Probe:
    """A `KernelSample` without its time, and the function to time."""

    kind: OperationKind
    dtype: str
    flops: float
    moved: float
    run: Callable[[], object]
    backward: bool = False
    impl: str = ""
    dims: tuple[int, ...] = ()

    def sample(self, seconds: float) -> KernelSample:
        """The measured sample.

        Example:
            >>> Probe(OperationKind.ADD, "fp32", 8.0, 96.0, lambda: None).sample(1e-6).moved
            96.0
        """
        return KernelSample(
            self.kind,
            self.dtype,
            float(self.flops),
            float(self.moved),
            seconds,
            self.backward,
            self.impl,
            self.dims,
        )


@dataclass(frozen=True)
class ProbeGroup:
    """Probes that share inputs."""

    label: str
    build: Callable[[], list[Probe]]
    nbytes: int = 0
    """Approximate bytes of inputs and results."""
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager around the probes."""


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one pass."""

    flops: float
    moved: float


def two_passes(
    kind: OperationKind,
    dtype: str,
    impl: str,
    function: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    costs: tuple[Cost, Cost],
    *,
    dims: tuple[int, ...],
    frozen: tuple[str, ...] = (),
) -> list[Probe]:
    """Forward and backward of a differentiable function; inputs in `frozen` get no gradient.

    Example:
        >>> x = {"x": torch.randn(4, 8)}
        >>> costs = Cost(32, 256), Cost(32, 384)
        >>> both = two_passes(OperationKind.GATE, "fp32", "torch", lambda x: x.relu(), x, costs, dims=(4, 8))
        >>> [probe.backward for probe in both], both[1].run()[0].shape
        ([False, True], torch.Size([4, 8]))
    """
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.items()}
    differentiated = [x for x in leaves.values() if x.requires_grad]
    graph: list[Any] = []

    def backward() -> object:
        if not graph:  # built in the first call, which is never timed
            outs = function(**leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            graph.extend((outs, [torch.randn_like(out) for out in outs]))
        return torch.autograd.grad(graph[0], differentiated, graph[1], retain_graph=True)

    return [
        Probe(kind, dtype, costs[0].flops, costs[0].moved, lambda: function(**leaves), impl=impl, dims=dims),
        Probe(kind, dtype, costs[1].flops, costs[1].moved, backward, backward=True, impl=impl, dims=dims),
    ]


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Sets how fp32 products are computed ("highest": fp32, "high": TF32), and restores it.

    Example:
        >>> with matmul_precision("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
