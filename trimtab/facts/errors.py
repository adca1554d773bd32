"""Exception types for problems with the user's recipe, data or machine.

Each error states its cause and, if there is one, the remedy, in a line or two. The command line prints
`error: cause; remedy` without a traceback and exits with the class's code. Internal errors of trimtab are assertions.
"""

from __future__ import annotations

import errno
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


OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "CUDA error: out of memory",  # the driver: a context, pinned memory
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "std::bad_alloc",
)
"""Parts of the messages of torch's and Triton's errors when memory runs out; torch is not needed to read them."""


class OutOfMemory(ResourceError):
    """The GPU or the host ran out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch or Triton means that the GPU or the host ran out of memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    # torch's exception is recognized by its name, so that torch need not be imported.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # mapping a file of weights
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in OUT_OF_MEMORY_MESSAGES
    )


class TrainingError(TrimtabError):
    """Training had to stop: a loss or gradient is not finite, or no token contributes to the loss."""

    exit_code = 7


class MissingDependency(TrimtabError):
    """The requested feature needs an optional package."""

    exit_code = 8


class HubError(TrimtabError):
    """The hub could not be reached or denied the request."""

    exit_code = 9


def release_frames(error: BaseException | None) -> None:
    """Clears the local variables in the traceback frames of an exception and its causes.

    An exception that outlives its handler, as in notebooks, otherwise keeps every tensor of those frames alive.

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
