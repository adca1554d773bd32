"""choices.json of a run folder: the resolved configuration of a run, for every later start. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError
from trimtab.plan.resolved import Resolved
from trimtab.plan.resolved_json import (
    REQUIRED,
    VERSION,
    adapters_from_dict,
    resolved_from_dict,
    resolved_to_dict,
)
from trimtab.recipe import Recipe, build, to_dict
from trimtab.run.folder import RunFolder, read_json, write_json
from trimtab.run.metrics_summary import LOGS_CHECKPOINTS

FIELDS = ("model_commit", "tokenizer_commit", "data", "recipe", *REQUIRED)
"""Required to resume a run; to open its model the recipe suffices."""
OWN_TEXT_FIRST = "own_text_first"
DROPOUT_BY_SEQUENCE = "dropout_by_sequence"
_TYPES: dict[str, type] = {
    "data": dict,
    "recipe": dict,
    "attention": dict,
    "device": str,
    "dtype": str,
    "weights_dtype": str,
    "gradient_dtype": str,
    "threads": int,
    "deterministic": bool,
}


@dataclass(frozen=True)
class PlannedSteps:
    """From step `step` on, the run was planned to end at step `total`."""

    step: int
    total: int


@dataclass(frozen=True)
class DataPins:
    """The versions of the data that a run started with; a resumed run reads the same versions."""

    commits: Mapping[str, str | None]
    """Commits of hub datasets."""
    manifests: Sequence[Mapping[str, Any]]
    """Fingerprints of all files by corpus, in the format of `data`."""
    train_source_first: bool = False
    """Whether the first step has a sequence of a train source; in earlier versions it could have replay alone."""

    def to_dict(self) -> dict[str, Any]:
        """For choices.json."""
        return {
            "commits": dict(self.commits),
            "manifests": [dict(manifest) for manifest in self.manifests],
            OWN_TEXT_FIRST: self.train_source_first,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DataPins:
        """The inverse of `to_dict`; for files of earlier versions too."""
        return DataPins(data["commits"], data["manifests"], data.get(OWN_TEXT_FIRST) is True)


@dataclass(frozen=True)
class Choices:
    """The configuration that a run started with, and the changes of later starts."""

    resolved: Resolved
    """As resolved at the first start; memory plan and CUDA graphs are those of the last start, and everything if that
    changed the device. `threads` is the number that the run began with."""
    recipe: Recipe
    """The recipe of the first start, with the memory keys (`resume.MEMORY_KEYS`) and device of the last."""
    model_commit: str | None
    """Commit of a hub model."""
    tokenizer_commit: str | None
    data: DataPins
    base: BaseWeights | None = None
    """The frozen weights of a run that trains adapters."""
    started_from: BaseWeights | None = None
    """The checkpoint of another run that the initial weights were read from."""
    planned_steps: tuple[PlannedSteps, ...] = ()
    """The planned numbers of steps; empty for runs of versions that did not store them."""
    logs_checkpoints: bool = True
    """Whether metrics.jsonl has a record of every checkpoint since the first step."""
    dropout_by_sequence: bool = True
    """Whether dropout masks depend on the sequence; in earlier versions they depended on the microbatch."""

    def to_dict(self) -> dict[str, Any]:
        """The content of choices.json."""
        return {
            **resolved_to_dict(self.resolved),
            "version": VERSION,
            "model_commit": self.model_commit,
            "tokenizer_commit": self.tokenizer_commit,
            "data": self.data.to_dict(),
            "base": None if self.base is None else self.base.to_dict(),
            "recipe": to_dict(self.recipe),
            "started_from": None if self.started_from is None else self.started_from.to_dict(),
            "lengths": [dataclasses.asdict(length) for length in self.planned_steps],
            LOGS_CHECKPOINTS: self.logs_checkpoints,
            DROPOUT_BY_SEQUENCE: self.dropout_by_sequence,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], num_layers: int) -> Choices:
        """The inverse of `to_dict`; for files of earlier versions too.

        Args:
            data: the content of a file that `find_damage` has validated.
            num_layers: number of layers of the run's model.
        """
        base, started_from = data.get("base"), data.get("started_from")
        resolved = resolved_from_dict(data, num_layers)
        if resolved.lora is not None and base is None:
            raise ValueError("it names no base model for its adapters")
        return Choices(
            resolved,
            build(data["recipe"]),
            data["model_commit"],
            data["tokenizer_commit"],
            DataPins.from_dict(data["data"]),
            None if base is None else BaseWeights.from_dict(base),
            None if started_from is None else BaseWeights.from_dict(started_from),
            tuple(PlannedSteps(entry["step"], entry["total"]) for entry in data.get("lengths") or ()),
            data.get(LOGS_CHECKPOINTS) is True,
            data.get(DROPOUT_BY_SEQUENCE) is True,
        )


@dataclass(frozen=True)
class ModelChoices:
    """The part of choices.json that opening a run's model needs; every version of the file contains it."""

    lora: LoraSettings | None
    quantization: Quantization | None
    model_commit: str | None
    save_steps: int | None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    own_tokenizer: bool = False
    """Whether the recipe names a tokenizer, tokens or a chat template other than the model's."""


