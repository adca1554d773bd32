"""Chat templates: a model's Jinja template, rendered in a sandboxed child process with limits.

A template comes with the model, so it is untrusted code. It runs in Jinja's immutable sandbox (no access to Python
internals, no changes to its inputs), in a child process with limited CPU time, address space and output; the parent
also enforces a wall-clock timeout. One child renders any number of conversations.
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
    """Resource limits of rendering. Real templates need milliseconds and a few MB."""

    seconds: float = 10.0
    """CPU time per request."""
    memory_bytes: int = 1 << 30
    """Address space of the child (Linux only; elsewhere only the limits on output and on single values apply)."""
    output_chars: int = 16 << 20
    """Maximum characters of a rendered conversation, and of any string that a template builds."""
    grace_seconds: float = 5.0
    """Additional wall-clock seconds before the parent kills the process, for a busy machine."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Conversation:
    """Input of a template: messages, their tools, and the indices of answers that are not trained on."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    skipped: Sequence[int] = ()


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation, and the character spans (start, end) that are trained on."""

    text: str
    spans: list[tuple[int, int]]
    rewritten: bool = False
    """Whether the template renders the text before an answer differently once the answer is there."""


class ChatTemplateError(ModelError):
    """A template raised an error for a conversation."""


class ChatProcess:
    """A template in a sandboxed process, which runs until `close`; for one thread at a time.

    Args:
        template: the Jinja template.
        specials: contents of the tokenizer's special tokens; one of them closes an answer.
        now: a fixed ISO date for `strftime_now`, so that texts are the same on every day.
        limits: resource limits of each request.

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
        # -P: do not add the worker's folder to sys.path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(chat_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # only the parent receives Ctrl-C; it then closes the pipe
        )

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], variables: Mapping[str, Any]
    ) -> list[str]:
        """Render each conversation as text."""
        plain = [[dict(message) for message in messages] for messages in conversations]
        texts: list[str] = self._request({"conversations": plain, "variables": dict(variables)})["texts"]
        return texts

    def examples(
        self, conversations: Sequence[Conversation], variables: Mapping[str, Any], train_on: TrainOn
    ) -> list[RenderedConversation | ChatTemplateError]:
        """Render each conversation with its training spans, or return the template's error for it."""
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
            else RenderedConversation(
                result["text"], [(start, end) for start, end in result["spans"]], result["rewritten"]
            )
            for result in self._request(request)["examples"]
        ]

    def kill(self) -> None:
        """Kill the process, from any thread; a waiting `render` or `examples` raises."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close its pipes; idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # unflushed data for a dead process
                continue

    def __enter__(self) -> ChatProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            payload = chat_worker.encode_frame(request)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"a conversation contains values that are not plain data ({error})",
                "use text, numbers, lists",
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()

        timer = threading.Timer(self.limits.seconds + self.limits.grace_seconds, stop)
        timer.start()
        try:
            if self._setup is not None:
                self._process.stdin.write(chat_worker.encode_frame(self._setup))
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
            return _limit_error(f"took more than {seconds} of CPU time")
        # Out of memory, even for the error message.
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
    """Render each conversation (a list of {"role", "content"}) with the template.

    Example:
        >>> render_chats("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}",
        ...              [[{"role": "user", "content": "Hi"}]], {})
        ['[user] Hi\\n']
    """
    with ChatProcess(template, limits=limits) as process:
        return process.render(conversations, variables)


def _failed(answer: dict[str, Any]) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template failed: {answer['error']}", answer.get("remedy"))


def _limit_error(what: str) -> ModelError:
    return ModelError(
        f"the chat template {what}",
        "a valid template needs milliseconds; use another one, or text without a template",
    )
