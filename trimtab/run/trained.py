"""A run folder as the model of another run: its weights at a checkpoint. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from trimtab.checkpoint import Manifest, verify
from trimtab.checkpoint.folder import by_age, step_folders
from trimtab.checkpoint.manifest import Damaged
from trimtab.facts.errors import CheckpointError, ModelError
from trimtab.facts.run_places import CHECKPOINTS, is_checkpoint
from trimtab.run.choices import read_model_choices
from trimtab.run.folder import RunFolder
from trimtab.run.record import had_saved

_POINTER_BYTES = 64


def trained_checkpoint(name: str) -> Path | None:
    """The checkpoint that a name stands for; None for whatever is no run folder, nor inside of one.

    A run folder stands for its latest good checkpoint, `RUN/checkpoints/best` for its best one,
    `RUN/checkpoints/step-…` for itself. Sizes of files are compared here; `check_bytes` compares their checksums.
    Checkpoints of adapters are refused: they are no whole model.

    Example:
        >>> trained_checkpoint("runs/demo")  # doctest: +SKIP
        PosixPath('runs/demo/checkpoints/step-00000100')
    """
    path = Path(name).expanduser()
    if path.parent.name == CHECKPOINTS and path.is_file():  # a pointer: latest, best
        found = path.parent / _pointed(path)
    elif is_checkpoint(path):
        found = path
    elif (path / "recipe.yaml").is_file() and (path / "model" / "config.json").is_file():
        found = _latest(RunFolder(path))
    else:
        return None
    if _checked(found, checksums=False).base is not None:
        raise _adapters(found.parent.parent)
    return found


def check_bytes(checkpoint: Path) -> None:
    """CheckpointError unless every byte of a checkpoint is the one that was written."""
    _checked(checkpoint, checksums=True)


def _checked(checkpoint: Path, *, checksums: bool) -> Manifest:
    try:
        return verify(checkpoint, checksums=checksums)
    except Damaged as error:
        raise CheckpointError(
            f"{checkpoint} is damaged: {error}", "name another checkpoint of that run, or another model"
        ) from error


def _pointed(path: Path) -> str:
    text = path.read_bytes()[:_POINTER_BYTES].decode("utf-8", errors="replace").strip()
    if not is_checkpoint(path.parent / text):
        raise CheckpointError(
            f"{path} names no checkpoint", "name the checkpoint's folder, or the run folder"
        )
    return text


def _latest(run: RunFolder) -> Path:
    good = by_age(run.checkpoints)
    if good:
        return good[0][0]
    cause = f"{run.path} has no good checkpoint to start from"
    kept = read_model_choices(run) if run.choices.is_file() else None
    # Resuming is refused where checkpoints are damaged or gone.
    if step_folders(run.checkpoints) or (kept and had_saved(run, kept.save_steps)):
        raise CheckpointError(
            cause, f"restore one from a copy, train its recipe again ({run.anew()}), or name another model"
        )
    raise CheckpointError(cause, f"train it until it has saved one ({run.resuming()}), or name another model")


def _adapters(run: Path) -> ModelError:
    quoted = shlex.quote(str(run))
    return ModelError(
        f"{run} trained adapters, which are no model by themselves",
        f"merge them with `trimtab merge {quoted} MODEL` and set model.name=MODEL; or go on with the adapter: "
        f"`trimtab export peft {quoted} ADAPTER`, then set lora.adapter=ADAPTER and the model that it was trained on",
    )
