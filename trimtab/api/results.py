"""What a run leaves behind, as objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import MissingDependency, TrimtabError

if TYPE_CHECKING:
    from trimtab.api.model import Model
    from trimtab.report import RunData


@dataclass(frozen=True)
class Evaluation:
    """The loss of one set at one step."""

    step: int
    name: str
    """`domain`, the held-out part or set of what is trained on, or `general`."""
    loss: float
    perplexity: float


@dataclass(frozen=True, repr=False)
class RunResult:
    """A run that finished, was interrupted by a signal, or was stopped by a callback.

    Numbers are read from the run folder, once, when they are asked for.

    Example:
        >>> run = trimtab.train("recipe.yaml")               # doctest: +SKIP
        >>> run                                              # doctest: +SKIP
        RunResult('runs/recipe', finished at step 100, loss 1.8723)
        >>> run.losses[:2], run.best.step                    # doctest: +SKIP
        ([3.41, 3.2], 90)
    """

    folder: Path
    status: str
    """`finished`, `interrupted` or `stopped`; the last two can be resumed."""
    step: int
    reason: str | None = None
    """Why it ended before its last step: early stopping, or what `control.stop` was given; None otherwise."""

    def __repr__(self) -> str:
        try:
            loss = self.final_loss
        except TrimtabError:  # the folder is gone: an object can still be shown
            loss = None
        ending = "" if loss is None else f", loss {loss:.4f}"
        return f"RunResult({str(self.folder)!r}, {self.status} at step {self.step}{ending})"

    @cached_property
    def _data(self) -> RunData:
        from trimtab.report import read_run

        return read_run(self.folder)

    def data(self) -> RunData:
        """Its metrics of every kind and its plan, read from the folder as it is now."""
        from trimtab.report import read_run

        return read_run(self.folder)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict per optimizer step: `step`, `loss`, `lr`, `grad_norm`, `tokens`, `tokens_per_second`, `seconds`,
        `memory_bytes`."""
        return [{key: value for key, value in row.items() if key != "kind"} for row in self._data.of("train")]

    @property
    def losses(self) -> list[float]:
        """The training loss of every step."""
        return [row["loss"] for row in self._data.of("train")]

    @property
    def final_loss(self) -> float | None:
        """The training loss of the last step; None where no step was made."""
        losses = self.losses
        return losses[-1] if losses else None

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation in order, the one before the first step included."""
        return [
            Evaluation(row["step"], row["name"], row["loss"], row["perplexity"])
            for row in self._data.of("eval")
        ]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation of the best checkpoint, which `run.model("best")` loads: the lowest loss on the set that
        decides it. None where nothing was evaluated, or no step improved on the loss before the first one; there is
        no best checkpoint then."""
        found = self.evaluations
        scored = [one for one in found if one.name == found[0].name and one.loss == one.loss]
        best = min(scored, key=lambda one: one.loss, default=None)
        return None if best is None or best.step == 0 else best

    def to_pandas(self) -> Any:
        """`history` as a pandas.DataFrame indexed by step, with columns such as `eval_domain_loss`."""
        try:
            pandas = import_module("pandas")
        except ImportError as missing:
            raise MissingDependency("to_pandas needs pandas", "pip install pandas") from missing
        rows: dict[int, dict[str, Any]] = {}
        for row in self.history:
            rows.setdefault(row["step"], {}).update(row)
        for one in self.evaluations:
            rows.setdefault(one.step, {"step": one.step})[f"eval_{one.name}_loss"] = one.loss
        columns = dict.fromkeys(key for row in (*self.history, *rows.values()) for key in row)
        return pandas.DataFrame([rows[step] for step in sorted(rows)], columns=list(columns)).set_index(
            "step"
        )

    def model(self, checkpoint: str | int = "latest") -> Model:
        """The trained model: the `latest` checkpoint, the `best`, or a step."""
        from trimtab.api.model import load

        return load(str(self.folder), checkpoint=checkpoint)
