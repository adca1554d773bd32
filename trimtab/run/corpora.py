"""Opens a recipe's data: downloads hub datasets, generates `starter:` sources, tokenizes or streams the text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from trimtab import data, hub, starter
from trimtab.data import Batch, CachedCorpus, Corpus, Loader, Progress, SourceSpec
from trimtab.data.caching import default_cache_dir
from trimtab.data.in_memory import PassedRows, spool_path
from trimtab.data.preview import describe_beginning
from trimtab.data.selection import LEFT_OUT, left_out_note
from trimtab.data.sources import classify
from trimtab.facts.errors import DataError
from trimtab.facts.names import path_of
from trimtab.hub.local_files import looks_local
from trimtab.parallel import Mesh
from trimtab.plan import DataFacts, total_steps
from trimtab.recipe import Recipe
from trimtab.recipe.keys import Data, Source
from trimtab.run.choices import DataPins
from trimtab.text import Tokenizer

STARTER_PREFIX = "starter:"
CHAT = "chat"
"""The source of conversations: mathematics problems with worked answers."""
GENERATED_DOCUMENTS = {"train": 20_000, "heldout": 400}
"""Number of documents of a generated source, unless `first` is set."""
STARTER_SEED = 1
MEMORY_PREFIX = "memory:"
"""Prefix of the names of rows that were passed from Python (`data.in_memory`)."""
QUIET_BYTES = 2**27
"""Progress of reading and verifying is shown for files larger than this."""


class Watcher(Protocol):
    """Receives messages and progress."""

    def message(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...


@dataclass
class Corpora:
    """The opened corpora for training, replay and evaluation."""

    recipe: Recipe
    train: list[tuple[Corpus, float]]
    replay: list[tuple[Corpus, float]]
    evaluation: dict[str, list[CachedCorpus]]
    commits: dict[str, str | None]
    train_source_first: bool = True
    """Whether the first step has a sequence of a train source; in earlier versions it could have replay alone."""

    def loader(self, mesh: Mesh) -> Loader:
        """The training loader for one process of a mesh."""
        recipe = self.recipe
        return data.make_loader(
            self.train,
            replay=self.replay,
            replay_share=recipe.data.replay.share if recipe.data.replay else 0.0,
            max_seq_length=recipe.max_seq_length,
            packing=recipe.packing,
            batch_size=recipe.per_device_train_batch_size,
            accumulation=recipe.gradient_accumulation_steps,
            seed=recipe.seed,
            dp_rank=mesh.rank,
            dp_size=mesh.size,
            group_by_length=recipe.group_by_length,
            train_source_first=self.train_source_first,
        )

    @cached_property
    def facts(self) -> DataFacts:
        """Facts about the data for the planner."""
        facts = self._single_process_loader.facts
        return DataFacts(facts.num_sequences, facts.num_tokens, facts.fill, facts.attended_share)

    @cached_property
    def _single_process_loader(self) -> Loader:
        """A single-process loader for facts and notes; it yields no batches."""
        return self.loader(Mesh.single())

    def total_steps(self, mesh: Mesh) -> int:
        """Number of optimizer steps of the run."""
        steps = total_steps(self.recipe, self.facts, mesh.size)
        assert steps is not None, "a streamed recipe without max_steps does not validate"
        return steps

    def notes(self) -> list[str]:
        """Notes on documents that were truncated or left out because of the sequence length."""
        return self._single_process_loader.notes()

    def example(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """The first training example, as a metrics record; None if the data are plain texts."""
        for corpus, _ in self.train:
            if corpus.form is not None:
                return data.highlight_example(corpus, tokenizer, max_seq_length=self.recipe.max_seq_length)
        return None

    def eval_batches(self) -> dict[str, Sequence[Batch]]:
        """Batches of each evaluation set, the domain first."""
        recipe = self.recipe
        return {
            name: [
                batch
                for corpus in corpora
                for batch in data.eval_batches(
                    corpus,
                    batch_size=recipe.per_device_train_batch_size,
                    max_seq_length=recipe.max_seq_length,
                    max_sequences=max(1, recipe.data.eval_sequences // len(corpora)),
                )
            ]
            for name, corpora in self.evaluation.items()
        }

    def pins(self) -> DataPins:
        """For choices.json: commits of hub datasets, fingerprints of all files, and the order of the first step."""
        return DataPins(self.commits, [corpus.manifest() for corpus in self.all()], self.train_source_first)

    def all(self) -> list[Corpus]:
        """Every corpus, in the recipe's order."""
        held_out = [corpus for corpora in self.evaluation.values() for corpus in corpora]
        return [*(corpus for corpus, _ in [*self.train, *self.replay]), *held_out]


