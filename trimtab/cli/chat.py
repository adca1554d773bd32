"""`trimtab chat`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.input import standard_input
from trimtab.cli.options import Adapter, Checkpoint, Device, Dtype, Revision
from trimtab.cli.sampling import Model, Seed, Stop, Temperature, TopK, TopP, sampling_options
from trimtab.cli.verb import new_app
from trimtab.facts.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.api.chat import Chat

app = new_app()

HELP = """\
/reset         forget the conversation but keep the system message
/system TEXT   set the system message; without TEXT, remove it
/save FILE     write the conversation as a line of training data ({"messages": […]})
/help          show this list
/exit          end the chat, like Ctrl-D
To send a message that begins with a slash, type two slashes. Ctrl-C stops an answer."""


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum tokens per answer; by default 512, or what fits into the model's context."
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
    seed: Seed = 0,
    checkpoint: Checkpoint = "latest",
    adapter: Adapter = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> int:
    """Chat with a model; each answer sees the conversation so far.

    The model needs a chat template; for a base model use `trimtab generate`.

        trimtab chat runs/assistant --system "Answer briefly."
        trimtab chat HuggingFaceTB/SmolLM2-135M-Instruct --temperature 0.7 --top-p 0.9

    Commands begin with a slash: `/reset`, `/system TEXT`, `/save FILE`, `/help`, `/exit`. Ctrl-C stops an answer and
    keeps the conversation, Ctrl-D ends it. When the conversation outgrows the model's context, the oldest turns are
    left out, with a notice.

    If standard input is not a terminal, every line of it is a message or a command; answers go to standard output and
    notices to standard error. The first error ends the command with that error's exit code.
    """
    from trimtab.run.device import require_torch

    require_torch()
    from trimtab.api import load

    options = sampling_options(max_new_tokens, temperature, top_p, top_k, stop, seed)
    loaded = load(
        model, revision=revision, checkpoint=checkpoint, adapter=adapter, dtype=dtype, device=device
    )
    conversation = loaded.chat(system=system, **options.keywords())
    positions = loaded.opened.decoder.shape.max_positions
    _print_notice(
        f"{loaded.opened.name}: {positions} tokens of context; /help lists the commands, Ctrl-D ends"
    )
    Session(conversation, positions, at_terminal=sys.stdin.isatty()).run()
    return 0


class Session:
    """Reads messages and commands until the input ends; at a terminal, errors do not end it."""

    def __init__(self, chat: Chat, positions: int, *, at_terminal: bool) -> None:
        self.chat, self.positions, self.at_terminal = chat, positions, at_terminal
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/help": lambda _: _print_notice(HELP),
        }

    def run(self) -> None:
        """Reads and answers lines until Ctrl-D, `/exit` or the end of the input."""
        for line in self._lines():
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text:
                try:
                    self._handle(text)
                except TrimtabError as error:
                    if not self.at_terminal:
                        raise
                    _print_notice(f"error: {error}")

    def _lines(self) -> Iterator[str]:
        if not self.at_terminal:
            yield from standard_input()
            return
        standard_input()  # `input` reads it
        with contextlib.suppress(ImportError):  # line editing and history, where Python has it
            import readline  # noqa: F401
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                _print_notice("\n/exit or Ctrl-D ends")

    def _handle(self, text: str) -> None:
        if not text.startswith("/") or text.startswith("//"):
            self._send(text.removeprefix("/") if text.startswith("//") else text)
            return
        name, _, rest = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            _print_notice(
                f"there is no command {name}; /help lists them (write // to send a message that begins with a slash)"
            )
        else:
            command(rest.strip())

    def _send(self, text: str) -> None:
        from trimtab.report.plain import plain

        before = self.chat.left_out

        def show(piece: str) -> None:
            nonlocal before
            before = self._notice(before)
            sys.stdout.write(plain(piece))
            sys.stdout.flush()

        try:
            done = self.chat.send(text, stream=show)
        except KeyboardInterrupt:
            if not self.at_terminal:
                raise
            print()
            _print_notice("[stopped; the conversation continues]")
            return
        self._notice(before)
        print(flush=True)
        if done.finish_reason == "length":
            _print_notice(
                f"[cut off after {len(done.ids)} tokens; raise --max-new-tokens for longer answers]"
            )

    def _notice(self, before: int) -> int:
        """Prints a notice if more than `before` messages are left out of the context; returns their number."""
        if self.chat.left_out > before:
            _print_notice(
                f"[the conversation is longer than the model's {self.positions} tokens: its oldest "
                f"{self.chat.left_out} messages are left out; /reset starts a new one]"
            )
        return self.chat.left_out

    def _reset(self, _: str) -> None:
        self.chat.reset()
        _print_notice("[a new conversation]")

    def _system(self, text: str) -> None:
        self.chat.system = text or None
        _print_notice("[system message set]" if text else "[no system message]")

    def _save(self, name: str) -> None:
        if not name:
            _print_notice("name a file: /save FILE")
            return
        if not self.chat.messages:
            _print_notice("there is nothing to save yet")
            return
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            _print_notice(f"{path} exists already; name another file")
            return
        line = json.dumps({"messages": self.chat.transcript()}, ensure_ascii=False) + "\n"
        try:
            path.write_text(line, encoding="utf-8", errors="replace")
        except OSError as error:
            _print_notice(f"{path} cannot be written ({error.strerror}); name another file")
            return
        self._saved.add(path.resolve())
        _print_notice(f"[written: {path}, {len(self.chat.messages)} messages]")


def _print_notice(message: str) -> None:
    """Prints a notice to standard error; standard output contains only the answers."""
    from trimtab.report.plain import plain

    print(plain(message), file=sys.stderr, flush=True)
