"""Renders examples as texts with trained spans: conversations with the chat template, plain parts concatenated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.data.examples import CallRendering, TrainingExample, adapt_calls, has_calls_without_text
from trimtab.data.fingerprints import digest_of
from trimtab.data.readers import Segment
from trimtab.data.sources import ResolvedSource
from trimtab.data.spec import BATCH_EXAMPLES, TrainOn
from trimtab.data.tokenizer_worker import TextChunk
from trimtab.facts.errors import DataError, ModelError
from trimtab.text.chat import ChatProcess, ChatTemplateError, Conversation, Limits, RenderedConversation

TODAY = "2024-07-26"
"""The date passed to templates, so that texts do not depend on the day: the default date of Llama 3's template."""
RENDERING_VERSION = 7
"""A version that increases whenever rows become other texts or masks, so that cached tokens are rebuilt."""
LIMITS = Limits(seconds=30.0, grace_seconds=90.0)
"""Limits for `BATCH_EXAMPLES` conversations while all cores are tokenizing."""
_PROBES: tuple[tuple[str | None, bool], ...] = (
    (None, True),
    ("None", True),
    ("", True),
    (None, False),
    ("", False),
)
"""(content, with a tool call) of probe answers; their rendered texts show how a template handles tool calls."""


@dataclass(frozen=True)
class ChatSpec:
    """A chat template as plain data: its Jinja source, its variables, and the special tokens' texts."""

    template: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    specials: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of everything that affects the rendered text."""
        return digest_of(self.template, dict(self.variables), list(self.specials), TODAY)


@dataclass(frozen=True)
class Rendering:
    """How the examples of one source are rendered."""

    chat: ChatSpec | None
    train_on: TrainOn
    variables: Mapping[str, Any]
    places: tuple[str, ...]
    """The names of the source's files in messages."""
    skip: bool = False
    """Whether rows that cannot be used are left out instead of raising."""

    @staticmethod
    def of(source: ResolvedSource, chat: ChatSpec | None) -> Rendering | None:
        """The rendering of a source; None for plain text. Raises ModelError if a needed chat template is missing."""
        if source.form is None:
            return None
        spec = source.spec
        if chat is None and source.form.name in ("messages", "sharegpt"):
            raise no_template_error(spec.display_name)
        places = tuple(file.label for file in source.files)
        return Rendering(chat, spec.train_on, spec.variables, places, spec.bad_rows == "skip")

    @property
    def digest(self) -> str:
        """Digest of everything but the rows that affects text and mask."""
        chat = self.chat.digest if self.chat else None
        return digest_of(RENDERING_VERSION, chat, self.train_on, dict(self.variables))


def no_template_error(name: str) -> ModelError:
    """The error for conversations without a chat template."""
    return ModelError(
        f"{name} contains conversations, and the tokenizer has no chat template",
        "set model.chat_template to a Jinja file or to the template itself, or use a tokenizer that has one",
    )


