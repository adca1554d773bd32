"""`trimtab`: the verbs, and how errors reach a person.

Each verb's file is imported when that verb runs, so that `trimtab --help` stays quick and needs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main

from trimtab import __version__
from trimtab.facts.errors import MissingDependency, TrimtabError

VERBS = {
    "demo": "Train the embedded model on mathematics here and now: two minutes, nothing to download.",
    "train": "Train what a recipe describes, or continue a run that stopped.",
    "plan": "Say what a recipe will take, without training anything.",
    "eval": "Measure a model: loss on text, grammar and reasoning probe, exact answers.",
    "generate": "Write text with a model, streaming.",
    "export": "Turn a run into files that other tools load.",
    "report": "Draw a run's report page again from its data.",
    "doctor": "Look at this machine: devices, versions, what will be used and what is missing.",
    "schema": "Print the JSON schema of recipes, for editors.",
}

# typer carries its own copy of click in newer versions; the base of its public exceptions is the same in all.
UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

TORCH_REMEDY = "pip install 'trimtab[train]'"


class LazyVerbs(typer.core.TyperGroup):
    """Knows every verb's one line from the table above; loads its module only to run it or to show its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Verbs in the order a newcomer meets them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb's command; for the overview a stub that carries its one line."""
        if cmd_name not in VERBS:
            return None
        if ctx.resilient_parsing or cmd_name not in sys.argv[1:]:
            return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name], callback=lambda: None)
        app = import_module(f"trimtab.cli.{cmd_name}").app
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyVerbs,
    help="Train large language models on the hardware you have, and know before the run what it will take.",
    epilog="Start with `trimtab demo`. Each verb explains itself: `trimtab train --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """The root has no work of its own."""
    if version:
        print(f"trimtab {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0 done · 1 failed · 2 the recipe or an option is wrong · 3 data · 4 model files · 5 run folder or checkpoint ·
    6 memory, disk or device · 7 training had to stop · 8 a package is missing · 9 the hub · 130/143 stopped by a
    signal, everything saved.
    """
    if arguments is not None:
        sys.argv[1:] = arguments
    try:
        code: Any = typer.main.get_command(app).main(standalone_mode=False)
    except TrimtabError as error:
        return _fail(str(error), error.exit_code)
    except UsageProblem as error:
        error.show()
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "pyarrow", "psutil"):
            raise
        missing = MissingDependency(f"this needs {error.name}, which is not installed", TORCH_REMEDY)
        return _fail(str(missing), missing.exit_code)
    return code if isinstance(code, int) else 0


def _fail(text: str, code: int) -> int:
    from trimtab.report.plain import plain

    print(f"error: {plain(text)}", file=sys.stderr)
    return code


def entry() -> None:
    """The installed script."""
    raise SystemExit(main())


if __name__ == "__main__":
    entry()