def read_choices(folder: RunFolder, num_layers: int) -> Choices:
    """Reads choices.json of a run with a model of `num_layers` layers.

    Raises CheckpointError if the file is damaged or was written by a newer trimtab.

    Example:
        >>> read_choices(RunFolder(Path("runs/demo")), 4).resolved.device  # doctest: +SKIP
        'cpu'
    """
    data = _read(folder, FIELDS)
    with _wrong_values(folder):
        return Choices.from_dict(data, num_layers)


def read_model_choices(folder: RunFolder) -> ModelChoices:
    """Reads what opening a run's model needs; raises CheckpointError as `read_choices` does.

    Example:
        >>> read_model_choices(RunFolder(Path("runs/demo"))).lora is None  # doctest: +SKIP
        True
    """
    data = _read(folder, ("recipe",))
    recipe = data["recipe"]
    with _wrong_values(folder):
        lora, quantization = adapters_from_dict(data)
        return ModelChoices(
            lora,
            quantization,
            data.get("model_commit"),
            recipe.get("save_steps"),
            recipe["data"].get("chat_template_kwargs", {}),
            any(recipe["model"].get(key) for key in ("tokenizer", "added_tokens", "chat_template")),
        )


def read_recipe(folder: RunFolder) -> Recipe:
    """Reads the recipe that a run started with."""
    return build(_read(folder, FIELDS)["recipe"])


def write_choices(folder: RunFolder, choices: Choices) -> None:
    """Writes choices.json; from then on the folder is a run that can be resumed."""
    write_json(folder.choices, choices.to_dict())


def _read(folder: RunFolder, fields: Sequence[str]) -> dict[str, Any]:
    data = read_json(folder.choices)
    wrong = find_damage(data, fields)
    if wrong is not None:
        raise _damaged(folder, wrong)
    if data.get("version", 0) > VERSION:
        raise CheckpointError(f"{folder.path} was written by a newer trimtab", "use that version")
    return data


@contextmanager
def _wrong_values(folder: RunFolder) -> Iterator[None]:
    """Raises CheckpointError for missing values and values of a wrong type."""
    try:
        yield
    except KeyError as error:
        raise _damaged(folder, f"is damaged: it lacks {error.args[0]}") from error
    except ValueError as error:
        raise _damaged(folder, f"is damaged: {error}") from error
    except (TypeError, AttributeError) as error:
        raise _damaged(folder, "is damaged: a value in it has the wrong type") from error


def _damaged(folder: RunFolder, wrong: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.choices} {wrong}",
        f"restore the file from a copy, or train the recipe again: {folder.retrain_command()}",
    )


def find_damage(data: Mapping[str, Any], fields: Sequence[str] = FIELDS) -> str | None:
    """Describes the damage of choices.json; None if there is none, or if a newer trimtab wrote it.

    Example:
        >>> find_damage({"version": None})
        'has no valid version'
    """
    version = data.get("version", 0)
    if type(version) is not int:
        return "has no valid version"
    if version > VERSION:
        return None
    missing = [name for name in fields if name not in data]
    if missing:
        return f"lacks {', '.join(missing)}"
    invalid = [name for name, kind in _TYPES.items() if name in fields and type(data[name]) is not kind]
    return f"has no valid {' and '.join(invalid)}" if invalid else None
