"""Standard input that accepts every byte, whatever the locale."""

from __future__ import annotations

import io
import sys
from typing import TextIO


def standard_input() -> TextIO:
    """Returns `sys.stdin`; bytes that do not decode become surrogates, as in command-line arguments.

    Python itself does so only in the C locale and raises UnicodeDecodeError in others.

    Example:
        >>> standard_input().read()  # with printf 'Gr\\xfc\\xdfe'                # doctest: +SKIP
        'Gr\\udcfc\\udcdfe'
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin
