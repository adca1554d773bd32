"""Chat templates: a model's own Jinja program, rendered in a process of its own with limits.

A template comes with the model, so it is somebody else's program. It runs in Jinja's immutable sandbox (no
attributes that lead out, no changes to what it is given), in a child process with limited processor time,
address space and output; the parent also watches the clock. One child renders any number of conversations.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.errors import ModelError

_WORKER = Path(__file__).with_name("chat_worker.py")


@dataclass(frozen=True)
class Limits:
    """What rendering may take. Real templates need milliseconds and a few MB."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    """Address space of the child (Linux; other systems have the limits on output and on single values)."""
    output_chars: int = 16 << 20
    """Characters in one rendered conversation, and in any single string a template builds."""


DEFAULT_LIMITS = Limits()


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
    request = {
        "path": sys.path,
        "template": template,
        "conversations": [[dict(message) for message in messages] for messages in conversations],
        "variables": dict(variables),
        "limits": asdict(limits),
    }
    try:
        payload = json.dumps(request, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"a conversation holds what is no plain data ({error})", "use text, numbers, lists"
        ) from None
    answer = _call_worker(payload, limits)
    if "error" in answer:
        raise ModelError(f"the chat template failed: {answer['error']}", answer.get("remedy"))
    rendered: list[str] = answer["texts"]
    return rendered


def _call_worker(payload: str, limits: Limits) -> dict[str, Any]:
    # -P: the worker's own folder does not become a place to import from.
    command = [sys.executable, "-P", str(_WORKER)]
    try:
        done = subprocess.run(
            command,
            input=payload,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=limits.seconds + 5,
        )
    except subprocess.TimeoutExpired:
        raise _over(f"took more than {limits.seconds:g} seconds") from None
    if done.returncode:
        if done.returncode in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
            raise _over(f"took more than {limits.seconds:g} seconds of processor time")
        # Out of memory where even the message for it found no room.
        last = done.stderr.strip().splitlines()[-1:] or [f"its process ended with status {done.returncode}"]
        raise _over(f"was stopped ({last[0][:200]})")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _over(what: str) -> ModelError:
    return ModelError(
        f"the chat template {what}",
        "a sound template needs milliseconds; use another, or text without a template",
    )
