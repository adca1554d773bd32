"""Makes errors of standard output recognizable: an OSError of `trimtab … > file` contains no file name."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "standard output"


class _NamedFile(io.FileIO):
    """The descriptor of standard output; its write errors have NAME as their file name."""

    def write(self, data: Any, /) -> Any:
        """Write bytes as FileIO does."""
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, NAME) from None


@contextmanager
def deprecations_as_notes() -> Iterator[None]:
    """Prints each FutureWarning, such as for a renamed recipe key, and warnings of trimtab's own categories as one line
    `note: …` to standard error."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, *place: Any, **options: Any) -> None:
            if category is FutureWarning or category.__module__.startswith("trimtab."):
                print(f"note: {message}", file=sys.stderr)
            else:
                shown(message, category, *place, **options)

        warnings.showwarning = show
        yield


def open_closed_streams() -> None:
    """Connect standard streams that the caller closed (`>&-`, some daemons) to os.devnull; Python sets them to None.

    The descriptors are opened too, lowest first: otherwise the next opened file would receive the output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))


def name_output() -> None:
    """Replace `sys.stdout` by a stream on the same descriptor whose errors have NAME as their file name.

    Example:
        >>> name_output()                                                       # doctest: +SKIP
        >>> print("x", flush=True)  # with > /dev/full                          # doctest: +SKIP
        OSError: [Errno 28] No space left on device: 'standard output'
    """
    old = sys.stdout
    if sys.platform == "win32" or not isinstance(old, io.TextIOWrapper):  # the Windows console is not a file
        return
    raw = _NamedFile(old.fileno(), "w", closefd=False)
    buffer: Any = raw if isinstance(old.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    old.flush()
    sys.stdout = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def drop_output() -> None:
    """Redirect standard output to os.devnull, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
