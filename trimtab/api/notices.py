"""Notices to users of the Python API."""

from __future__ import annotations

import sys


def print_notice(message: str) -> None:
    """Prints a line to standard error, so that the standard output of the calling program is not changed."""
    from trimtab.report.plain import plain

    print(plain(message), file=sys.stderr)
