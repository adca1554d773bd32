"""Corpora, held-out parts, loaders, the token cache, runs that resume with other data, and other files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cases import World, case, settings
from on_data import ASK, CHATS, GOOD, SAY, chat, opened, read, written

from trimtab import text
from trimtab.data import make_loader, open_corpus
from trimtab.data.batch import eval_batches
from trimtab.data.packing import check_length
from trimtab.data.sampling import StepShape
from trimtab.data.selection import heldout_threshold


# What is left.
def left(function: str, rows: list[Any], *rights: list[Any], **spec: Any) -> None:
    case(
        f"data/selection.py:{function}",
        lambda w: read(w, "rows.jsonl", rows, **spec),
        lambda w, remedy: [read(w, "rows.jsonl", right, **spec) for right in rights],
    )


left(
    "no_documents_error: repair the rows; the first: {}",
    [{"messages": 5}],
    CHATS,
    format="messages",
    bad_rows="skip",
)
left("no_documents_error: use a source that contains text", [{"text": " "}], GOOD)
UNANSWERED = [chat(ASK)]
case(
    "data/selection.py:no_documents_error: give conversations with answers, or set train_on: all to train on "
    "everything",
    lambda w: read(w, "rows.jsonl", UNANSWERED),
    lambda w, remedy: (
        read(w, "rows.jsonl", CHATS),
        read(w, "rows.jsonl", UNANSWERED, train_on=settings(remedy)[0][0].partition("=")[2]),
    ),
)


def held_out(w: World, rows: Any, name: str = "rows.jsonl", **more: Any) -> str:
    """A recipe that holds a part of its data out."""
    model = {"name": str(w.model), "tokenizer": str(w.own("chat"))}
    train = [str(written(w, name, rows))]
    return w.train(**{"model": model, "data_train": train, "data_eval_share": 0.5, "max_steps": 1, **more})


def follow_held_out(w: World, remedy: str, one: Any, more: Any, name: str) -> None:
    held_out(w, more, name)
    assert "data.eval.domain" in remedy
    domain = str(written(w, f"domain-{name}", more))
    held_out(w, one, name, data_eval={"domain": [domain]})
    held_out(w, one, name, data_eval_share=float(settings(remedy)[-1][0].partition("=")[2]))


case(
    "data/cached_corpus.py:CachedCorpus.split: add examples, name an evaluation set under data.eval.domain, or set "
    "data.eval_share: 0",
    lambda w: held_out(w, CHATS[:1]),
    lambda w, remedy: follow_held_out(
        w,
        remedy,
        CHATS[:1],
        [chat({"role": "user", "content": str(i)}, SAY) for i in range(20)],
        "rows.jsonl",
    ),
)
case(
    "data/cached_corpus.py:CachedCorpus._split_tail: add text, name an evaluation set under data.eval.domain, or set "
    "data.eval_share: 0",
    lambda w: held_out(w, "cat", "word.txt"),
    lambda w, remedy: follow_held_out(w, remedy, "cat", "the cat sees a dog under a tree. " * 20, "word.txt"),
)


MORE = [{"text": f"the cat sees {i} dogs."} for i in range(9)]


def apart(w: World, trained: Any, measured: Any) -> object:
    return read(w, "train.jsonl", trained).without(read(w, "measured.jsonl", measured))


case(
    "data/cached_corpus.py:CachedCorpus.without: name other text under data.eval, or remove it from data.train",
    lambda w: apart(w, GOOD, GOOD),
    lambda w, remedy: (apart(w, GOOD, MORE), apart(w, MORE, GOOD)),
)


# Loaders.
def loader(w: World, **options: Any) -> object:
    corpus = read(w, "a.jsonl", MORE)
    return make_loader([corpus], **{"max_seq_length": 32, "batch_size": 1, **options})


case(
    "data/factory.py:open_corpus: give 1 or more, or leave it out to use all cores",
    lambda w: open_corpus(
        str(written(w, "a.jsonl", GOOD)), text.load(w.model), cache_dir=w.tmp / "c", num_proc=0
    ),
    lambda w, remedy: [
        open_corpus(
            str(written(w, "a.jsonl", GOOD)),
            text.load(w.model),
            cache_dir=w.tmp / f"c{count}",
            num_proc=count,
        )
        for count in (int(re.findall(r"\d", remedy)[0]), None)
    ],
)
case(
    "data/factory.py:make_loader: name one under data.train",
    lambda w: make_loader([], max_seq_length=32, batch_size=1),
    lambda w, remedy: loader(w),
)


def mixed(w: World, *streaming: bool) -> object:
    path = written(w, "a.jsonl", MORE)
    return make_loader([opened(w, path, streaming=one) for one in streaming], max_seq_length=32, batch_size=1)


case(
    "data/factory.py:make_loader: open all of them in the same way",
    lambda w: mixed(w, True, False),
    lambda w, remedy: (mixed(w, True, True), mixed(w, False, False)),
)
case(
    "data/sampling.py:StepShape.__post_init__: set per_device_train_batch_size and gradient_accumulation_steps to 1 or "
    "more",
    lambda w: StepShape(0, 1, 0, 1),
    lambda w, remedy: StepShape(*[int(re.findall(r" (\d) or more", remedy)[0])] * 2, 0, 1),
)
case(
    "data/batch.py:eval_batches: give 1 or more",
    lambda w: measured_windows(w, 0),
    lambda w, remedy: measured_windows(w, int(re.findall(r"\d", remedy)[0])),
)


def measured_windows(w: World, count: int) -> object:
    return list(eval_batches(read(w, "a.jsonl", MORE), max_seq_length=32, batch_size=1, max_sequences=count))


case(
    "data/selection.py:heldout_threshold: set a share between 0 and 1",
    lambda w: heldout_threshold(1.0),
    lambda w, remedy: heldout_threshold(0.5),
)
case(
    "data/selection.py:heldout_mask: give 1 or more",
    lambda w: read(w, "a.jsonl", MORE).split(count=0),
    lambda w, remedy: read(w, "a.jsonl", MORE).split(count=int(re.findall(r"\d", remedy)[0])),
)
LONG = [chat({"role": "user", "content": "the cat " * 200}, SAY)]


def packed(w: World, rows: list[Any], length: int) -> object:
    return make_loader([read(w, "a.jsonl", rows)], max_seq_length=length, batch_size=1)


case(
    "data/selection.py:no_sequences_error: raise max_seq_length, or shorten the text before the answers",
    lambda w: packed(w, LONG, 32),
    lambda w, remedy: (packed(w, LONG, 4096), packed(w, CHATS, 128)),
)
case(
    "data/sampling.py:check_share: set a share from 0 to below 1",
    lambda w: loader(w, replay_share=1.0, replay=[read(w, "b.jsonl", GOOD)]),
    lambda w, remedy: [
        loader(w, replay_share=share, replay=[read(w, "b.jsonl", GOOD)]) for share in (0, 0.9)
    ],
)
case(
    "data/sampling.py:check_share: name replay sources or set it to 0",
    lambda w: loader(w, replay_share=0.5),
    lambda w, remedy: (
        loader(w, replay_share=0.5, replay=[read(w, "b.jsonl", GOOD)]),
        loader(w, replay_share=0),
    ),
)
case(
    "data/packing.py:check_length: give {} or more",
    lambda w: check_length(0),
    lambda w, remedy: check_length(int(remedy.split()[1])),
)
case(
    "data/stream_corpus.py:StreamCorpus.split: give a share, or set streaming: false",
    lambda w: opened(w, written(w, "a.jsonl", MORE), streaming=True).split(count=2),
    lambda w, remedy: (
        opened(w, written(w, "a.jsonl", MORE), streaming=True).split(share=0.5),
        opened(w, written(w, "a.jsonl", MORE), streaming=False).split(count=2),
    ),
)


def weighted(w: World, weight: float, *overrides: str) -> object:
    source = {"source": str(written(w, "a.jsonl", MORE)), "weight": weight}
    return w.train(*overrides, data_train=[source], data_streaming=True, max_steps=1)


case(
    "data/stream_loader.py:StreamLoader.__init__: leave the weight at 1, or set data.streaming: false",
    lambda w: weighted(w, 2),
    lambda w, remedy: (weighted(w, 1), weighted(w, 2, *settings(remedy)[0])),
)


# The cache.
def cached(w: World, folder: Path) -> object:
    return open_corpus(str(written(w, "a.jsonl", GOOD)), text.load(w.model), cache_dir=folder, num_proc=1)


ELSEWHERE = "use another folder: data.cache_dir in a recipe, --cache-dir of `trimtab eval`"


def follow_elsewhere(w: World, remedy: str) -> None:
    cached(w, w.tmp / "another")
    key, flag = re.findall(r"data\.cache_dir|--cache-dir", remedy)
    w.train(f"{key}={w.tmp / 'third'}", max_steps=1)
    w.cli("eval", w.model, w.tmp / "a.jsonl", "--no-probe", flag, w.tmp / "fourth")


case(
    f"data/cache.py:TokenCache.__init__: {ELSEWHERE}",
    lambda w: cached(w, written(w, "file", "x") / "cache"),
    follow_elsewhere,
)


def locked(w: World) -> object:
    cached(w, w.tmp / "mine")
    import shutil

    shutil.rmtree(w.tmp / "mine" / "locks")
    shutil.rmtree(w.tmp / "mine" / "entries")
    (w.tmp / "mine" / "entries").mkdir()
    return cached_without_locks(w)


def cached_without_locks(w: World) -> object:
    from trimtab.data.cache import TokenCache
    from trimtab.data.selection import SourceCounts

    cache = TokenCache(w.tmp / "mine", print)
    (w.tmp / "mine" / "locks").rmdir()
    written(w, "mine/locks", "x")
    return cache.get_or_build("key", lambda writer: SourceCounts(), dtype="uint16", need_bytes=1)


case(f"data/cache.py:TokenCache._lock: {ELSEWHERE}", locked, follow_elsewhere)


def grouped(w: World, *, packing: bool, streaming: bool) -> object:
    corpus = opened(w, written(w, "a.jsonl", MORE), streaming=streaming)
    return make_loader([corpus], max_seq_length=32, batch_size=1, packing=packing, group_by_length=True)


case(
    "data/factory.py:make_loader: pass packing=False",
    lambda w: grouped(w, packing=True, streaming=False),
    lambda w, remedy: grouped(w, packing=remedy != "pass packing=False", streaming=False),
)
case(
    "data/factory.py:make_loader: open them without streaming",
    lambda w: grouped(w, packing=False, streaming=True),
    lambda w, remedy: grouped(w, packing=False, streaming=False),
)


# A run that resumes with other data.
def position(
    w: World, rows: list[Any], sources: int = 1, name: str = "a.jsonl", **options: Any
) -> tuple[Any, Any]:
    corpora = [read(w, name, rows)] * sources
    loader = make_loader(corpora, **{"max_seq_length": 32, "batch_size": 1, **options})
    return loader, loader.position()


def continue_run(w: World, rows: list[Any], sources: int = 1, **options: Any) -> None:
    """A loader set to the place of another: 9 rows, one source, sequences of 32."""
    _, place = position(w, MORE)
    loader, _ = position(w, rows, sources, **options)
    loader.restore(place)


def follow_back(w: World, remedy: str) -> None:
    continue_run(w, MORE)
    assert "start a new run" in remedy
    w.train(max_steps=1)


case(
    "data/resume_checks.py:LoaderSettings.check: restore the former {}, or start a new run",
    lambda w: continue_run(w, MORE, max_seq_length=16),
    follow_back,
)
case(
    "data/resume_checks.py:LoaderSettings.check: restore the recipe's data section, or start a new run",
    lambda w: continue_run(w, MORE, 2),
    follow_back,
)
case(
    "data/resume_checks.py:LoaderSettings.check: restore the files, their weights and the tokenizer, or start a "
    "new run",
    lambda w: continue_run(w, GOOD),
    follow_back,
)


def changed_files(w: World, rows: list[Any]) -> None:
    kept = read(w, "kept.jsonl", MORE).manifest()
    read(w, "kept.jsonl", rows).check(kept)


case(
    "data/resume_checks.py:CorpusManifest.check: restore the files, or start a new run",
    lambda w: changed_files(w, GOOD),
    lambda w, remedy: (changed_files(w, MORE), w.train(max_steps=1)),
)


# CSV, other files, preferences.
case(
    "data/readers_csv.py:delimiter_of: put texts that contain {} in double quotes",
    lambda w: read(w, "a.csv", "n;text\n1;a cat; a dog\n2;a tree\n"),
    lambda w, remedy: read(w, "a.csv", 'n;text\n1;"a cat; a dog"\n2;a tree\n'),
)
HEADLESS = "1,the cat sees a dog.\n2,a dog runs.\n"
case(
    "data/readers_csv.py:refuse_data_as_header: add a header line, such as `{}`; if these are the column names, "
    "set text_column",
    lambda w: read(w, "a.csv", HEADLESS),
    lambda w, remedy: (
        read(w, "a.csv", re.findall("`(.*?)`", remedy)[0] + "\n" + HEADLESS),
        read(w, "a.csv", HEADLESS, text_column="the cat sees a dog."),
    ),
)
PDF = b"%PDF-1.7 and so on" + bytes(range(256))
case(
    "data/readers_text.py:_refuse_binary: {}",
    lambda w: read(w, "a.txt", PDF),
    lambda w, remedy: read(w, "a.txt", "the text of the PDF"),
)
case(
    "data/readers_parquet.py:_not_parquet: {}",
    lambda w: read(w, "a.parquet", PDF),
    lambda w, remedy: read(w, "a.txt", "the text of the PDF"),
)
PAIRS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": "a cat", "chosen": " runs", "rejected": " sits"}],
    "chat": [{"chosen": CHATS[0]["messages"], "rejected": CHATS[0]["messages"]}],
    "text": [{"chosen": "a cat runs", "rejected": "a cat sits"}],
}


def preferences(w: World, name: str, *overrides: str) -> str:
    path = written(w, f"{name}.jsonl", PAIRS[name] * 4)
    model = {"name": str(w.model), "tokenizer": str(w.own("chat"))}
    return w.train(*overrides, model=model, data_train=[{"source": str(path)}], max_steps=1)


for name in PAIRS:
    case(
        "data/detection.py:_preferences: train on the chosen answers: add {}: {} to the source, or "
        "pass 'data.train.0.{}={}' on the command line",
        lambda w, name=name: preferences(w, name),
        lambda w, remedy, name=name: preferences(w, name, re.findall("'(data.train.*?)'", remedy)[0]),
    )
