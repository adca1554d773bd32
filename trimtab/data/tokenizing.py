"""Tokenizing: segments in, segments with ids and loss masks out, in the same order and with bounded memory.

At most two batches per worker process (`tokenizer_pool.py`) are in flight, so memory does not grow with the corpus.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tokenizers

from trimtab.data import tokenizer_worker as worker
from trimtab.data.examples import example_of
from trimtab.data.formats import Format
from trimtab.data.readers import Segment
from trimtab.data.rendering import ChatSpec, Renderer, Rendering, is_chat, no_template_error
from trimtab.data.spec import BATCH_CHARS
from trimtab.data.tokenizer_pool import MAX_WORKERS, WorkerPool
from trimtab.data.tokenizer_worker import Tokens
from trimtab.facts.errors import DataError, ModelError
from trimtab.text import Tokenizer
from trimtab.text.long_text import LongText
from trimtab.text.markers import markers


class TokenizerLike(Protocol):
    """The part of `text.Tokenizer` that tokenizing uses."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_document(self, text: str) -> list[int]: ...
    @property
    def backend(self) -> tokenizers.Tokenizer: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_tokens(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as plain data for other processes: its JSON, and the ids that begin and end a document.

    `continued_json` is for texts that continue a document: SentencePiece would otherwise prepend a space to each.
    """

    json: str
    continued_json: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    vocab_size: int
    fingerprint: str
    chat: ChatSpec | None = None

    @staticmethod
    def of(tokenizer: TokenizerLike) -> TokenizerSpec:
        """Builds the spec of a tokenizer and checks that other processes will return the same ids.

        Example:
            >>> TokenizerSpec.of(text.load("my-model/")).suffix            # doctest: +SKIP
            (0,)
        """
        sample = "A sample, 12.5 × 3:\n\n\tα → β </s> <|endoftext|>"
        inner, whole = tokenizer.encode(sample), tokenizer.encode_document(sample)
        at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), None)
        cutter = LongText(tokenizer.backend)
        jsons = cutter.first.to_str(), cutter.later.to_str()
        there = worker.encode(worker.load_pair(*jsons), [worker.TextChunk(sample.encode())]).ids.tolist()
        if at is None or there != inner:
            raise ModelError(
                "the tokenizer returns different ids in a worker process than in this one",
                "this is a bug in trimtab; please report it with the model's name",
            )
        return TokenizerSpec(
            *jsons,
            tuple(whole[:at]),
            tuple(whole[at + len(inner) :]),
            tokenizer.vocab_size,
            tokenizer.fingerprint,
            _chat(tokenizer),
        )


def _chat(tokenizer: TokenizerLike) -> ChatSpec | None:
    if tokenizer.chat_template is None:
        return None
    specials = tuple(sorted(markers(tokenizer).values()))
    return ChatSpec(tokenizer.chat_template, {**tokenizer.special_tokens, "documents": None}, specials)


@dataclass(slots=True)
class TokenSegment:
    """The ids of one segment, including beginning and end tokens; `hash` is the hash of the segment's text.

    `trained` [tokens] is 1 where a token is trained on; None where all are.
    """

    file: int
    row: int
    ids: np.ndarray
    hash: int
    first: bool
    last: bool
    empty: bool
    repaired: bool
    trained: np.ndarray | None = None
    unanswered: bool = False
    rewritten: bool = False
    row_error: str | None = None

    @property
    def unusable(self) -> str | None:
        """Why this single-segment document is left out (`bad`, `empty`, `short`, `untrained`); None if it is not."""
        if self.row_error is not None:
            return "bad"
        if self.empty:
            return "empty"
        if self.first and self.last and len(self.ids) < 2:
            return "short"
        # The first token is never a target.
        return None if self.trained is None or self.trained[1:].any() else "untrained"


def tokenize(
    segments: Iterable[Segment], spec: TokenizerSpec, num_proc: int, rendering: Rendering | None = None
) -> Iterator[TokenSegment]:
    """Tokenizes segments in `num_proc` processes (1: in this one), in order.

    `rendering` renders examples. The output of a chat template is complete; every other document gets the tokenizer's
    beginning and end tokens, and the end token is trained on.

    Example:
        >>> list(tokenize([], spec, 2))                                     # doctest: +SKIP
        []
    """
    for batch, (ids, counts, hashes, trained) in _encoded(_batches(segments), spec, num_proc, rendering):
        ends = np.cumsum(counts).tolist()
        start = 0
        for segment, end, digest in zip(batch, ends, hashes.tolist(), strict=True):
            part = ids[start:end]
            mask = None if trained is None else trained[start:end]
            if not is_chat(segment):
                part, mask = _framed(segment, part, mask, spec)
            empty = segment.first and segment.last and not segment.text.strip() and segment.example is None
            unanswered = segment.example is not None and segment.example.unanswered
            yield TokenSegment(
                segment.file,
                segment.row,
                part,
                digest,
                segment.first,
                segment.last,
                empty,
                segment.repaired,
                mask,
                unanswered,
                segment.rewritten,
                segment.row_error,
            )
            start = end


def _framed(
    segment: Segment, ids: np.ndarray, mask: np.ndarray | None, spec: TokenizerSpec
) -> tuple[np.ndarray, np.ndarray | None]:
    """Adds the tokenizer's beginning and end tokens to ids and mask, unless an example already contains them."""
    prefix = list(spec.prefix) if segment.first else []
    suffix = list(spec.suffix) if segment.last else []
    if segment.example is not None:
        head, tail = ids[: len(prefix)].tolist(), ids[len(ids) - len(suffix) :].tolist()
        prefix, suffix = [] if head == prefix else prefix, [] if tail == suffix else suffix
    if prefix or suffix:
        ids = np.concatenate([np.array(prefix, "<u4"), ids, np.array(suffix, "<u4")])
        if mask is not None:
            ended = [np.full(len(suffix), mask[-1:].any(), np.uint8)]
            mask = np.concatenate([np.zeros(len(prefix), np.uint8), mask, *ended])
    return ids, mask


def _batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    chars = 0
    for segment in segments:
        batch.append(segment)
        chars += segment.size + 64
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterator[list[Segment]], spec: TokenizerSpec, num_proc: int, rendering: Rendering | None
) -> Iterator[tuple[list[Segment], Tokens]]:
    # A corpus of one or two batches is tokenized before a process would have started.
    head = list(itertools.islice(batches, 2)) if num_proc > 1 else []
    if num_proc <= 1 or len(head) < 2:
        pair = worker.load_pair(spec.json, spec.continued_json)
        with contextlib.closing(Renderer(rendering)) as renderer:
            for source in (head, batches):
                for batch in source:
                    yield batch, worker.encode(pair, renderer.texts(batch))
        return
    pool = WorkerPool((spec.json, spec.continued_json), min(num_proc, MAX_WORKERS), rendering)
    try:
        waiting: deque[tuple[list[Segment], Future[Tokens]]] = deque()
        for source in (head, batches):
            for batch in source:
                waiting.append((batch, pool.submit(batch)))
                if len(waiting) >= 2 * pool.size:
                    done, future = waiting.popleft()
                    yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.close()


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Mapping[str, Any]]]
) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask of answer tokens) of each conversation, rendered with the tokenizer's chat template.

    Raises:
        ModelError: there is no chat template, or it fails.
        DataError: a message is malformed, or a conversation has no answer.

    Example:
        >>> hi = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        >>> ids, answer = encode_conversations(tokenizer, [hi])[0]               # doctest: +SKIP
        >>> tokenizer.decode([i for i, on in zip(ids, answer) if on])            # doctest: +SKIP
        'Hello'
    """
    spec = TokenizerSpec.of(tokenizer)
    if spec.chat is None:
        raise no_template_error("the list")
    rendering = Rendering(spec.chat, "completions", tokenizer.template_variables, ("conversation",))
    segments = []
    for number, messages in enumerate(conversations, 1):
        row = {"messages": [dict(message) for message in messages]}
        example = example_of(
            f"conversation:{number}", row, Format("messages", {}), template=True, keep_end=False
        )
        segments.append(Segment(0, number, "", True, True, example=example))
    encoded = []
    for segment in tokenize(segments, spec, 1, rendering):
        if segment.unusable or segment.trained is None:
            raise DataError(
                f"conversation:{segment.row} has no assistant message to compute the loss on",
                'end it with {"role": "assistant", "content": "…"}',
            )
        encoded.append((segment.ids.tolist(), [bool(on) for on in segment.trained]))
    return encoded
