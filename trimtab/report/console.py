"""The terminal as everything here prints to it."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class PatientConsole(Console):
    """A console that outlives its reader: behind `| head` or a closed terminal it falls silent, and work goes on."""

    def on_broken_pipe(self) -> None:
        """rich would end the program here; a day of training is worth more than its progress lines."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_console(**options: Any) -> Console:
    """A console without syntax colouring of numbers and paths; options as rich's.

    Example:
        >>> new_console(quiet=True).print("nobody sees this")
    """
    return PatientConsole(highlight=False, **options)