def open_corpora(
    recipe: Recipe,
    tokenizer: Tokenizer,
    watcher: Watcher,
    *,
    pins: DataPins | None = None,
    passed: Mapping[str, PassedRows] | None = None,
) -> Corpora:
    """Opens all sources of a recipe's `data`.

    With `pins`, those of a run that is resumed, hub datasets are read at their stored commits, files are read as at
    the first start, and a file that has changed raises an error. `passed` are the rows that were passed from Python,
    by the names of their sources.
    """
    opening = _SourceOpener(recipe.data, tokenizer, watcher, pins, passed=passed)
    section = recipe.data
    opening.check_streams(section.train)
    opening.check_streams(section.replay.sources if section.replay else [])
    evaluation = {
        name: [opening.cached(source) for source in sources]
        for name, sources in (("domain", section.eval.domain), ("general", section.eval.general))
        if sources
    }
    train = [(opening.for_training(source), source.weight) for source in section.train]
    replay = []
    if section.replay is not None:
        replay = [(opening.for_training(source), source.weight) for source in section.replay.sources]
    train = [(_without(corpus, evaluation), weight) for corpus, weight in train]
    if not section.eval.domain and section.eval_share > 0 and not section.streaming:
        halves = [corpus.split(share=section.eval_share) for corpus, _ in train]
        heldout = [cast(CachedCorpus, part) for _, part in halves]  # nothing is streamed here
        # A document that occurs in several sources may be held out from only one of them:
        # remove it from the others too.
        others = [[part for part in heldout if part is not own] for own in heldout]
        train = [
            (_without(part, {"domain": apart}), weight)
            for (part, _), apart, (_, weight) in zip(halves, others, train, strict=True)
        ]
        evaluation = {"domain": heldout, **evaluation}
    replay = [(_without(corpus, evaluation), weight) for corpus, weight in replay]
    train_source_first = pins is None or pins.train_source_first
    opened = Corpora(recipe, train, replay, evaluation, opening.commits, train_source_first)
    if pins is not None:
        for corpus, manifest in zip(opened.all(), pins.manifests, strict=True):
            corpus.check(manifest)
    return opened


def open_for_eval(
    name: str,
    tokenizer: Tokenizer,
    watcher: Watcher,
    max_seq_length: int,
    max_sequences: int,
    batch_size: int,
    cache_dir: Path | None = None,
) -> list[Batch]:
    """Batches of one source by name, without a recipe."""
    path_of(name, "the text to measure on", DataError, is_text_file=True)
    corpus = _SourceOpener(None, tokenizer, watcher, cache_dir=cache_dir).cached(Source(source=name))
    return list(
        data.eval_batches(
            corpus, batch_size=batch_size, max_seq_length=max_seq_length, max_sequences=max_sequences
        )
    )


def _without(corpus: Corpus, evaluation: dict[str, list[CachedCorpus]]) -> Corpus:
    """A training corpus without the documents of the evaluation sets."""
    for held_out in (c for corpora in evaluation.values() for c in corpora):
        corpus = corpus.without(held_out)
    return corpus


def _notes(corpus: Corpus) -> Iterator[str]:
    """Notes for the user on a corpus that was just opened."""
    summary = corpus.summary
    for why in LEFT_OUT:
        count = getattr(summary, why)
        if count:
            yield left_out_note(count, why) + (f"; the first: {summary.first_error}" if why == "bad" else "")
    if summary.repaired:
        what = "document" if summary.repaired == 1 else "documents"
        yield f"in {summary.repaired} {what} unpaired Unicode surrogates were replaced by U+FFFD"
    form = corpus.form
    if form is None:
        return
    if summary.unanswered:
        yield (
            f"in {summary.unanswered} conversations the last messages, which have no answer, were left out"
        )
    if summary.rewritten:
        yield (
            f"in {summary.rewritten} conversations the chat template renders the prompt differently with the answer "
            "than without it (it may drop earlier thinking); they are trained as rendered with the answer"
        )
    if summary.tokens:
        what = "example" if summary.documents == 1 else "examples"
        yield (
            f"{summary.documents:,} {what} ({form.name}), {summary.trained / summary.tokens:.0%} of "
            f"{summary.tokens:,} tokens trained on"
        )


