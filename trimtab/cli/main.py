"""The installed script's entry point: handles Ctrl-C before anything else is imported, then runs the command line."""

from __future__ import annotations

from trimtab.cli.interrupts import EXIT_CODE, Interrupts, exit_on_interrupt


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line as `trimtab.cli.commands.main` does; returns the exit code.

    Example:
        >>> main(["--version"])
        trimtab 0.1.0
        0
    """
    from trimtab.cli import commands

    return commands.main(arguments)


def entry() -> None:
    """Runs the installed script and exits."""
    try:
        Interrupts().install()
        from trimtab.cli import output

        output.open_closed_streams()
        output.name_output()
        code = main()
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = EXIT_CODE
    exit_on_interrupt(code)
    raise SystemExit(code)


if __name__ == "__main__":
    entry()
