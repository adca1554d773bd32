"""The rich console of this package."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class PipeSafeConsole(Console):
    """A console that stops printing when its pipe or terminal is closed; the program continues."""

    def on_broken_pipe(self) -> None:
        """Ignores the broken pipe. rich's default exits the process, which would end the training run."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def new_console(**options: Any) -> Console:
    """Returns a console without syntax highlighting; takes rich's options.

    Example:
        >>> new_console(quiet=True).print("this is not shown")
    """
    return PipeSafeConsole(highlight=False, **options)
