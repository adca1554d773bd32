"""Converts rows to training examples: messages for a chat template, or plain text of which a part is trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab.data.formats import TURNS, Format, type_name
from trimtab.facts.errors import DataError
from trimtab.text.chat import Conversation

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Roles by the names that datasets use, and what chat templates call them."""
_MARKS = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
"""Lone surrogates and noncharacters: no valid text has them, and some mark answers while rendering."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One row: a conversation for the chat template, or the parts of a plain text and whether each is trained on."""

    conversation: Conversation | None
    parts: tuple[tuple[str, bool], ...] = ()
    unanswered: bool = False
    """Whether trailing messages without an answer were left out."""
    repaired: bool = False

    @property
    def size(self) -> int:
        """The approximate number of characters."""
        if self.conversation is None:
            return sum(len(text) for text, _ in self.parts)
        return sum(len(str(message.get("content"))) + 32 for message in self.conversation.messages)


class RowError(Exception):
    """An error in a row, without its location; the second argument is the remedy."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.cause, self.remedy = cause, remedy


def example_of(
    location: str, value: Any, form: Format, *, template: bool, keep_end: bool
) -> TrainingExample | None:
    """Converts a row to an example; None if the row has no content at all.

    Args:
        location: `file:row`, for messages.
        value: the row.
        form: the format of the row.
        template: whether there is a chat template; without one, Alpaca rows become plain text.
        keep_end: whether messages after the last answer are kept.

    Example:
        >>> row = {"prompt": "2 + 2 =", "completion": " 4"}
        >>> example_of("a.jsonl:1", row, Format("prompt-completion", {}), template=False, keep_end=False).parts
        (('2 + 2 =', False), (' 4', True))
    """
    try:
        if not isinstance(value, dict):
            raise RowError(f"is {type_name(value)}, not an object", "write one object per row")
        missing = [name for name in form.needed if name not in value]
        if missing:
            raise RowError(
                f"has no column {missing[0]!r} (it has {', '.join(value) or 'none'})",
                f"all rows of a source must have one format, here {form.name}; list other rows as a separate source",
            )
        cleaned, repaired = _clean(value)
        parsed = _READERS[form.name](cleaned, form, template)
    except RowError as error:
        raise DataError(f"{location}: {error.cause}", error.remedy) from None
    if isinstance(parsed, tuple):
        return TrainingExample(None, parsed, repaired=repaired) if any(text for text, _ in parsed) else None
    return _chat(parsed, keep_end, repaired) if parsed.messages else None


def _chat(conversation: Conversation, keep_end: bool, repaired: bool) -> TrainingExample:
    # Cleaned a second time: escapes in lists that were JSON in a string are decoded only by the reader.
    (messages, tools), late = _clean([conversation.messages, conversation.tools])
    trimmed, unanswered = _answered(Conversation(messages, tools, conversation.skipped), keep_end)
    return TrainingExample(trimmed, unanswered=unanswered, repaired=repaired or late)


def _answered(
    conversation: Conversation, keep_end: bool, omitted: Collection[int] = ()
) -> tuple[Conversation, bool]:
    """Ends a conversation at its last non-empty answer; also returns whether messages were left out.

    Without such an answer, nothing is trained on. Answers in `omitted` count as empty.
    """
    messages = conversation.messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answered = [i for i in answers if i not in omitted and _has_content(messages[i])]
    end = (answered or answers or [len(messages) - 1])[-1] + 1
    unanswered = end < len(messages) and not keep_end
    trained = any(i not in conversation.skipped for i in answered)
    skipped = [*conversation.skipped, *omitted] if trained else answers
    return Conversation(messages[:end] if unanswered else messages, conversation.tools, skipped), unanswered


def _has_content(message: Mapping[str, Any]) -> bool:
    """Whether a message has any content besides its role: text (even white space), a tool call, thinking."""
    return any(inner for key, inner in message.items() if key not in ("role", "name"))


@dataclass(frozen=True)
class CallRendering:
    """How a chat template renders answers that call tools and have no text."""

    null_is_empty: bool
    """Whether null content must be passed as an empty string, because the template prints None or fails."""
    omitted_contents: tuple[str | None, ...]
    """The contents (null, the empty string) with which the template omits a tool call."""


def has_calls_without_text(conversation: Conversation) -> bool:
    """Whether a message calls tools and has no text: its content is null or empty."""
    return any(message.get("tool_calls") and not message["content"] for message in conversation.messages)


def adapt_calls(example: TrainingExample, calls: CallRendering, *, keep_end: bool) -> TrainingExample:
    """Adapts an example to the template: null content becomes an empty string where the template needs one, and
    tool calls that the template omits count as empty answers, which are not trained on.
    """
    conversation = example.conversation
    assert conversation is not None
    messages = conversation.messages
    if calls.null_is_empty:
        messages = [{**m, "content": ""} if m["content"] is None else m for m in messages]
    omitted = [i for i, m in enumerate(messages) if _calls_only(m) and m["content"] in calls.omitted_contents]
    made, unanswered = _answered(
        Conversation(messages, conversation.tools, conversation.skipped), keep_end, omitted
    )
    return replace(example, conversation=made, unanswered=example.unanswered or unanswered)


def _calls_only(message: Mapping[str, Any]) -> bool:
    parts = {key for key, inner in message.items() if inner and key not in ("role", "name")}
    return message["role"] == "assistant" and parts == {"tool_calls"}


def _turns(value: Mapping[str, Any], form: Format, template: bool) -> Conversation:
    part = TURNS[form.name == "sharegpt"]
    messages = _messages(form.get(value, part), form.columns.get(part, part))
    skipped = [i for i, message in enumerate(messages) if _weight(message) == 0]
    return _conversation(messages, skipped, value, form)


def _prompt_completion(
    value: Mapping[str, Any], form: Format, template: bool
) -> Conversation | tuple[tuple[str, bool], ...]:
    prompt, completion = (_parse_messages(form.get(value, part)) for part in ("prompt", "completion"))
    if isinstance(completion, list) and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(prompt, list) or isinstance(completion, list):
        first, second = _messages(prompt, "prompt"), _messages(completion, "completion")
        for message in (*first, *second):
            _weight(message)
        return _conversation([*first, *second], list(range(len(first))), value, form)
    _refuse(value, form, "system", "tools")
    return (_text(prompt, "prompt"), False), (_text(completion, "completion"), True)


def _parse_messages(value: Any) -> Any:
    """Parses a string with a JSON list of messages, as in CSV files; returns anything else unchanged, since a
    text may begin with a bracket too."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_messages = isinstance(parsed, list) and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in parsed
    )
    return parsed if is_messages and parsed else value


