"""Finds the assistant's answers (the training spans) in a rendered conversation; runs in the templates' process.

A template may mark them (`{% generation %}`). Otherwise an answer's span follows from two shorter renderings: the
messages before it with the generation prompt, and the messages up to it. This requires both to be prefixes of the full
text, which is checked. Templates that render earlier answers differently from the last one (Qwen3 and DeepSeek omit
earlier thinking, Mistral moves the system prompt) break it; then the answer is replaced by a unique placeholder, which
is located in the full text.

Imports no other trimtab module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""Renders (messages, add_generation_prompt) to text; may raise the exceptions in `failures`."""

_PLACEHOLDERS = ("\ufdd2answer\ufdd3", "\ufdd4another\ufdd5")
"""Noncharacters at both ends: they occur in no text, and no template strips them."""

FAILS, DIFFERS = "the template rejects a prefix of the messages", "the template renders a prefix differently"


class NotFound(Exception):
    """An assistant turn that cannot be located in the rendered text; the message gives the reason."""


def answer_indices(messages: Sequence[Message], skipped: Sequence[int] = ()) -> list[int]:
    """Indices of the messages that are trained on."""
    return [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i not in skipped]


def select_marks(marks: list[Span], every: list[int], chosen: list[int], last: bool) -> list[Span]:
    """Select from the spans that a template marks (for `every` answer) those of the chosen answers, or of the `last`
    chosen one."""
    chosen = chosen[-1:] if last else chosen
    if not chosen:
        return []
    if chosen != every:
        if len(marks) != len(every):
            raise NotFound(
                f"it marks {len(marks)} spans for {len(every)} answers, and not all of these answers are trained on"
            )
        marks = [mark for mark, i in zip(marks, every, strict=True) if i in chosen]
    return [(start, end) for start, end in marks if start < end]


def find_answer_spans(
    render: Render,
    full: str,
    messages: list[Message],
    chosen: Sequence[int],
    specials: Sequence[str],
    failures: tuple[type[Exception], ...],
) -> tuple[list[Span], bool]:
    """Returns (character spans of the chosen answers in `full`, each including its closing special token; whether the
    template renders the text before an answer differently with the generation prompt than in the full text).

    Example:
        >>> def render(messages, prompt):
        ...     return "".join(f"[{m['role']}]{m['content']}</s>\\n" for m in messages) + "[assistant]" * prompt
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        >>> text = render(chat, False)
        >>> spans, _ = find_answer_spans(render, text, chat, [1], ["</s>"], (ValueError,))
        >>> [text[start:end] for start, end in spans]
        ['Ho</s>']
    """
    spans: list[Span] = []
    rewritten = False
    for i in chosen:
        found = _by_prefix(render, full, messages, i, failures)
        rewritten = rewritten or found == DIFFERS
        if isinstance(found, str):
            found = _by_placeholder(render, full, messages, i, specials, failures)
        start, end = found
        if spans and start < spans[-1][1]:
            raise NotFound(f"answers {len(spans)} and {len(spans) + 1} overlap in the rendered text")
        if start < end:
            spans.append((start, _closed(full, start, end, specials)))
    return spans, rewritten


def _by_prefix(
    render: Render, full: str, messages: list[Message], i: int, failures: tuple[type[Exception], ...]
) -> Span | str:
    """The span from the prompt's end to the answer's end; the reason if these are no prefixes of the full text."""
    try:
        before = render(messages[:i], True)
        through = full if i == len(messages) - 1 else render(messages[: i + 1], False)
    except failures:
        return FAILS
    if full.startswith(through) and through.startswith(before):
        return len(before), len(through)
    return DIFFERS


def _by_placeholder(
    render: Render,
    full: str,
    messages: list[Message],
    i: int,
    specials: Sequence[str],
    failures: tuple[type[Exception], ...],
) -> Span:
    first, last = messages[:i], messages[i + 1 :]
    placeholders: list[Message] = [{"role": "assistant", "content": word} for word in _PLACEHOLDERS]
    try:
        before, after = _around(render([*first, placeholders[0], *last], False), _PLACEHOLDERS[0])
        same = (before, after) == _around(render([*first, placeholders[1], *last], False), _PLACEHOLDERS[1])
        _, closing = _around(render([*first, placeholders[0]], False), _PLACEHOLDERS[0])
    except failures as error:
        raise NotFound(f"the template rejects a placeholder in place of message {i + 1} ({error})") from error
    if not same:
        raise NotFound(f"the text around message {i + 1} depends on its content")
    end = len(full) - len(after)
    if not full.endswith(after) or end < 0:
        raise NotFound(f"the text after message {i + 1} depends on its content")
    shared = _common(full[:end], before)
    start = _header_end(render, full, messages, i, shared, failures)
    if start is None:
        if shared < len(before):
            raise NotFound(f"the text before message {i + 1} depends on its content")
        start = shared
    return start, end + _closing(after, closing, specials)


def _around(text: str, word: str) -> tuple[str, str]:
    parts = text.split(word)
    if len(parts) != 2:
        raise NotFound(f"it renders an answer {len(parts) - 1} times, not once")
    return parts[0], parts[1]


def _header_end(
    render: Render,
    full: str,
    messages: list[Message],
    i: int,
    shared: int,
    failures: tuple[type[Exception], ...],
) -> int | None:
    """The end of the generation prompt of this answer; the model itself writes what follows the prompt.

    None if the template has no generation prompt after the previous message.
    """
    try:
        with_prompt, without = render(messages[:i], True), render(messages[:i], False)
    except failures:
        return None
    prompt = with_prompt[len(without) :]
    if not prompt or not with_prompt.startswith(without):
        return None
    at = full.rfind(prompt, _end_before(render, full, messages, i, failures), shared)
    return None if at < 0 else at + len(prompt)


def _end_before(
    render: Render, full: str, messages: list[Message], i: int, failures: tuple[type[Exception], ...]
) -> int:
    """The end of the previous message in `full`; the end of `full` if it cannot be located."""
    if i == 0:
        return 0
    other = {**messages[i - 1], "content": _PLACEHOLDERS[0]}
    try:
        parts = render([*messages[: i - 1], other, *messages[i:]], False).split(_PLACEHOLDERS[0])
    except failures:
        return len(full)
    found = len(parts) == 2 and full.endswith(parts[1])
    return len(full) - len(parts[1]) if found else len(full)


def _closing(after: str, closing: str, specials: Sequence[str]) -> int:
    """Length of the closing text of an answer: its special token, or the text that the template appends at the end."""
    if _leading_special(closing, specials):
        return _leading_special(after, specials)
    return _common(after, closing)


def _common(a: str, b: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices is a thousand times faster than characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _leading_special(text: str, specials: Sequence[str]) -> int:
    """Length of leading white space and a special token after it; 0 without a special token."""
    start = len(text) - len(text.lstrip())
    found = [len(token) for token in specials if text.startswith(token, start)]
    return start + max(found) if found else 0


def _closed(full: str, start: int, end: int, specials: Sequence[str]) -> int:
    """The end of the span, without white space after a closing special token, which ends the generation."""
    kept = start + len(full[start:end].rstrip())
    return kept if any(full.endswith(token, start, kept) for token in specials) else end
