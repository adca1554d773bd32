"""Chat templates: a model's own Jinja program, rendered in a process of its own with limits.

A template comes with the model, so it is untrusted code. It runs in Jinja's immutable sandbox (no
attributes that lead out, no changes to what it is given), in a child process with limited processor time,
address space and output; the parent also watches the clock. One child renders any number of conversations.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from trimtab.facts.errors import ModelError
from trimtab.text import chat_worker

TrainOn = Literal["completions", "last", "all"]


@dataclass(frozen=True)
class Limits:
    """What rendering may take. Real templates need milliseconds and a few MB."""

    seconds: float = 10.0
    """Processor time of one request."""
    memory_bytes: int = 1 << 30
    """Address space of the child (Linux; other systems have the limits on output and on single values)."""
    output_chars: int = 16 << 20
    """Characters in one rendered conversation, and in any single string a template builds."""
    patience: float = 5.0
    """Seconds on the clock beyond `seconds`, for a machine that is busy."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Conversation:
    """What is given to a template: messages, the tools they may use, and answers that are not trained on."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    skipped: Sequence[int] = ()


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the (start, end) in characters of what is trained on."""

    text: str
    spans: list[tuple[int, int]]
    rewritten: bool = False
    """Whether the template writes what comes before an answer otherwise once the answer is there."""


class TemplateFailed(ModelError):
    """A template that does not take a conversation."""


class ChatProcess:
    """One template in one sandboxed process, which lives until `close`; for one thread at a time.

    Args:
        template: the Jinja program.
        specials: contents of the tokenizer's special tokens; one of them closes an answer.
        now: an ISO date that `strftime_now` always gives, so that texts are the same on every day.
        limits: what each request may take.

    Example:
        >>> with ChatProcess("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}") as process:
        ...     process.render([[{"role": "user", "content": "Hi"}]], {})
        ['[user] Hi\\n']
    """

    def __init__(
        self,
        template: str,
        *,
        specials: Sequence[str] = (),
        now: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self._setup: dict[str, Any] | None = {
            "path": sys.path,
            "template": template,
            "specials": list(specials),
            "now": now,
            "limits": asdict(limits),
        }
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        # -P: the worker's own folder does not become a place to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(chat_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
        )

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], variables: Mapping[str, Any]
    ) -> list[str]:
        """Each conversation as text."""
        plain = [[dict(message) for message in messages] for messages in conversations]
        texts: list[str] = self._request({"conversations": plain, "variables": dict(variables)})["texts"]
        return texts

    def examples(
        self, conversations: Sequence[Conversation], variables: Mapping[str, Any], train_on: TrainOn
    ) -> list[Rendered | TemplateFailed]:
        """Each conversation as text with what is trained on, or why the template does not take it."""
        plain = [
            {
                "messages": [dict(message) for message in conversation.messages],
                "tools": list(conversation.tools) if conversation.tools else None,
                "skipped": list(conversation.skipped),
            }
            for conversation in conversations
        ]
        request = {"examples": plain, "variables": dict(variables), "train_on": train_on}
        return [
            _failed(result)
            if "error" in result
            else Rendered(
                result["text"], [(start, end) for start, end in result["spans"]], result["rewritten"]
            )
            for result in self._request(request)["examples"]
        ]

    def kill(self) -> None:
        """Kills the process, from any thread; a caller that waits for an answer gets an error."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and closes the pipes to it; idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # bytes for a process that is gone
                continue

    def __enter__(self) -> ChatProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            payload = chat_worker.frame(request)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"a conversation holds what is no plain data ({error})", "use text, numbers, lists"
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(self.limits.seconds + self.limits.patience, stop)
        timer.start()
        try:
            if self._setup is not None:
                self._process.stdin.write(chat_worker.frame(self._setup))
                self._setup = None
            self._process.stdin.write(payload)
            self._process.stdin.flush()
            answer: dict[str, Any] | None = chat_worker.read_frame(self._process.stdout)
        except (BrokenPipeError, ValueError):
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            raise self._exit_error(timed_out.is_set())
        if "error" in answer:
            raise _failed(answer)
        return answer

    def _exit_error(self, timed_out: bool) -> ModelError:
        code, seconds = self._process.wait(), f"{self.limits.seconds:g} seconds"
        if timed_out:
            return _limit_error(f"took more than {seconds}")
        if code in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
            return _limit_error(f"took more than {seconds} of processor time")
        # Out of memory where even the message for it found no room.
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else f"its process ended with status {code}"
        return _limit_error(f"was stopped ({last[:200]})")


def render_chats(
    template: str,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    variables: Mapping[str, Any],
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> list[str]:
    """Each conversation (a list of {"role", "content"}) through the template.

    Example:
        >>> render_chats("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}",
        ...              [[{"role": "user", "content": "Hi"}]], {})
        ['[user] Hi\\n']
    """
    with ChatProcess(template, limits=limits) as process:
        return process.render(conversations, variables)


def _failed(answer: dict[str, Any]) -> TemplateFailed:
    return TemplateFailed(f"the chat template failed: {answer['error']}", answer.get("remedy"))


def _limit_error(what: str) -> ModelError:
    return ModelError(
        f"the chat template {what}",
        "a sound template needs milliseconds; use another, or text without a template",
    )