def _refuse(value: Mapping[str, Any], form: Format, *parts: str) -> None:
    """Raises for a system prompt or tools in plain texts, which are not rendered by a template."""
    for part in parts:
        content = form.get(value, part)
        if content and (not isinstance(content, str) or content.strip() not in ("", "[]")):
            column = form.columns.get(part, part)
            what = "system prompt" if part == "system" else "list of tools"
            raise RowError(
                f"the column {column!r} needs a chat template, and this row is plain text",
                f"put it into the text, use messages, or rename the column if it is not a {what}",
            )


def _alpaca(
    value: Mapping[str, Any], form: Format, template: bool
) -> Conversation | tuple[tuple[str, bool], ...]:
    """With a template, instruction and input become the user's message; without one, text with plain headings.

    An empty or null output counts as no answer, like an empty completion.
    """
    texts = {part: _text(form.get(value, part), part) for part in ("instruction", "input", "output")}
    question, more, answer = texts["instruction"], texts["input"], texts["output"]
    if not (question or more or answer):
        return ()
    if template:
        user = f"{question}\n\n{more}" if more else question
        messages = [{"role": "user", "content": user}]
        if answer:
            messages.append({"role": "assistant", "content": answer})
        return _conversation(messages, [], value, form)
    _refuse(value, form, "tools")
    system = _text(form.get(value, "system"), "system")
    opening = f"{system}\n\n" if system else ""
    input_section = f"### Input:\n{more}\n\n" if more else ""
    return (f"{opening}### Instruction:\n{question}\n\n{input_section}### Response:\n", False), (answer, True)


