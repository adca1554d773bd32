"""Where the parts of a trained model lie in a run folder: weights in a checkpoint, config and tokenizer in `model/`."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARAMETERS = "parameters."
"""Names of weights in a checkpoint begin with this; optimizer states have other beginnings."""


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint in a run folder.

    Example:
        >>> is_checkpoint(Path("runs/a/checkpoints/step-00000100"))  # doctest: +SKIP
        True
    """
    return folder.parent.name == CHECKPOINTS and (folder / MANIFEST).is_file()


def is_empty(folder: Path) -> bool:
    """Whether a folder is known to hold nothing; a `step-…` folder like that is no checkpoint.

    Example:
        >>> is_empty(Path("runs/a/checkpoints/step-00000100"))  # doctest: +SKIP
        False
    """
    try:
        return not any(folder.iterdir())
    except OSError:  # cannot be read: whatever is in it, it is not ignored
        return False


def config_folder(folder: Path) -> Path:
    """Where config and tokenizer of a model folder are: in itself, or, for a checkpoint, in its run's `model/`."""
    return folder.parent.parent / "model" if is_checkpoint(folder) else folder
