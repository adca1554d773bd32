"""Runs the command line in this process and captures its output."""

from __future__ import annotations

import contextlib
import io

from trimtab.cli.main import main


def call(*words: object) -> tuple[int, str]:
    """(exit code, everything printed)."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main([str(word) for word in words])
    return code, shown.getvalue()
