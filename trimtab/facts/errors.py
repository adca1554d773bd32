"""What can go wrong through a person's recipe, data or machine, as exception types.

Each error says its cause and, where there is one, the remedy, in a line or two. The command line prints
`error: cause; remedy` without a traceback and exits with the class's code. Mistakes of our own are asserts.
"""

from __future__ import annotations


class TrimtabError(Exception):
    """A problem that a person can act on.

    Example:
        >>> str(DataError("data.txt is empty", "give a file with text in it"))
        'data.txt is empty; give a file with text in it'
    """

    exit_code = 1

    def __init__(self, cause: str, remedy: str | None = None) -> None:
        super().__init__(cause if remedy is None else f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class RecipeError(TrimtabError):
    """The recipe, or an option on the command line, cannot be used as written."""

    exit_code = 2


class DataError(TrimtabError):
    """A data set is missing, empty, unreadable, changed or not what the recipe says."""

    exit_code = 3


class ModelError(TrimtabError):
    """Weights, a config or a tokenizer are missing, malformed or do not fit together."""

    exit_code = 4


class CheckpointError(TrimtabError):
    """A checkpoint or run folder cannot be written, read or continued."""

    exit_code = 5


class ResourceError(TrimtabError):
    """The machine does not have what the run needs: memory, disk space, rights, a device."""

    exit_code = 6


class TrainingError(TrimtabError):
    """Training had to stop: a loss or gradient that is not finite, or nothing to learn."""

    exit_code = 7


class MissingDependency(TrimtabError):
    """An optional package is needed for what was asked."""

    exit_code = 8


class HubError(TrimtabError):
    """The hub could not be reached, or refused."""

    exit_code = 9
