"""`trimtab`: the commands, and how errors are printed.

Each command's module is imported only when that command runs, so `trimtab --help` is fast and needs no torch.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import re
import shlex
import sys
from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main

from trimtab import __version__
from trimtab.cli import output
from trimtab.facts.errors import (
    MissingDependency,
    RecipeError,
    ResourceError,
    TrimtabError,
    is_out_of_memory,
)
from trimtab.facts.names import shortened

VERBS = {
    "demo": "Train the bundled model on mathematics: two minutes, nothing to download.",
    "train": "Train with a recipe, or resume a run.",
    "plan": "Predict memory, time and disk space of a recipe, without training.",
    "runs": "List runs with their progress, state and size on disk.",
    "eval": "Evaluate a model: loss on text, grammar and reasoning probe, exact answers.",
    "generate": "Generate text from one prompt, streaming, or from a file of prompts.",
    "chat": "Chat with a model that has a chat template.",
    "export": "Export a run to files that other tools load.",
    "merge": "Merge a run's adapter into its base model.",
    "report": "Rebuild a run's HTML report from its metrics.",
    "bench": "Measure where time and memory go: studies with tables, charts and an HTML report.",
    "profile": "Profile one step of a recipe: time by kernel, memory over time, the changes that would help most.",
    "numerics": "Show the rounding errors of dtypes: storage, sums, casts and quantization.",
    "doctor": "Check this machine: devices, versions, attention backend, missing packages.",
    "schema": "Print the JSON schema of recipes, for editors.",
}

EQUIVALENTS = {
    "version": "--version",
    "resume": "train --resume RUN",
    "finetune": "train",
    "fine-tune": "train",
    "pretrain": "train",
    "inference": "generate",
    "evaluate": "eval",
    "merge-lora": "merge",
}
"""Commands of other tools → their equivalents in trimtab."""

# typer carries its own copy of click in newer versions; the base of its public exceptions is the same in all.
UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Errors of a full or read-only disk and of missing permissions that no package has handled."""


class LazyVerbs(typer.core.TyperGroup):
    """Lists commands from the table above; imports a command's module only to run it or to show its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the commands in the order in which a new user needs them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a stub with the command's summary, for the overview."""
        if cmd_name not in VERBS:
            return None
        return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name], callback=lambda: None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Loads the requested command; raises a RecipeError that suggests the closest command for an unknown word."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise _unknown_verb(args[0])
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name is not None:
            command = typer.main.get_command(import_module(f"trimtab.cli.{name}").app)
            command.name = name
        return name, command, rest


def _unknown_verb(word: str) -> RecipeError:
    near = (
        [EQUIVALENTS[word]]
        if word in EQUIVALENTS
        else difflib.get_close_matches(word, VERBS, n=1, cutoff=0.5)
    )
    version = f" (this is trimtab {__version__})" if word == "version" else ""
    cause = f"there is no command '{shortened(word)}'{version}"
    if word.endswith((".yaml", ".yml")):
        return RecipeError(cause, f"did you mean `trimtab train {shortened(word)}`?")
    return RecipeError(
        cause, f"did you mean `trimtab {near[0]}`?" if near else f"the commands are {', '.join(VERBS)}"
    )


app = typer.Typer(
    cls=LazyVerbs,
    help="Train large language models on the hardware you have. `trimtab plan` predicts memory and time beforehand.",
    epilog="Start with `trimtab demo`. For the help of a command: `trimtab train --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Handles the options of `trimtab` itself."""
    if version:
        print(f"trimtab {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, the error's exit code (`trimtab.facts.errors`) or 128 + the signal number."""
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
        # The reader of the output (`| head`) closed the pipe. Nothing may be flushed into it at exit.
        output.drop_output()
        return 128 + 13
    except (OSError, MemoryError, RuntimeError) as error:
        shortage = _resource_error(error)
        if shortage is None:
            raise
        return _fail(str(shortage), shortage.exit_code)
    return code


def _run(arguments: list[str]) -> int:
    """Runs the command without typer's own `main`, which swallows Ctrl-C and closed pipes."""
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
    """Converts a usage error (missing argument or value, unknown option) into a RecipeError."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"trimtab {arguments[0]}"
    possible = sorted(getattr(error, "possibilities", None) or [])
    text = f"no such option: {error.option_name}" if possible else " ".join(error.format_message().split())
    # A value that pydantic refused: `--top-p must be less than or equal to 1`.
    text = re.sub(
        r"Invalid value for '(\S+)'[^:]*: Input should be (.*?)(, unable to .*)?$", r"\1 must be \2", text
    )
    cause = f"{text[:1].lower()}{text[1:]}".rstrip(".")
    override = _override(getattr(error, "option_name", None), arguments)
    if override is not None and path in ("trimtab train", "trimtab plan", "trimtab profile"):
        return RecipeError(cause, f"write recipe keys without dashes: {override}")
    near = f"did you mean {' or '.join(possible)}? " if possible else ""
    return RecipeError(cause, f"{near}see `{path} --help`")


def _override(option: str | None, arguments: list[str]) -> str | None:
    """Returns `max_steps=5` for `--max_steps 5`; None for an option that is not named like a recipe key."""
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


def _resource_error(error: Exception) -> TrimtabError | None:
    """Converts a lack of memory, disk space or permissions into a TrimtabError; None for a bug, which is re-raised."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return RecipeError(
            f"'{shortened(str(error.filename))}' is too long for a file name", "give a shorter name"
        )
    if isinstance(error, OSError) and error.filename == output.NAME:
        output.drop_output()
        return ResourceError(
            f"{output.NAME}: {error.strerror}", "free some space, or redirect the output elsewhere"
        )
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        where = f" ({error.filename})" if error.filename else ""
        return ResourceError(f"{error.strerror}{where}", "free some space or check the folder's permissions")
    if not is_out_of_memory(error):
        return None
    on_host = isinstance(error, OSError) or "can't allocate memory" in str(error)
    what = "the machine is out of memory" if on_host else "the device is out of memory"
    return ResourceError(what, "lower per_device_train_batch_size or max_seq_length; see `trimtab plan`")


def _fail(text: str, code: int) -> int:
    from trimtab.report.plain import plain

    print(f"error: {plain(text)}", file=sys.stderr)
    return code