class Renderer:
    """Renders batches of segments; the template's process starts with the first conversation."""

    def __init__(self, rendering: Rendering | None) -> None:
        self.rendering = rendering
        self._process: ChatProcess | None = None
        self._calls: CallRendering | None = None

    def texts(self, batch: Sequence[Segment]) -> list[TextChunk]:
        """The segments as texts for a tokenizer, in order."""
        if self.rendering is None:
            return [TextChunk(segment.text.encode("utf-8"), not segment.first) for segment in batch]
        texts = [_plain(segment, self.rendering.train_on) for segment in batch]
        chats = [i for i, segment in enumerate(batch) if is_chat(segment)]
        for start in range(0, len(chats), BATCH_EXAMPLES):
            indices = chats[start : start + BATCH_EXAMPLES]
            for i, text in zip(indices, self._rendered([batch[i] for i in indices]), strict=True):
                texts[i] = text
        return texts

    def kill(self) -> None:
        """Kills the template's process, even while another thread waits for it."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the template's process and closes the pipes to it; idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _rendered(self, segments: list[Segment]) -> list[TextChunk]:
        rendering = self.rendering
        assert rendering is not None
        chat = rendering.chat
        if chat is None:
            raise no_template_error(self._location(segments[0]))
        if self._process is None:
            self._process = ChatProcess(chat.template, specials=chat.specials, now=TODAY, limits=LIMITS)
        texts = []
        for segment, rendered in zip(segments, self._examples(segments), strict=True):
            if isinstance(rendered, ChatTemplateError):
                cause = f"{self._location(segment)}: {rendered.cause}"
                if not rendering.skip:
                    raise DataError(cause, rendered.remedy)
                segment.row_error = cause
                texts.append(TextChunk(b"", False, []))
            else:
                segment.rewritten = rendered.rewritten
                texts.append(TextChunk(rendered.text.encode("utf-8", "replace"), False, rendered.spans))
        return texts

    def _examples(self, segments: list[Segment]) -> list[RenderedConversation | ChatTemplateError]:
        """Renders the segments' conversations; tool calls that the template omits are not trained on."""
        assert self.rendering is not None
        for segment in segments:
            segment.example = self._adapted(_example(segment))
        conversations = [_conversation(_example(segment)) for segment in segments]
        return self._render(conversations, self.rendering.train_on)

    def _adapted(self, example: TrainingExample) -> TrainingExample:
        assert self.rendering is not None
        if not has_calls_without_text(_conversation(example)):
            return example
        if self._calls is None:
            self._calls = self._probe_template()
        return adapt_calls(example, self._calls, keep_end=self.rendering.train_on == "all")

    def _probe_template(self) -> CallRendering:
        """Finds out how the template handles tool calls without text. Ignores probes that it rejects."""
        rendered = self._render([_probe(content, called=called) for content, called in _PROBES], "all")
        texts = dict(
            zip(
                _PROBES, (None if isinstance(r, ChatTemplateError) else r.text for r in rendered), strict=True
            )
        )
        null, bare = texts[None, True], texts["", False]
        omitted = [
            content
            for content in (None, "")
            if texts[content, True] is not None and texts[content, True] in (texts[content, False], bare)
        ]
        refused = null is None and texts["", True] is not None
        as_word = null is not None and null == texts["None", True]
        return CallRendering(refused or as_word, tuple(omitted))

    def _render(
        self, conversations: list[Conversation], train_on: TrainOn
    ) -> list[RenderedConversation | ChatTemplateError]:
        rendering, process = self.rendering, self._process
        assert rendering is not None
        assert rendering.chat is not None
        assert process is not None
        return process.examples(conversations, {**rendering.chat.variables, **rendering.variables}, train_on)

    def _location(self, segment: Segment) -> str:
        assert self.rendering is not None
        return f"{self.rendering.places[segment.file]}:{segment.row}"


def is_chat(segment: Segment) -> bool:
    """Whether a segment is rendered with the chat template."""
    return segment.example is not None and segment.example.conversation is not None


def _example(segment: Segment) -> TrainingExample:
    assert segment.example is not None
    return segment.example


def _conversation(example: TrainingExample) -> Conversation:
    assert example.conversation is not None
    return example.conversation


def _probe(content: str | None, *, called: bool) -> Conversation:
    call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": {"x": "y"}}}
    answer = {"role": "assistant", "content": content, **({"tool_calls": [call]} if called else {})}
    return Conversation([{"role": "user", "content": "q"}, answer])


def _plain(segment: Segment, train_on: TrainOn) -> TextChunk:
    """A text, or the concatenated parts of an example."""
    if segment.example is None:
        return TextChunk(segment.text.encode("utf-8"), not segment.first)
    text, spans = "", []
    for part, trained in segment.example.parts:
        if part and (trained or train_on == "all"):
            spans.append((len(text), len(text) + len(part)))
        text += part
    return TextChunk(text.encode("utf-8"), False, spans)