_READERS: dict[str, Any] = {
    "messages": _turns,
    "sharegpt": _turns,
    "prompt-completion": _prompt_completion,
    "alpaca": _alpaca,
}


def _conversation(
    messages: list[Message], skipped: list[int], value: Mapping[str, Any], form: Format
) -> Conversation:
    system = _text(form.get(value, "system"), "system")
    if system and messages:
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
            skipped = [i + 1 for i in skipped]
        elif system.strip() not in ("", (messages[0]["content"] or "").strip()):
            column = form.columns.get("system", "system")
            raise RowError(
                f"the column {column!r} differs from the system message that the conversation begins with",
                "keep one of the two, or rename the column if it is not a system prompt",
            )
    tools = form.get(value, "tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if tools and not isinstance(tools, list):
        raise RowError(f"tools is {type_name(tools)}, not a list", "give a list of JSON schemas, or none")
    return Conversation(messages, tools or None, skipped)


def _messages(value: Any, column: str) -> list[Message]:
    if isinstance(value, str):
        value = _json(value, column) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(
            f"{column} is {type_name(value)}, not a list of messages",
            'write [{"role": "user", "content": …}, …]',
        )
    return [_message(message, f"{column}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, location: str) -> Message:
    if not isinstance(message, dict):
        raise RowError(
            f"{location} is {type_name(message)}, not a message", 'write {"role": "user", "content": …}'
        )
    who, what = ("role", "content") if "role" in message else ("from", "value")
    role = message.get(who)
    if not isinstance(role, str) or role.lower() not in ROLES:
        known = ", ".join(ROLES)
        problem = "has no role" if role is None else f"has the role {role!r}"
        raise RowError(f"{location} {problem}", f"use one of {known}")
    # Templates test whether a key exists, so empty keys are removed.
    rest = {
        key: inner for key, inner in message.items() if key not in (who, what) and inner not in (None, [])
    }
    if what not in message and not rest.get("tool_calls"):
        raise RowError(f"{location} has no {what}", "every message needs a text, which may be empty")
    content = _content(message.get(what), location)
    if content is None and not rest.get("tool_calls"):
        content = ""  # templates would print None, or fail
    return {"role": ROLES[role.lower()], "content": content, **rest}


def _content(value: Any, location: str) -> str | None:
    """Returns a message's text, or None; joins a list of text parts."""
    if isinstance(value, list):
        if all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
            return "".join(part["text"] for part in value)
        kinds = {str(p.get("type")) if isinstance(p, dict) else type_name(p) for p in value}
        raise RowError(
            f"the content of {location} has parts that are not text ({', '.join(sorted(kinds))})",
            "give the content as one string",
        )
    if value is not None and not isinstance(value, str):
        raise RowError(f"the content of {location} is {type_name(value)}, not text", "write it as a string")
    return value


def _weight(message: Message) -> int:
    """Removes and returns OpenAI's `weight` of an answer (0: context only), which templates do not support."""
    weight = message.pop("weight", 1)
    if weight is None:
        return 1
    if weight not in (0, 1) or isinstance(weight, bool):
        raise RowError(
            f"a message has the weight {weight!r}",
            "set 1 to train on the message, or 0 to use it as context only",
        )
    return int(weight)


def _text(value: Any, column: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RowError(f"{column} is {type_name(value)}, not text", "write it as a string")
    return value or ""


def _json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{column} is a string that is not JSON ({error})", "write a list, or a list as JSON"
        ) from None


def _clean(value: Any) -> tuple[Any, bool]:
    """Replaces lone surrogates and noncharacters; also returns whether there were any."""
    if isinstance(value, str):
        if value.isascii() or not _MARKS.search(value):
            return value, False
        return _MARKS.sub("\ufffd", value), True
    if isinstance(value, dict):
        pairs = [(_clean(str(key)), _clean(inner)) for key, inner in value.items()]
        return {key: made for (key, _), (made, _) in pairs}, any(
            key_repaired or value_repaired for (_, key_repaired), (_, value_repaired) in pairs
        )
    if isinstance(value, list):
        cleaned = [_clean(inner) for inner in value]
        return [made for made, _ in cleaned], any(bad for _, bad in cleaned)
    return value, False
