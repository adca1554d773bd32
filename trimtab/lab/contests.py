"""Compares implementations of one operation: verifies each, then times all of them in alternation.

A case is one shape of one operation. Building it creates the inputs once, and a contestant for each implementation
and each importable peer; `absent` lists the other peers with the reason. A contestant with a wrong result is not
timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.lab.memory import peak_bytes
from trimtab.lab.timing import Ceilings, time_together


@dataclass(frozen=True)
class Implementation:
    """One implementation on a case's inputs."""

    run: Callable[[], object]
    """The timed function."""
    check: Callable[[], str | None]
    """Returns None if the result is within the allowed error of the truth, else a message."""
    exact: bool = True
    """False for an approximation: the message of `check` is shown with its time and does not fail the run."""
    ours: bool = False


@dataclass(frozen=True)
class Candidates:
    """A case's contestants by name, and the absent peers with the reason."""

    contestants: dict[str, Implementation]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """A case of an operation on which implementations compete: a row of the table.

    Nothing is allocated or imported before `build`.
    """

    op: str
    name: str
    build: Callable[[], Candidates]
    floor: Callable[[Ceilings], float]
    """Lower bound of the seconds on a device with these ceilings."""


def floor(*, bytes_moved: float = 0, flops: float = 0) -> Callable[[Ceilings], float]:
    """The roofline: minimum bytes at the rate of a copy or FLOPs at that of a product, whichever takes longer.

    Example:
        >>> floor(bytes_moved=1e12, flops=3e14)(Ceilings(1e12, 1e14, "a GPU", 90, "bfloat16"))
        3.0
    """
    return lambda c: max(bytes_moved / c.copy_bytes_per_s, flops / c.matmul_flops_per_s)


def missing(package: str) -> str | None:
    """The reason why a peer is absent; None if it is installed.

    Example:
        >>> missing("torch"), missing("no_such_package")
        (None, 'no_such_package is not installed')
    """
    is_installed = importlib.util.find_spec(package) is not None
    return None if is_installed else f"{package} is not installed"


def disagreement(
    names: Sequence[str],
    got: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    dtype: str,
) -> str | None:
    """Describes the first result with a larger error than allowed, for `Implementation.check`; None without one."""
    for name, x, true, own in zip(names, got, truth, reference, strict=True):
        v = check_accuracy(name, x, truth=true, reference=own, tolerance=TOLERANCE[dtype])
        if not v:
            return (
                f"{name}: rms error {v.rms_error:.2g} (allowed {v.rms_allowed:.2g}), "
                f"largest {v.max_error:.2g} (allowed {v.max_allowed:.2g})"
            )
    return None


def measure_case(
    case: Contest, ceilings: Ceilings, *, device: str = "cuda", rounds: int = 5, budget_ms: float = 100
) -> dict[str, Any]:
    """One case's record: its floor, and for each contestant the error, the peak memory and the times."""
    bench = case.build()
    entries = {name: _verify(contestant, device) for name, contestant in bench.contestants.items()}
    runs = {name: bench.contestants[name].run for name, entry in entries.items() if "note" not in entry}
    if runs:
        times = time_together(runs, device=device, rounds=rounds, budget_ms=budget_ms)
        for name, timing in times.items():
            entries[name] |= asdict(timing)
    return {"floor_ms": case.floor(ceilings) * 1e3, "contestants": entries, "absent": bench.absent}


def is_good(record: dict[str, Any]) -> bool:
    """Whether a case ran without failures and wrong results.

    Example:
        >>> is_good({"contestants": {"triton": {"note": "wrong: y"}}}), is_good({"contestants": {"triton": {}}})
        (False, True)
    """
    return not record.get("failed") and all("note" not in c for c in record["contestants"].values())


def first_line(error: Exception) -> str:
    """The first line of an error's message, for a record.

    Example:
        >>> first_line(RuntimeError("out of memory\\nmore")), first_line(RuntimeError())
        ('out of memory', 'without a message')
    """
    return (str(error).strip() or "without a message").splitlines()[0][:200]


def _verify(contestant: Implementation, device: str) -> dict[str, Any]:
    """Checks the result and measures peak memory."""
    entry: dict[str, Any] = {"exact": contestant.exact, "ours": contestant.ours}
    try:
        sentence = contestant.check()
        if sentence is None or not contestant.exact:
            entry["peak_bytes"] = peak_bytes(contestant.run, device)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result, the others continue
        entry["note"] = f"raised {type(error).__name__}: {first_line(error)}"
        return entry
    entry["error"] = sentence
    if "peak_bytes" not in entry:
        entry["note"] = f"wrong: {sentence}"
    return entry
