"""Regenerates docs/reference/*.md, docs/recipe.schema.json and the tables in README.md.

`python tools/docs.py` writes them, `python tools/docs.py --check` only reports which are out of date. The command line
reference is generated from the docstrings, arguments and options of the commands; a test compares them. Needs no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc, unwrap
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import typer.main

from benchmarks.end_to_end import table as end_to_end
from benchmarks.end_to_end.picture import losses
from benchmarks.kernels.table import page, read
from trimtab.cli.commands import VERBS
from trimtab.facts import errors
from trimtab.recipe import docs as recipe_docs

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "benchmarks" / "results"

_HEAD = """\
<!-- Made by `python tools/docs.py` from the commands' help in trimtab/cli/; edit the docstrings there. -->
# Command line reference

`trimtab COMMAND --help` prints the same in the terminal. `trimtab --help` lists the commands, `trimtab
--version` prints the version. Results go to standard output; errors go to standard error as `error: cause; remedy`,
without a traceback.

| command | what it does |
|---|---|
"""

_KERNELS = """\
<!-- Made by `python tools/docs.py` from benchmarks/results/kernels-h200.jsonl. -->
# Kernel benchmarks

`python -m benchmarks.kernels` on a CUDA GPU: every implementation and every installed peer gets the same inputs, is
compared with ground truth in higher precision, and is then timed alternately with the others. Implementations outside
the allowed error are not timed. trimtab's kernels are bold.

"ms" is the median device time with a cold cache; an empty kernel takes 0.003 in this harness. "fastest peer / this" is
the time of the fastest exact peer divided by this one: above 1 means faster than all peers. "lower bound / this" is the
ratio of the lower bound to the measured time; the bound follows from the operation's bytes and FLOPs and the device's
measured peak rates. "MiB" is the peak memory above the inputs, results included.

"""

_END_TO_END = """\
<!-- Made by `python tools/docs.py` from benchmarks/results/end-to-end-h200.jsonl. -->
# Whole training steps

`python -m benchmarks.end_to_end` on a CUDA GPU: one training step without gradient accumulation (forward, backward,
8-bit AdamW) of trimtab and of the peers, each contestant in a separate process, with the same random weights, sequences
and initial adapter; medians of synchronized steps. "trimtab" may use the whole GPU; "trimtab tight" has the
lowest-memory peer's peak as its limit. Ratios above 1 mean that trimtab is faster. The floor is the time of the step's
matrix products at the device's best measured matmul rate. Packed sequences contain documents of 400 tokens on average
with isolated attention. Unsloth ran without xformers and flash-attn, on torch's attention, which costs it most on
packed sequences. The cases of a row were measured on different days: the data has commit and time of each, and the
machines were of the same kind.

The longest contexts are planned for a GPU with so many GB (0.7 GB of which are for the CUDA context): "by arithmetic"
with unlimited host memory, "proposed here" with the memory of this host. A real step under a cap of the allocator
confirms the length, with the full model or, where that would take more than ten minutes, with 8 of its 32 layers under
a cap reduced by the memory of the others. The time of the first step includes compiling kernels and pinning host
memory.

With adapters, losses agree step by step. In full fine-tuning the weights are bf16 and the peers round each update to
nearest, which loses most of it at a learning rate of 1e-5. trimtab rounds stochastically, so that no update is lost on
average and the loss falls faster; "trimtab nearest" is the same step with rounding to nearest, only to compare losses.
The loss of every step, one line per contestant:

![losses of the same steps](end-to-end-losses.svg)

