"""A table of plans: models × GPUs × methods. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import TrimtabError
from trimtab.plan.fit import fits
from trimtab.plan.limits import limit_of
from trimtab.plan.make import Plan
from trimtab.plan.solve import Progress

CellPlanner = Callable[[str, str, DeviceFacts], Plan]
"""Plans a model with a method on a device."""


@dataclass(frozen=True)
class Cell:
    """The plan of a model with a method on a GPU."""

    model: str
    method: str
    gpu: str
    fits: bool
    needed: int | None = None
    """Peak bytes of the chosen setting, or of the lowest-memory setting if nothing fits."""
    available: int | None = None
    tokens_per_second: float | None = None
    """None if it does not fit or the GPU's rates are unknown."""
    validated: bool = True
    """Whether steps of such models were measured (`trimtab.plan.time.Time.validated`)."""
    longest: int | None = None
    """The longest sequence that fits, at most the model's positions; None if not requested."""
    problem: str = ""
    """The error if there is no plan."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = {
            name: getattr(self, name) for name in ("model", "method", "gpu", "fits", "needed", "available")
        }
        plain |= {"tokens_per_second": self.tokens_per_second, "validated": self.validated}
        if self.longest is not None:
            plain["longest"] = self.longest
        return plain | ({"problem": self.problem} if self.problem else {})


def make_table(
    models: Sequence[str],
    gpus: Sequence[tuple[str, DeviceFacts]],
    methods: Sequence[str],
    planner: CellPlanner,
    *,
    longest: Callable[[Plan], int] | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Returns a cell for each model, method and GPU, in this order.

    Args:
        models: model names for the planner.
        gpus: (display name, device).
        methods: method names for the planner.
        planner: creates the plan of one cell; its TrimtabError becomes the cell's problem.
        longest: finds the longest sequence that fits; None if it is not requested.
        progress: called before each cell.

    Example:
        >>> def refuse(model, method, device):
        ...     raise TrimtabError("no such model")
        >>> gpu = DeviceFacts("a GPU", "cuda", 24 * 10**9)
        >>> [(cell.fits, cell.problem) for cell in make_table(["a"], [("24GB", gpu)], ["lora"], refuse)]
        [(False, 'no such model')]
    """
    places = [(model, method, gpu) for model in models for method in methods for gpu in gpus]
    cells = []
    for done, (model, method, (name, device)) in enumerate(places):
        if progress is not None:
            progress(f"{model}, {method}, {name}", done, len(places))
        try:
            plan = planner(model, method, device)
        except TrimtabError as error:
            cells.append(Cell(model, method, name, fits=False, problem=str(error)))
            continue
        cells.append(_cell(model, method, name, plan, longest))
    return cells


def _cell(model: str, method: str, gpu: str, plan: Plan, longest: Callable[[Plan], int] | None) -> Cell:
    fit, limit = fits(plan), limit_of(plan.recipe, plan.device)[0]
    return Cell(
        model,
        method,
        gpu,
        fits=fit,
        needed=plan.needed,
        available=limit,
        tokens_per_second=plan.time.tokens_per_second if fit else None,
        validated=plan.time.validated,
        longest=None if longest is None else longest(plan),
    )
