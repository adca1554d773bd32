"""Parallel tokenizing on all cores with bounded memory: segments in, segments with ids out, in the same
order.

Each core gets a process of its own (`worker.py`) and this process a thread a worker that only moves bytes.
At most two batches a worker are under way, so memory does not grow with the corpus.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Protocol

import numpy as np
import tokenizers

from trimtab.data import worker
from trimtab.data.readers import Segment
from trimtab.data.rendering import ChatSpec, Renderer, Rendering, is_chat
from trimtab.data.spec import BATCH_CHARS
from trimtab.data.worker import Tokens
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.text.long_text import LongText
from trimtab.text.markers import markers

MAX_WORKERS = 64


class TokenizerLike(Protocol):
    """What tokenizing needs of `text.Tokenizer`."""

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
    """A tokenizer as plain data that travels to other processes: its JSON, and what frames a document.

    `continued_json` is for texts that continue a document: SentencePiece's would set a space before each.
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
        """The spec of a tokenizer, checked to give the same ids here and there.

        Example:
            >>> TokenizerSpec.of(text.load("my-model/")).suffix            # doctest: +SKIP
            (0,)
        """
        sample = "A sample, 12.5 × 3:\n\n\tα → β </s> <|endoftext|>"
        inner, whole = tokenizer.encode(sample), tokenizer.encode_document(sample)
        at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), None)
        cutter = LongText(tokenizer.backend)
        jsons = cutter.first.to_str(), cutter.later.to_str()
        there = worker.encode(worker.load_pair(*jsons), [worker.Text(sample.encode())]).ids.tolist()
        if at is None or there != inner:
            raise ModelError(
                "the tokenizer gives other ids in a tokenizing process than here",
                "this is a mistake in trimtab; please report it with the model's name",
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
    """The ids of one segment, framing tokens included; `hash` is of the segment's text.

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
    complaint: str | None = None

    @property
    def unusable(self) -> str | None:
        """Why this document, which is one segment, is left out: `bad`, `empty`, `short` or `untrained`; else None."""
        if self.complaint is not None:
            return "bad"
        if self.empty:
            return "empty"
        if self.first and self.last and len(self.ids) < 2:
            return "short"
        # Nothing predicts a first token.
        return None if self.trained is None or self.trained[1:].any() else "untrained"


def default_num_proc() -> int:
    """The cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def tokenize(
    segments: Iterable[Segment], spec: TokenizerSpec, num_proc: int, rendering: Rendering | None = None
) -> Iterator[TokenSegment]:
    """Tokenizes segments in `num_proc` processes (1: in this one), in order.

    `rendering` makes texts of examples. What a chat template wrote is complete; every other document gets the
    tokenizer's beginning and end, of which the end is trained on.

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
                segment.complaint,
            )
            start = end


def _framed(
    segment: Segment, ids: np.ndarray, mask: np.ndarray | None, spec: TokenizerSpec
) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids and mask with the tokenizer's beginning and end, where an example does not spell them itself."""
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
    # A corpus of one or two batches is done before a process has started.
    head = list(itertools.islice(batches, 2)) if num_proc > 1 else []
    if num_proc <= 1 or len(head) < 2:
        pair = worker.load_pair(spec.json, spec.continued_json)
        with contextlib.closing(Renderer(rendering)) as renderer:
            for source in (head, batches):
                for batch in source:
                    yield batch, worker.encode(pair, renderer.texts(batch))
        return
    pool = WorkerPool(spec, min(num_proc, MAX_WORKERS), rendering)
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


class _Worker:
    """One child process and the pipes to it; with another one for the chat template where there are examples."""

    def __init__(self, spec: TokenizerSpec, rendering: Rendering | None) -> None:
        self.complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        # The child finds the packages where this process does, and must not start threads of its own.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
        )
        self.spec = spec
        self.renderer = Renderer(rendering)
        self.greeted = False

    def __call__(self, batch: list[Segment]) -> Tokens:
        texts = self.renderer.texts(batch)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if not self.greeted:
                jsons = (self.spec.json, self.spec.continued_json)
                worker.write_texts(self.process.stdin, [worker.Text(json.encode()) for json in jsons])
                self.greeted = True
            worker.write_texts(self.process.stdin, texts)
            return worker.read_tokens(self.process.stdout)
        except (EOFError, BrokenPipeError, ValueError) as error:
            raise self._died() from error

    def _died(self) -> ResourceError:
        code = self.process.wait()
        self.complaints.seek(0)
        lines = self.complaints.read().decode("utf-8", "replace").strip().splitlines()
        why = lines[-1] if lines else f"signal {-code}" if code < 0 else f"exit code {code}"
        return ResourceError(
            f"a tokenizing process ended early ({why})", "free some memory or lower num_proc, then try again"
        )

    def close_pipes(self) -> None:
        self.renderer.close()
        for stream in (self.process.stdin, self.process.stdout, self.complaints):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # bytes for a process that is gone
                stream.close()


class WorkerPool:
    """A few tokenizing processes; `submit` gives a future of a batch's tokens."""

    def __init__(self, spec: TokenizerSpec, size: int, rendering: Rendering | None = None) -> None:
        self.size = size
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers = [_Worker(spec, rendering) for _ in range(size)]
        for one in self._workers:
            self._idle.put(one)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="tokenizing")
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def submit(self, batch: list[Segment]) -> Future[Tokens]:
        """Hands segments to the next idle process."""
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: list[Segment]) -> Tokens:
        one = self._idle.get()
        try:
            return one(batch)
        finally:
            self._idle.put(one)

    def close(self) -> None:
        """Ends the processes; what was under way is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()
        self._threads.shutdown(wait=True)
        for one in self._workers:
            one.close_pipes()


def _close_all(workers: list[_Worker]) -> None:
    # Processes first, pipes after: a thread that waits on a pipe then wakes up with its end.
    for one in workers:
        one.process.kill()
        one.renderer.kill()
    for one in workers:
        one.process.wait()
