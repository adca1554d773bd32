"""`trimtab`: the verbs, and how errors are printed.

Each verb's file is imported when that verb runs, so that `trimtab --help` stays quick and needs no torch.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import shlex
import sys
from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main

from trimtab import __version__
from trimtab.cli import output
from trimtab.facts.errors import MissingDependency, RecipeError, ResourceError, TrimtabError
from trimtab.facts.names import shortened

VERBS = {
    "demo": "Train the embedded model on mathematics here and now: two minutes, nothing to download.",
    "train": "Train what a recipe describes, or continue a run that stopped.",
    "plan": "Say what a recipe will take, without training anything.",
    "runs": "List runs: how far each came, its state, what it takes on disk.",
    "eval": "Measure a model: loss on text, grammar and reasoning probe, exact answers.",
    "generate": "Write text with a model: one prompt, streaming, or a whole file of them.",
    "chat": "Talk with a model that has a chat template.",
    "export": "Turn a run into files that other tools load.",
    "merge": "Merge a run's adapter into the weights it was trained on.",
    "report": "Draw a run's report page again from its data.",
    "bench": "Measure where time and memory go: studies with tables, charts and a page.",
    "profile": "Measure one step of a recipe: time by kernel, memory over time, what would help most.",
    "numerics": "See what dtypes do to numbers: stored, summed, cast and quantized.",
    "doctor": "Look at this machine: devices, versions, what will be used and what is missing.",
    "schema": "Print the JSON schema of recipes, for editors.",
}

MEANT = {"version": "--version", "resume": "train --resume RUN"}
"""Verbs of other tools, and what they are here."""

# typer carries its own copy of click in newer versions; the base of its public exceptions is the same in all.
UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""A full or read-only disk and missing permissions, if no package has handled them."""


class LazyVerbs(typer.core.TyperGroup):
    """Knows every verb's one line from the table above; loads its module only to run it or to show its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Verbs in the order a newcomer meets them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stub that carries the verb's one line, for the overview."""
        if cmd_name not in VERBS:
            return None
        return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name], callback=lambda: None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that was asked for, loaded; a RecipeError with the nearest one for a word that is none."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise _unknown_verb(args[0])
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name is not None:
            command = typer.main.get_command(import_module(f"trimtab.cli.{name}").app)
            command.name = name
        return name, command, rest


def _unknown_verb(word: str) -> RecipeError:
    near = [MEANT[word]] if word in MEANT else difflib.get_close_matches(word, VERBS, n=1, cutoff=0.5)
    version = f" (this is trimtab {__version__})" if word == "version" else ""
    cause = f"there is no verb '{shortened(word)}'{version}"
    if word.endswith((".yaml", ".yml")):
        return RecipeError(cause, f"did you mean `trimtab train {shortened(word)}`?")
    return RecipeError(
        cause, f"did you mean `trimtab {near[0]}`?" if near else f"the verbs are {', '.join(VERBS)}"
    )


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
    """Runs the command line; returns the exit code: 0, that of the error (`trimtab.facts.errors`), 128 + a signal's."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except TrimtabError as error:
        return _fail(str(error), error.exit_code)
    except UsageProblem as error:  # `trimtab` alone, which shows the help
        error.show()
        return 2
    except (typer.Abort, KeyboardInterrupt) as error:
        return _fail(str(error) or "stopped", 130)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "pyarrow", "psutil"):
            raise
        missing = MissingDependency(
            f"this needs {error.name}, which is not installed", "pip install 'trimtab[train]'"
        )
        return _fail(str(missing), missing.exit_code)
    except BrokenPipeError:
        # The reader of our output (`| head`) closed the pipe. Nothing may be flushed into it at exit.
        output.drop_output()
        return 128 + 13
    except (OSError, MemoryError, RuntimeError) as error:
        lacking = _lacking(error)
        if lacking is None:
            raise
        return _fail(str(lacking), lacking.exit_code)
    return code


def _run(arguments: list[str]) -> int:
    """The verb itself. Not through typer's own `main`, which swallows Ctrl-C and closed pipes."""
    command: Any = typer.main.get_command(app)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        with output.deprecations_as_notes(), command.make_context("trimtab", list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as done:
        return int(done.exit_code)
    except UsageProblem as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise _misused(error, arguments) from None
    return code if isinstance(code, int) else 0


def _misused(error: Any, arguments: list[str]) -> RecipeError:
    """A missing argument or value, an unknown option, as an error of trimtab's own form."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"trimtab {arguments[0]}"
    possible = sorted(getattr(error, "possibilities", None) or [])
    text = f"no such option: {error.option_name}" if possible else " ".join(error.format_message().split())
    cause = f"{text[:1].lower()}{text[1:]}".rstrip(".")
    override = _override(getattr(error, "option_name", None), arguments)
    if override is not None and path in ("trimtab train", "trimtab plan", "trimtab profile"):
        return RecipeError(cause, f"keys of the recipe are written without dashes: {override}")
    near = f"did you mean {' or '.join(possible)}? " if possible else ""
    return RecipeError(cause, f"{near}see `{path} --help`")


def _override(option: str | None, arguments: list[str]) -> str | None:
    """What `--max_steps 5` was meant to be, `max_steps=5`; None for an option that is not named like a recipe key."""
    from trimtab.recipe import Recipe

    key = (option or "").lstrip("-").replace("-", "_")
    if key.partition(".")[0] not in Recipe.model_fields:
        return None
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == option:
            value = value if equals or following.startswith("-") else following
            return f"{key}={shlex.quote(value) if value else 'VALUE'}"
    return f"{key}=VALUE"


def _lacking(error: Exception) -> TrimtabError | None:
    """What the machine lacks or its file system refuses; None for a bug of ours, which keeps its traceback."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return RecipeError(
            f"'{shortened(str(error.filename))}' is too long for a file name", "give a shorter name"
        )
    if isinstance(error, OSError) and error.filename == output.NAME:
        output.drop_output()
        return ResourceError(
            f"{output.NAME}: {error.strerror}", "free some space, or send the output somewhere else"
        )
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        where = f" ({error.filename})" if error.filename else ""
        return ResourceError(f"{error.strerror}{where}", "free some space or check the folder's rights")
    # torch.OutOfMemoryError, and what torch's CPU allocator raises; neither may be imported here for its type.
    if isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__:
        what = "the device has no memory left"
    elif "can't allocate memory" in str(error):
        what = "the machine has no memory left"
    else:
        return None
    return ResourceError(what, "lower per_device_train_batch_size or max_seq_length; see `trimtab plan`")


def _fail(text: str, code: int) -> int:
    from trimtab.report.plain import plain

    print(f"error: {plain(text)}", file=sys.stderr)
    return code
