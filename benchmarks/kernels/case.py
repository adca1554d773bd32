"""What a module of this folder hands to the runner.

    def cases() -> list[Case]

A case is one shape of one operation. Building it makes the inputs, once, and a contestant for each
implementation and each peer that can be imported; the others go to `absent` with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trimtab.kernels.exactness import SHARE, judge
from trimtab.lab.timing import Ceilings


@dataclass(frozen=True)
class Contestant:
    """One implementation on a case's inputs."""

    run: Callable[[], object]
    """Does the work that is timed."""
    check: Callable[[], str | None]
    """None if the result agrees with truth within the allowed error, else a sentence."""
    exact: bool = True
    """False for a method that approximates: what `check` says is shown beside its time and does not fail the run."""
    ours: bool = False


@dataclass(frozen=True)
class Bench:
    """A case's contestants, by name, and who is missing, with the reason."""

    contestants: dict[str, Contestant]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the table; nothing is allocated or imported before `build`."""

    op: str
    name: str
    build: Callable[[], Bench]
    floor: Callable[[Ceilings], float]
    """Seconds below which no implementation can come on a device with these ceilings."""


def floor(*, bytes_moved: float = 0, flops: float = 0) -> Callable[[Ceilings], float]:
    """The usual floor: least bytes at the copy's rate or FLOPs at the product's, whichever takes longer."""
    return lambda c: max(bytes_moved / c.copy_bytes_per_s, flops / c.matmul_flops_per_s)


def missing(package: str) -> str | None:
    """Why a peer cannot take part; None if it is installed."""
    found = importlib.util.find_spec(package) is not None
    return None if found else f"{package} is not installed"


def disagreement(
    names: Sequence[str],
    got: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    dtype: str,
) -> str | None:
    """What a contestant's `check` returns: the first result that is off by more than the rule allows."""
    for name, x, true, own in zip(names, got, truth, reference, strict=True):
        v = judge(name, x, truth=true, reference=own, share=SHARE[dtype])
        if not v:
            return (
                f"{name}: rms error {v.rms_error:.2g} (allowed {v.rms_allowed:.2g}), "
                f"largest {v.max_error:.2g} (allowed {v.max_allowed:.2g})"
            )
    return None
