"""Layout of a run folder: weights are in checkpoints, config and tokenizer in `model/`."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETERS = "parameters."
"""Prefix of the weights' names in a checkpoint; optimizer states have other prefixes."""


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint in a run folder.

    Example:
        >>> is_checkpoint(Path("runs/a/checkpoints/step-00000100"))  # doctest: +SKIP
        True
    """
    return folder.parent.name == CHECKPOINTS and (folder / MANIFEST).is_file()


def is_empty(folder: Path) -> bool:
    """Whether a folder is known to be empty; an empty `step-…` folder is not a checkpoint.

    Example:
        >>> is_empty(Path("runs/a/checkpoints/step-00000100"))  # doctest: +SKIP
        False
    """
    try:
        return not any(folder.iterdir())
    except OSError:  # unreadable: treated as not empty, so that it is not ignored
        return False


def config_folder(folder: Path) -> Path:
    """Returns the folder of a model's config and tokenizer: the folder itself, or a checkpoint's `../../model`."""
    return folder.parent.parent / "model" if is_checkpoint(folder) else folder
