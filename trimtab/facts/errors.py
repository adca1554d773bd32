"""Exception types for problems of the user's recipe, data or machine.

Each error states its cause and, where there is one, the remedy, in a line or two. The command line prints
`error: cause; remedy` without a traceback and exits with the class's code. Mistakes of our own are asserts.
"""

from __future__ import annotations

import traceback


class TrimtabError(Exception):
    """A problem that the user can fix.

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


class OutOfMemory(ResourceError):
    """The GPU or the host ran out of memory while a command was at work."""


class TrainingError(TrimtabError):
    """Training had to stop: a loss or gradient that is not finite, or nothing to learn."""

    exit_code = 7


class MissingDependency(TrimtabError):
    """An optional package is needed for what was asked."""

    exit_code = 8


class HubError(TrimtabError):
    """The hub could not be reached, or refused."""

    exit_code = 9


def release_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames that an exception, and what caused it, has left.

    An exception that is kept, as notebooks do, otherwise keeps every tensor of those frames in memory.

    Example:
        >>> def fail():
        ...     large = bytes(1000)
        ...     raise MemoryError
        >>> try:
        ...     fail()
        ... except MemoryError as error:
        ...     release_frames(error)
        ...     error.__traceback__.tb_next.tb_frame.f_locals
        {}
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
