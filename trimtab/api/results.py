"""The results of a run as objects."""

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
    """The loss of one evaluation set at one step."""

    step: int
    name: str
    """`domain` (held-out data of the training domain) or `general`."""
    loss: float
    perplexity: float


@dataclass(frozen=True, repr=False)
class RunResult:
    """A run that finished, was interrupted by a signal, or was stopped by a callback.

    Metrics are read from the run folder on first access and cached.

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
    """Why it ended before its last step: early stopping, or the reason passed to `control.stop`; None otherwise."""

    def __repr__(self) -> str:
        try:
            loss = self.final_loss
        except TrimtabError:  # the folder no longer exists
            loss = None
        ending = "" if loss is None else f", loss {loss:.4f}"
        return f"RunResult({str(self.folder)!r}, {self.status} at step {self.step}{ending})"

    @cached_property
    def _data(self) -> RunData:
        from trimtab.report import read_run

        return read_run(self.folder)

    def data(self) -> RunData:
        """Reads the metrics of every kind and the plan from the folder again."""
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
        """The training loss of the last step; None without a step."""
        losses = self.losses
        return losses[-1] if losses else None

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation in order, including the one before the first step."""
        return [
            Evaluation(row["step"], row["name"], row["loss"], row["perplexity"])
            for row in self._data.of("eval")
        ]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation of the best checkpoint, which `run.model("best")` loads: the lowest loss on the first set.

        None if there are no evaluations, or if no step improved on the loss before training; then there is no best
        checkpoint.
        """
        rows = self.evaluations
        scored = [row for row in rows if row.name == rows[0].name and row.loss == row.loss]
        best = min(scored, key=lambda row: row.loss, default=None)
        return None if best is None or best.step == 0 else best

    def to_pandas(self) -> Any:
        """Returns `history` as a pandas.DataFrame indexed by step, with columns such as `eval_domain_loss`."""
        try:
            pandas = import_module("pandas")
        except ImportError as missing:
            raise MissingDependency("to_pandas needs pandas", "pip install pandas") from missing
        rows: dict[int, dict[str, Any]] = {}
        for row in self.history:
            rows.setdefault(row["step"], {}).update(row)
        for evaluation in self.evaluations:
            row = rows.setdefault(evaluation.step, {"step": evaluation.step})
            row[f"eval_{evaluation.name}_loss"] = evaluation.loss
        columns = dict.fromkeys(key for row in (*self.history, *rows.values()) for key in row)
        return pandas.DataFrame([rows[step] for step in sorted(rows)], columns=list(columns)).set_index(
            "step"
        )

    def model(self, checkpoint: str | int = "latest") -> Model:
        """Loads the trained model from the `latest` checkpoint, the `best`, or that of a step."""
        from trimtab.api.model import load

        return load(str(self.folder), checkpoint=checkpoint)