"""

_BEGIN, _END = "<!-- made by tools/docs.py -->", "<!-- end -->"

_SIGNALS = (
    ("130", "stopped by Ctrl-C (SIGINT); a run that was training is saved"),
    ("141", "the reader of the output closed it, as `| head` does"),
    ("143", "stopped by SIGTERM; a run that was training is saved"),
)
_KINDS = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH", bool: ""}


def exit_codes() -> list[tuple[str, str]]:
    """(code, meaning) of every exit code, from the error classes."""
    found = [("0", "success"), ("1", "failed, without a specific code")]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.TrimtabError) and kind.exit_code > 1:
            meaning = (kind.__doc__ or "").splitlines()[0].rstrip(".")
            found.append((str(kind.exit_code), meaning[0].lower() + meaning[1:]))
    return [*found, *_SIGNALS]


def commands() -> Iterator[tuple[str, Any]]:
    """("train", command), …, ("export hf", command): all commands and their subcommands."""
    for verb in VERBS:
        command = typer.main.get_command(import_module(f"trimtab.cli.{verb}").app)
        below = getattr(command, "commands", None)
        if below is None:
            yield verb, command
            continue
        for name, inner in below.items():
            yield f"{verb} {name}", inner


def cli_page() -> str:
    """The command line reference as Markdown."""
    found = list(commands())
    rows = [f"| [`{name}`](#{_anchor(name)}) | {_first_sentence(command)} |" for name, command in found]
    parts = [_HEAD + "\n".join(rows) + "\n"]
    parts += [_section(name, command) for name, command in found]
    table = "\n".join(f"| {code} | {meaning} |" for code, meaning in exit_codes())
    parts.append(f"## Exit codes\n\n| code | meaning |\n|---|---|\n{table}\n")
    return "\n".join(parts)


def kernels_page() -> str:
    """The kernel benchmarks as Markdown."""
    return _KERNELS + page(list(read(RESULTS / "kernels-h200.jsonl").values()))


def files(folder: Path = DOCS) -> Iterator[tuple[Path, str]]:
    """(path, text) of every generated file."""
    yield folder / "reference" / "cli.md", cli_page()
    yield folder / "reference" / "kernels.md", kernels_page()
    records = end_to_end.read(RESULTS / "end-to-end-h200.jsonl")
    yield folder / "reference" / "end-to-end.md", _END_TO_END + end_to_end.page(records)
    yield folder / "reference" / "end-to-end-losses.svg", losses(records)
    yield folder.parent / "README.md", with_figures(README.read_text(encoding="utf-8"), records)
    yield from recipe_docs.files(folder)


def with_figures(text: str, records: dict[str, dict[str, Any]]) -> str:
    """The README with the tables between its two marks regenerated."""
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{end_to_end.summary(records)}{_END}{after}"


def _anchor(name: str) -> str:
    return f"trimtab-{name.replace(' ', '-')}"


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([f"trimtab {name}", *(_usage_of(a) for a in arguments), "[OPTIONS]" if options else ""])
    parts = [f"## `trimtab {name}`\n", f"```text\n{usage.strip()}\n```\n", _fenced(_help_of(command))]
    if arguments:
        rows = [f"| `{_usage_of(a)}` | {_cell(a.help)} |" for a in arguments]
        parts.append("| argument | |\n|---|---|\n" + "\n".join(rows) + "\n")
    if options:
        kinds = _kinds(command)
        rows = [f"| {_flags(o, kinds[o.name])} | {_cell(o.help)} | {_default(o)} |" for o in options]
        parts.append("| option | | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _help_of(command: Any) -> str:
    return cleandoc(command.callback.__doc__ or "")


def _first_sentence(command: Any) -> str:
    return " ".join(_help_of(command).split("\n\n")[0].split())


def _usage_of(argument: Any) -> str:
    if argument.metavar:
        return argument.metavar
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _flags(option: Any, kind: str) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    kind = option.metavar or kind
    return f"`{names} {kind}`" if kind else f"`{names}`"


def _kinds(command: Any) -> dict[str, str]:
    """The kind of each parameter, from the function's annotations, because typer's internals differ by version."""
    found = {}
    for name, hint in get_type_hints(unwrap(command.callback)).items():
        if name == "return":
            continue
        parts = [part for part in get_args(hint) or (hint,) if part is not NoneType]
        parts = [get_args(part)[0] if get_origin(part) is list else part for part in parts]
        found[name] = _KINDS.get(parts[0], "")
    return found


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or callable(value) or value == []:
        return ""
    if value is True:
        return f"`{option.opts[0]}`"
    return f"`{value}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _fenced(text: str) -> str:
    """Convert indented examples of a docstring to fenced blocks."""

    def fence(match: re.Match[str]) -> str:
        lines = [line[4:] for line in match[0].strip("\n").splitlines()]
        return "```sh\n" + "\n".join(lines) + "\n```\n"

    return re.sub(r"(?:^ {4}.*\n?(?:\n(?= {4}))?)+", fence, text + "\n", flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Write or check the files; returns 1 if the check finds a stale one."""
    stale = 0
    for path, text in files():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'out of date' if '--check' in arguments else 'written'}: {path.relative_to(DOCS.parent)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
