"""Resolves the names of models and data to paths: hub ids, folders, GGUF files, run folders. No torch."""

from __future__ import annotations

import dataclasses
import glob
import shlex
from pathlib import Path
from typing import Any

from trimtab import hub, text
from trimtab.checkpoint import Manifest, verify
from trimtab.checkpoint.layout import list_checkpoints, step_folders
from trimtab.checkpoint.manifest import DamagedCheckpoint
from trimtab.facts.errors import CheckpointError, ModelError
from trimtab.facts.names import unusable_name
from trimtab.facts.run_layout import CHECKPOINTS, is_checkpoint
from trimtab.facts.shapes import ModelShape
from trimtab.hub.local_files import looks_local
from trimtab.model.source import read_shape
from trimtab.recipe import Recipe, build, to_dict
from trimtab.run.choices import read_model_choices
from trimtab.run.folder import RunFolder
from trimtab.run.metrics_summary import has_published
from trimtab.starter import base_folder
from trimtab.text import Tokenizer
from trimtab.text.added import with_tokens
from trimtab.text.template import is_template

STARTER = "starter"
"""The name of the model that ships with trimtab."""
START_FOLDER = "start"
"""The folder inside a run folder with the run's initial weights, if they exist nowhere else."""


def model_folder(
    name: str, *, revision: str | None = None, weights: bool = True, offline: bool = False
) -> tuple[Path, str | None]:
    """(local folder or GGUF file, commit) of a model by any name; for a run folder its latest checkpoint.

    Without `weights` only config and tokenizer of a hub id are downloaded, which suffice to plan. With `offline`
    nothing is downloaded.
    """
    if name == STARTER:
        return base_folder(), None
    checkpoint = trained_checkpoint(name)
    if checkpoint is not None:
        return checkpoint, None
    resolved = hub.resolve_model(name, revision=revision, weights=weights, offline=offline)
    return resolved.path, resolved.commit


def tokenizer_of(recipe: Recipe, model: Path, commit: str | None) -> tuple[Tokenizer, str | None]:
    """(tokenizer, commit of its source) for a recipe, with added tokens and the chat template applied."""
    place = model
    if recipe.model.tokenizer is not None:
        place, commit = model_folder(recipe.model.tokenizer, weights=False)
    tokenizer = text.load(place)
    if recipe.model.added_tokens:
        tokenizer = with_tokens(tokenizer, recipe.model.added_tokens)
    if recipe.model.chat_template is not None:
        template = text.read_template(recipe.model.chat_template)
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    return tokenizer, commit


def shape_of(recipe: Recipe, model: Path) -> ModelShape:
    """A model's shape, with the vocabulary extended by the tokens that a recipe adds."""
    shape = read_shape(model)
    if recipe.model.added_tokens:
        num_tokens = tokenizer_of(recipe, model, None)[0].vocab_size
        shape = dataclasses.replace(shape, vocab_size=max(shape.vocab_size, num_tokens))
    return shape


def absolute(recipe: Recipe) -> Recipe:
    """The recipe with absolute local paths, so that the run can be resumed from any directory.

    Hub ids and `starter` names are unchanged: a name that does not exist locally is not treated as a path.
    """
    plain = to_dict(recipe)
    model, section = plain["model"], plain["data"]
    checkpoint = trained_checkpoint(model["name"])  # that run may continue and save a later one
    model["name"] = _absolute(model["name"] if checkpoint is None else str(checkpoint))
    model["tokenizer"] = _absolute(model.get("tokenizer"))
    if not is_template(model.get("chat_template") or ""):
        model["chat_template"] = _absolute(model.get("chat_template"))
    section["cache_dir"] = _absolute(section.get("cache_dir"), force=True)
    for source in _sources(section):
        source["source"] = _absolute(source["source"])
    if plain.get("lora"):
        plain["lora"]["adapter"] = _absolute(plain["lora"].get("adapter"))
    plain["output_dir"] = str(Path(plain["output_dir"]).expanduser())
    # Defaults stay unset: only keys that the user did not set are adapted to the model (`run.prepare`).
    given = {*recipe.model_fields_set, "output_dir"}
    return build({key: value for key, value in plain.items() if key in given})


