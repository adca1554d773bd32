"""Standard output whose errors name it: a full disk behind `trimtab … > file` has no file name of its own."""

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
    """The descriptor of standard output; an error of a write carries NAME as its file name."""

    def write(self, data: Any, /) -> Any:
        """Write bytes as FileIO does."""
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, NAME) from None


@contextmanager
def deprecations_as_notes() -> Iterator[None]:
    """Prints each FutureWarning, as of a renamed recipe key, as one line `note: …` on standard error."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, *place: Any, **options: Any) -> None:
            if category is FutureWarning:
                print(f"note: {message}", file=sys.stderr)
            else:
                shown(message, category, *place, **options)

        warnings.showwarning = show
        yield


def open_closed_streams() -> None:
    """Send standard streams that the caller closed (`>&-`, some daemons) nowhere; Python has None for them.

    The descriptors are opened too, lowest first: otherwise the next file that is opened would be written to as output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))


def name_output() -> None:
    """Replace `sys.stdout` by one on the same descriptor whose errors name it.

    Example:
        >>> name_output()                                                       # doctest: +SKIP
        >>> print("x", flush=True)  # with > /dev/full                          # doctest: +SKIP
        OSError: [Errno 28] No space left on device: 'standard output'
    """
    old = sys.stdout
    if sys.platform == "win32" or not isinstance(old, io.TextIOWrapper):  # Windows' console is no file
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
    """Send the rest of the output nowhere: Python would try to write it once more at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
