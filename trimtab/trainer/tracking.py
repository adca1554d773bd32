"""Metrics to TensorBoard and Weights & Biases, if `report_to` names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.facts.errors import MissingDependency

SINKS = ("tensorboard", "wandb")


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """The values of a metrics record by the names that both tools show.

    Example:
        >>> scalars_of({"kind": "eval", "step": 3, "name": "general", "loss": 2.0, "perplexity": 7.4})
        {'eval/general/loss': 2.0, 'eval/general/perplexity': 7.4}
    """
    kind = record["kind"]
    if kind == "train":
        keys = ("loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes")
        return {f"train/{key}": record[key] for key in keys}
    if kind == "eval":
        return {f"eval/{record['name']}/{key}": record[key] for key in ("loss", "perplexity")}
    if kind == "probe":
        return {f"probe/{name}": share for name, share in record["scores"].items()}
    if kind == "answers":
        return {"answers/exact": record["exact"] / max(1, record["total"])}
    return {}


class TensorBoardSink:
    """Writes event files into `folder`; the first record of a resumed run purges events after its checkpoint."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "report_to names tensorboard, which is not installed", "pip install 'trimtab[tensorboard]'"
            ) from error
        self._new_writer = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def record(self, record: dict[str, Any]) -> None:
        """Writes one metrics record."""
        if self._writer is None:
            # A session's first record has the step of its checkpoint, whose metrics were already written.
            step = record["step"]
            self._writer = self._new_writer(log_dir=str(self._folder), purge_step=step and step + 1)
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if record["kind"] == "sample":
            self._writer.add_text("sample", f"{record['prompt']}{record['completion']}", record["step"])
        self._writer.flush()  # a killed process loses none

    def message(self, text: str) -> None:
        """Does nothing: messages are for the terminal."""


class WandbSink:
    """Sends metrics to Weights & Biases under the account that `wandb login` set up."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingDependency(
                "report_to names wandb, which is not installed", "pip install 'trimtab[wandb]'"
            ) from error
        # The run's id is its folder's name, so that a resumed run continues on the same page.
        self._run = wandb.init(
            project="trimtab", name=name, id=name, dir=str(folder), config=config, resume="allow"
        )

    def record(self, record: dict[str, Any]) -> None:
        """Writes one metrics record."""
        values = scalars_of(record)
        if values:
            self._run.log(values, step=record["step"])

    def message(self, text: str) -> None:
        """Does nothing: messages are for the terminal."""