def initial_model(name: str, run: Path) -> str:
    """The initial model of a run: its own copy if it has one, also after the run folder was moved."""
    own = run / START_FOLDER
    return str(own) if Path(name).name == START_FOLDER and own.is_dir() else name


def missing_sources(recipe: Recipe) -> list[str]:
    """Data sources that are local paths and do not exist, so that training would fail."""
    names = [source["source"] for source in _sources(to_dict(recipe)["data"])]
    names = [name for name in names if not name.startswith(f"{STARTER}:")]
    return [
        name for name in names if looks_local(name) and _absolute(name) == name and not Path(name).exists()
    ]


def _sources(section: dict[str, Any]) -> list[dict[str, Any]]:
    replayed = (section.get("replay") or {}).get("sources", [])
    return [*section["train"], *replayed, *section["eval"]["domain"], *section["eval"]["general"]]


def _absolute(name: Any, *, force: bool = False) -> Any:
    if name is None or unusable_name(name) is not None:
        return name
    path = Path(name).expanduser()
    local = force or path.exists() or (glob.has_magic(name) and bool(glob.glob(str(path), recursive=True)))
    return str(Path.cwd() / path) if local else name


_POINTER_BYTES = 64


def trained_checkpoint(name: str) -> Path | None:
    """The checkpoint that a name refers to; None if it is neither a run folder nor inside one.

    A run folder refers to its latest good checkpoint, `RUN/checkpoints/best` to its best one,
    `RUN/checkpoints/step-…` to itself. File sizes are compared here; `check_checksums` compares checksums.
    Raises for checkpoints of adapters, which are not a complete model.

    Example:
        >>> trained_checkpoint("runs/demo")  # doctest: +SKIP
        PosixPath('runs/demo/checkpoints/step-00000100')
    """
    path = Path(name).expanduser()
    if path.parent.name == CHECKPOINTS and path.is_file():  # a pointer: latest, best
        found = path.parent / _resolve_pointer(path)
    elif is_checkpoint(path):
        found = path
    elif (path / "recipe.yaml").is_file() and (path / "model" / "config.json").is_file():
        found = _latest_good(RunFolder(path))
    else:
        return None
    if _verify(found, checksums=False).base is not None:
        raise _adapters_error(found.parent.parent)
    return found


def check_checksums(checkpoint: Path) -> None:
    """Raises CheckpointError if the checksum of a checkpoint's file differs from its manifest."""
    _verify(checkpoint, checksums=True)


def _verify(checkpoint: Path, *, checksums: bool) -> Manifest:
    try:
        return verify(checkpoint, checksums=checksums)
    except DamagedCheckpoint as error:
        raise CheckpointError(
            f"{checkpoint} is damaged: {error}", "name another checkpoint of that run, or another model"
        ) from error


def _resolve_pointer(path: Path) -> str:
    text = path.read_bytes()[:_POINTER_BYTES].decode("utf-8", errors="replace").strip()
    if not is_checkpoint(path.parent / text):
        raise CheckpointError(
            f"{path} points to no checkpoint", "name the checkpoint's folder, or the run folder"
        )
    return text


def _latest_good(run: RunFolder) -> Path:
    good = list_checkpoints(run.checkpoints)
    if good:
        return good[0][0]
    cause = f"{run.path} has no good checkpoint to start from"
    choices = read_model_choices(run) if run.choices.is_file() else None
    # If checkpoints are damaged or missing, resuming raises too.
    if step_folders(run.checkpoints) or (choices and has_published(run, choices.save_steps)):
        raise CheckpointError(
            cause,
            f"restore one from a copy, train its recipe again ({run.retrain_command()}), or name another model",
        )
    raise CheckpointError(
        cause, f"resume it until it has saved one ({run.resume_command()}), or name another model"
    )


def _adapters_error(run: Path) -> ModelError:
    quoted = shlex.quote(str(run))
    return ModelError(
        f"{run} trained adapters, which are not a complete model",
        f"merge them with `trimtab merge {quoted} MODEL` and set model.name=MODEL; or continue training the adapter: "
        f"`trimtab export peft {quoted} ADAPTER`, then set lora.adapter=ADAPTER and the model that it was trained on",
    )
