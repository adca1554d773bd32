"""Which part of a rendered conversation the model itself would have to write; runs in the templates' process.

A template may mark it (`{% generation %}`). For one that does not, an answer's place follows from what the
template writes for the conversation before it, with the prompt for an answer, and up to it. That is right where
each of these is a beginning of the whole text, which is checked. Templates that write earlier answers otherwise
than the last one (Qwen3 and DeepSeek leave out earlier thinking, Mistral moves the system prompt) break it; there
the answer is replaced by a word that occurs nowhere else and looked up in the whole text.

Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""(messages, with the prompt for an answer) to text; raises what `failures` names."""

_PLACEHOLDERS = ("\ufdd2answer\ufdd3", "\ufdd4another\ufdd5")
"""Noncharacters at both ends: they begin and end like no text, and no template trims them."""

FAILS, DIFFERS = "the template refuses a part of the conversation", "the template writes a part otherwise"


class NotFound(Exception):
    """An assistant turn that cannot be located in the rendered text; the message gives the reason."""


def answers(messages: Sequence[Message], skipped: Sequence[int] = ()) -> list[int]:
    """The numbers of the messages that are trained on."""
    return [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i not in skipped]


def select_marks(marks: list[Span], every: list[int], chosen: list[int], last: bool) -> list[Span]:
    """Of the stretches that a template marks, one or more for `every` answer, those of the chosen ones, or of their
    `last`."""
    chosen = chosen[-1:] if last else chosen
    if not chosen:
        return []
    if chosen != every:
        if len(marks) != len(every):
            raise NotFound(
                f"it marks {len(marks)} stretches where {len(every)} answers are, and not all of these are to be "
                "trained on"
            )
        marks = [mark for mark, i in zip(marks, every, strict=True) if i in chosen]
    return [(start, end) for start, end in marks if start < end]


def find(
    render: Render,
    full: str,
    messages: list[Message],
    chosen: Sequence[int],
    specials: Sequence[str],
    failures: tuple[type[Exception], ...],
) -> tuple[list[Span], bool]:
    """(character spans of the chosen answers in `full`, each through its closing special token; whether the template
    writes what comes before an answer otherwise when it is asked for one than in the whole text).

    Example:
        >>> def render(messages, prompt):
        ...     return "".join(f"[{m['role']}]{m['content']}</s>\\n" for m in messages) + "[assistant]" * prompt
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        >>> text = render(chat, False)
        >>> spans, _ = find(render, text, chat, [1], ["</s>"], (ValueError,))
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
            raise NotFound(f"answers {len(spans)} and {len(spans) + 1} overlap in what it writes")
        if start < end:
            spans.append((start, _closed(full, start, end, specials)))
    return spans, rewritten


def _by_prefix(
    render: Render, full: str, messages: list[Message], i: int, failures: tuple[type[Exception], ...]
) -> Span | str:
    """From the prompt's end to the answer's; why not, where the two are no beginnings of the whole."""
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
        raise NotFound(f"it does not take another answer in place of number {i + 1} ({error})") from error
    if not same:
        raise NotFound(f"what stands around message {i + 1} depends on what it says")
    end = len(full) - len(after)
    if not full.endswith(after) or end < 0:
        raise NotFound(f"what comes after message {i + 1} depends on what it says")
    shared = _common(full[:end], before)
    start = _header_end(render, full, messages, i, shared, failures)
    if start is None:
        if shared < len(before):
            raise NotFound(f"what comes before message {i + 1} depends on what it says")
        start = shared
    return start, end + _closing(after, closing, specials)


def _around(text: str, word: str) -> tuple[str, str]:
    parts = text.split(word)
    if len(parts) != 2:
        raise NotFound(f"it writes an answer {len(parts) - 1} times, not once")
    return parts[0], parts[1]


def _header_end(
    render: Render,
    full: str,
    messages: list[Message],
    i: int,
    shared: int,
    failures: tuple[type[Exception], ...],
) -> int | None:
    """Where the prompt for this answer ends: what stands between it and the answer's own text is the model's to write.

    None where the template has no such prompt after the message before.
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
    """How much of what follows an answer ends it: its special token, or what the template writes at the very end."""
    if _leading_special(closing, specials):
        return _leading_special(after, specials)
    return _common(after, closing)


def _common(a: str, b: str) -> int:
    """Length of what two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisected, since comparing slices is a thousand times faster than characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _leading_special(text: str, specials: Sequence[str]) -> int:
    """Length of white space and the special token that a text begins with; 0 without one."""
    start = len(text) - len(text.lstrip())
    found = [len(token) for token in specials if text.startswith(token, start)]
    return start + max(found) if found else 0


def _closed(full: str, start: int, end: int, specials: Sequence[str]) -> int:
    """The end without white space after a closing special token: a model that wrote the token is done."""
    kept = start + len(full[start:end].rstrip())
    return kept if any(full.endswith(token, start, kept) for token in specials) else end
