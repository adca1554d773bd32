"""Notices to the user of the Python API."""

from __future__ import annotations

import sys


def tell(message: str) -> None:
    """Prints a line to standard error: what a program writes to standard output stays as it was."""
    from trimtab.report.plain import plain

    print(plain(message), file=sys.stderr)
