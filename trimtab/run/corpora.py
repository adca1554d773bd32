"""The data of a recipe, opened: hub ids fetched, `starter:` sources generated, everything tokenized or streamed."""

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
from trimtab.data.in_memory import Passed, spool_path
from trimtab.data.preview import beginning
from trimtab.data.selection import LEFT_OUT, left_out
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
"""The source of conversations: questions of mathematics and worked answers."""
GENERATED_DOCUMENTS = {"train": 20_000, "heldout": 400}
"""How many documents a generated source has, unless `first` says otherwise."""
STARTER_SEED = 1
MEMORY_PREFIX = "memory:"
"""Before the name of rows that were passed from Python (`data.in_memory`)."""
QUIET_BYTES = 2**27
"""Reading and checking less than this takes no time worth a line."""


class Watcher(Protocol):
    """Told how preparations go."""

    def message(self, text: str) -> None: ...
    def working(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...


@dataclass
class Corpora:
    """Opened data: what is trained on, replayed and measured on."""

    recipe: Recipe
    train: list[tuple[Corpus, float]]
    replay: list[tuple[Corpus, float]]
    evaluation: dict[str, list[CachedCorpus]]
    commits: dict[str, str | None]
    own_text_first: bool = True
    """Whether the first step has a sequence of a train source; runs of earlier versions may begin with replay alone."""

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
            own_text_first=self.own_text_first,
        )

    @cached_property
    def facts(self) -> DataFacts:
        """What the planner wants to know."""
        facts = self._alone.facts
        return DataFacts(facts.num_sequences, facts.num_tokens, facts.fill, facts.attended_share)

    @cached_property
    def _alone(self) -> Loader:
        """The loader of a process that is alone, to be asked and not to be drawn from."""
        return self.loader(Mesh.single())

    def total_steps(self, mesh: Mesh) -> int:
        """Updates of the whole run."""
        steps = total_steps(self.recipe, self.facts, mesh.size)
        assert steps is not None, "a streamed recipe without max_steps does not validate"
        return steps

    def notes(self) -> list[str]:
        """What was cut or left out because of the sequences' length."""
        return self._alone.notes()

    def example(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """The first example that is trained on, as a record for a view; None where only texts are."""
        for corpus, _ in self.train:
            if corpus.form is not None:
                return data.highlighted(corpus, tokenizer, max_seq_length=self.recipe.max_seq_length)
        return None

    def eval_batches(self) -> dict[str, Sequence[Batch]]:
        """Batches of each evaluated set; the domain first."""
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
        """For choices.json: commits of hub data sets, fingerprints of all files, and the order of the first step."""
        return DataPins(self.commits, [corpus.manifest() for corpus in self.all()], self.own_text_first)

    def all(self) -> list[Corpus]:
        """Every corpus, in an order that follows from the recipe."""
        measured = [corpus for corpora in self.evaluation.values() for corpus in corpora]
        return [*(corpus for corpus, _ in [*self.train, *self.replay]), *measured]


def open_corpora(
    recipe: Recipe,
    tokenizer: Tokenizer,
    watcher: Watcher,
    *,
    kept: DataPins | None = None,
    passed: Mapping[str, Passed] | None = None,
) -> Corpora:
    """Opens everything a recipe's `data` names.

    With `kept` (the `pins` of a run that is resumed) hub data sets are taken at the commit they had, files are read as
    they were read then, and a file that has changed is an error. `passed` holds the rows that were passed from Python,
    by the names of their sources.
    """
    opening = _Opening(recipe.data, tokenizer, watcher, kept, passed=passed)
    section = recipe.data
    opening.check_streams(section.train)
    opening.check_streams(section.replay.sources if section.replay else [])
    evaluation = {
        name: [opening.cached(source) for source in sources]
        for name, sources in (("domain", section.eval.domain), ("general", section.eval.general))
        if sources
    }
    train = [(opening.trained(source), source.weight) for source in section.train]
    replay = []
    if section.replay is not None:
        replay = [(opening.trained(source), source.weight) for source in section.replay.sources]
    train = [(_without(corpus, evaluation), weight) for corpus, weight in train]
    if not section.eval.domain and section.eval_share > 0 and not section.streaming:
        halves = [corpus.split(share=section.eval_share) for corpus, _ in train]
        held = [cast(CachedCorpus, part) for _, part in halves]  # nothing is streamed here
        # A document of several sources may have been held out in one of them alone.
        others = [[part for part in held if part is not own] for own in held]
        train = [
            (_without(part, {"domain": apart}), weight)
            for (part, _), apart, (_, weight) in zip(halves, others, train, strict=True)
        ]
        evaluation = {"domain": held, **evaluation}
    replay = [(_without(corpus, evaluation), weight) for corpus, weight in replay]
    own_text_first = kept is None or kept.own_text_first
    opened = Corpora(recipe, train, replay, evaluation, opening.commits, own_text_first)
    if kept is not None:
        for corpus, manifest in zip(opened.all(), kept.manifests, strict=True):
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
    """Batches of one named source, outside of any recipe."""
    path_of(name, "the text to measure on", DataError, names_text=True)
    corpus = _Opening(None, tokenizer, watcher, cache_dir=cache_dir).cached(Source(source=name))
    return list(
        data.eval_batches(
            corpus, batch_size=batch_size, max_seq_length=max_seq_length, max_sequences=max_sequences
        )
    )


def _without(corpus: Corpus, evaluation: dict[str, list[CachedCorpus]]) -> Corpus:
    """A training corpus less every document that is measured on."""
    for measured in (c for corpora in evaluation.values() for c in corpora):
        corpus = corpus.without(measured)
    return corpus


def _notes(corpus: Corpus) -> Iterator[str]:
    """What a person should know of a corpus that was just opened."""
    summary = corpus.summary
    for why in LEFT_OUT:
        count = getattr(summary, why)
        if count:
            yield left_out(count, why) + (f"; the first: {summary.complaint}" if why == "bad" else "")
    if summary.repaired:
        what = "document" if summary.repaired == 1 else "documents"
        yield f"in {summary.repaired} {what} halves of Unicode pairs, which no text can hold, became U+FFFD"
    form = corpus.form
    if form is None:
        return
    if summary.unanswered:
        yield (
            f"the last messages of {summary.unanswered} conversations, which no answer follows, were left out"
        )
    if summary.rewritten:
        yield (
            f"in {summary.rewritten} conversations the chat template writes what comes before an answer otherwise "
            "once the answer is there (leaving out earlier thinking, say); they are trained on as it writes them whole"
        )
    if summary.tokens:
        what = "example" if summary.documents == 1 else "examples"
        yield (
            f"{summary.documents:,} {what} ({form.name}), {summary.trained / summary.tokens:.0%} of "
            f"{summary.tokens:,} tokens trained on"
        )


class _Opening:
    """One pass over a recipe's sources; remembers the commits it met."""

    def __init__(
        self,
        section: Data | None,
        tokenizer: Tokenizer,
        watcher: Watcher,
        kept: DataPins | None = None,
        cache_dir: Path | None = None,
        passed: Mapping[str, Passed] | None = None,
    ) -> None:
        self.tokenizer, self.watcher = tokenizer, watcher
        self.passed = passed or {}
        self.streaming = section is not None and section.streaming
        self.num_proc = section.num_proc if section else None
        self.variables = section.chat_template_kwargs if section else tokenizer.template_variables
        self.kept_commits = kept.commits if kept else {}
        self.began = frozenset(one["fingerprint"] for one in kept.manifests) if kept else None
        self.commits: dict[str, str | None] = {}
        self.cache_dir = cache_folder(section.cache_dir if section else str(cache_dir) if cache_dir else None)

    def cached(self, source: Source) -> CachedCorpus:
        """A corpus in the token cache."""
        return self._open(source, streaming=False)

    def trained(self, source: Source) -> Corpus:
        """A corpus for training: cached, or streamed where the recipe says so. How it begins is shown."""
        corpus = self._open(source, streaming=self.streaming)
        said = beginning(corpus.source, template=self.tokenizer.chat_template is not None)
        self.watcher.message(f"{self._shown(source.source)}: {said}")
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
        """What messages call a source."""
        return self.passed[name].label if name in self.passed else name

    def _progress(self, progress: Progress) -> None:
        if progress.message is not None:
            self.watcher.message(progress.message)
        elif progress.stage == "tokenize" or progress.total_bytes > QUIET_BYTES:
            what = {"hash": "reading", "tokenize": "tokenizing", "verify": "checking"}.get(
                progress.stage, progress.stage
            )
            self.watcher.working(
                f"{what} {self._shown(progress.source)}", progress.done_bytes, progress.total_bytes, "bytes"
            )

    def _spec(self, source: Source) -> SourceSpec:
        files: tuple[Path, ...] = ()
        passed = self.passed.get(source.source)
        if source.source.startswith(MEMORY_PREFIX):
            if passed is None or passed.stream is None:
                files = (self._spooled(source.source),)
        elif source.source.startswith(STARTER_PREFIX):
            files = (self._starter_file(source.source.removeprefix(STARTER_PREFIX), source.first),)
        elif _is_hub_id(source.source):
            # The same data set may be named twice, at two revisions.
            pin = source.source if source.revision is None else f"{source.source}@{source.revision}"
            revision = self.kept_commits.get(pin) or source.revision
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
            began=self.began,
        )

    def check_streams(self, sources: Sequence[Source]) -> None:
        """Files are drawn from in proportion to their bytes, which rows from Python do not have."""
        streams = [
            one.source for one in sources if one.source in self.passed and self.passed[one.source].stream
        ]
        files = [one.source for one in sources if one.source not in streams]
        if self.streaming and streams and files:
            raise DataError(
                f"rows from Python ({self.passed[streams[0]].label}) are streamed beside {files[0]}, and how many "
                "there will be is not known",
                "set data.streaming: false, or stream only rows or only files",
            )

    def _spooled(self, name: str) -> Path:
        path = spool_path(memory_folder(self.cache_dir), name.removeprefix(MEMORY_PREFIX))
        if not path.is_file():
            raise DataError(
                f"the rows {name} were passed from Python and are not in the cache ({path})",
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
        kept = f"{name}-{STARTER_SEED}-{count}"
        if field == CHAT:
            chats = starter.math_chats(STARTER_SEED, count, split)
            rows = ({"messages": messages} for messages in chats)
            return data.keep_rows(kept, rows, self.cache_dir / "generated").files[0]
        documents = starter.math_documents(STARTER_SEED, count, split, topics=starter.FIELDS[field])
        return data.keep_texts(kept, documents, self.cache_dir / "generated").files[0]


def memory_folder(cache_dir: Path) -> Path:
    """Where rows from Python are kept."""
    return cache_dir / "memory"


def cache_folder(named: str | None) -> Path:
    """The token cache: `data.cache_dir` of a recipe, or the usual place."""
    return Path(named).expanduser() if named else default_cache_dir()


def _is_hub_id(name: str) -> bool:
    """`org/name` that is no path here, nor looks like one; a data file's suffix makes it a path too."""
    return "/" in name and not (
        os.path.lexists(name) or looks_local(name) or classify(Path(name))[0] is not None
    )
