"""The console that this package prints to."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class PatientConsole(Console):
    """A console that ignores a closed pipe or terminal: it then prints nothing, and work continues."""

    def on_broken_pipe(self) -> None:
        """Ignores the broken pipe. rich would exit here, which would end the training run."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_console(**options: Any) -> Console:
    """A console without syntax colouring of numbers and paths; options as rich's.

    Example:
        >>> new_console(quiet=True).print("nobody sees this")
    """
    return PatientConsole(highlight=False, **options)