class _SourceOpener:
    """Opens the sources of a recipe and records the commits of hub datasets."""

    def __init__(
        self,
        section: Data | None,
        tokenizer: Tokenizer,
        watcher: Watcher,
        pins: DataPins | None = None,
        cache_dir: Path | None = None,
        passed: Mapping[str, PassedRows] | None = None,
    ) -> None:
        self.tokenizer, self.watcher = tokenizer, watcher
        self.passed = passed or {}
        self.streaming = section is not None and section.streaming
        self.num_proc = section.num_proc if section else None
        self.variables = section.chat_template_kwargs if section else tokenizer.template_variables
        self.pinned_commits = pins.commits if pins else {}
        self.original_fingerprints = (
            frozenset(manifest["fingerprint"] for manifest in pins.manifests) if pins else None
        )
        self.commits: dict[str, str | None] = {}
        self.cache_dir = cache_folder(section.cache_dir if section else str(cache_dir) if cache_dir else None)

    def cached(self, source: Source) -> CachedCorpus:
        """A corpus in the token cache."""
        return self._open(source, streaming=False)

    def for_training(self, source: Source) -> Corpus:
        """A corpus for training, cached or streamed as in the recipe; prints the beginning of its first document."""
        corpus = self._open(source, streaming=self.streaming)
        shown = describe_beginning(corpus.source, template=self.tokenizer.chat_template is not None)
        self.watcher.message(f"{self._shown(source.source)}: {shown}")
        return corpus

    def _open(self, source: Source, streaming: bool) -> Any:
        corpus = data.open_corpus(
            self._spec(source),
            self.tokenizer,
            cache_dir=self.cache_dir,
            num_proc=self.num_proc,
            progress=self._progress,
            streaming=streaming,
        )
        for note in _notes(corpus):
            self.watcher.message(f"{self._shown(source.source)}: {note}")
        return corpus

    def _shown(self, name: str) -> str:
        """The name of a source in messages."""
        return self.passed[name].label if name in self.passed else name

    def _progress(self, progress: Progress) -> None:
        if progress.message is not None:
            self.watcher.message(progress.message)
        elif progress.stage == "tokenize" or progress.total_bytes > QUIET_BYTES:
            what = {"hash": "reading", "tokenize": "tokenizing", "verify": "checking"}.get(
                progress.stage, progress.stage
            )
            self.watcher.progress(
                f"{what} {self._shown(progress.source)}", progress.done_bytes, progress.total_bytes, "bytes"
            )

    def _spec(self, source: Source) -> SourceSpec:
        files: tuple[Path, ...] = ()
        passed = self.passed.get(source.source)
        if source.source.startswith(MEMORY_PREFIX):
            if passed is None or passed.stream is None:
                files = (self._spooled_file(source.source),)
        elif source.source.startswith(STARTER_PREFIX):
            files = (self._starter_file(source.source.removeprefix(STARTER_PREFIX), source.first),)
        elif _is_hub_id(source.source):
            # The same dataset may be named twice, at two revisions.
            pin = source.source if source.revision is None else f"{source.source}@{source.revision}"
            revision = self.pinned_commits.get(pin) or source.revision
            resolved = hub.resolve_dataset(
                source.source, revision=revision, config=source.config, split=source.split
            )
            self.commits[pin] = resolved.commit
            files = tuple(resolved.files)
        return SourceSpec(
            source.source,
            files=files,
            text_column=source.text_column,
            documents=source.documents,
            first=source.first,
            weight=source.weight,
            format=source.format,
            columns=source.columns,
            train_on=source.train_on,
            variables=self.variables,
            bad_rows=source.bad_rows,
            rows=passed.stream if passed else None,
            label=passed.label if passed else None,
            original_fingerprints=self.original_fingerprints,
        )

    def check_streams(self, sources: Sequence[Source]) -> None:
        """Raises for streamed rows next to files: files are sampled in proportion to bytes, which rows do not have."""
        streams = [
            source.source
            for source in sources
            if source.source in self.passed and self.passed[source.source].stream
        ]
        files = [source.source for source in sources if source.source not in streams]
        if self.streaming and streams and files:
            raise DataError(
                f"rows from Python ({self.passed[streams[0]].label}) are streamed together with {files[0]}, and the "
                "number of rows is unknown",
                "set data.streaming: false, or stream only rows or only files",
            )

    def _spooled_file(self, name: str) -> Path:
        path = spool_path(memory_folder(self.cache_dir), name.removeprefix(MEMORY_PREFIX))
        if not path.is_file():
            raise DataError(
                f"the rows {name}, which were passed from Python, are not in the cache ({path})",
                "pass them again: trimtab.resume(folder, data=rows) for a run that began, "
                "trimtab.train(recipe, data=rows) for a new one",
            )
        return path

    def _starter_file(self, name: str, first: int | None) -> Path:
        if name in ("general", "replay"):
            return starter.data_file(name)
        field = name.removesuffix("-heldout")
        if field != CHAT and field not in starter.FIELDS:
            fields = [name + ending for name in (*starter.FIELDS, CHAT) for ending in ("", "-heldout")]
            known = ", ".join(STARTER_PREFIX + n for n in ("general", "replay", *fields))
            raise DataError(f"{STARTER_PREFIX}{name} does not exist", f"use one of {known}")
        split = "train" if field == name else "heldout"
        count = first or GENERATED_DOCUMENTS[split]
        file_name = f"{name}-{STARTER_SEED}-{count}"
        if field == CHAT:
            chats = starter.math_chats(STARTER_SEED, count, split)
            rows = ({"messages": messages} for messages in chats)
            return data.write_rows(file_name, rows, self.cache_dir / "generated").files[0]
        documents = starter.math_documents(STARTER_SEED, count, split, topics=starter.FIELDS[field])
        return data.write_texts(file_name, documents, self.cache_dir / "generated").files[0]


def memory_folder(cache_dir: Path) -> Path:
    """The cache folder of rows from Python."""
    return cache_dir / "memory"


def cache_folder(named: str | None) -> Path:
    """The token cache: `data.cache_dir` of a recipe, or the default folder."""
    return Path(named).expanduser() if named else default_cache_dir()


def _is_hub_id(name: str) -> bool:
    """Whether a name is `org/name` and not a path: it does not exist, looks like none, has no data file's suffix."""
    return "/" in name and not (
        os.path.lexists(name) or looks_local(name) or classify(Path(name))[0] is not None
    )
