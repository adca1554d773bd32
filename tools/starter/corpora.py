"""Builds the starter's pretraining corpus and the small text files that ship with the package.

    python -m tools.starter.corpora OUT --texts UNPACKED_PACKAGES     the full corpus
    python -m tools.starter.corpora OUT --public public.jsonl.gz      the same from text that was extracted before

Writes `stories-NN.jsonl` (generated) and `public.jsonl` (public-domain text) to OUT, one {"text": …} per line; with
--numbers also `numbers.jsonl` (number facts) and with --terms `terms.jsonl` (numbers and terms to copy). With
--package-data it also regenerates the held-out and replay files in `starter/data`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tools.starter import texts
from tools.starter.numbers import number_documents
from tools.starter.stories import general_documents
from tools.starter.terms import term_documents
from trimtab.facts.errors import TrimtabError
from trimtab.starter.files import HERE as STARTER

Task = TypeVar("Task")
Result = TypeVar("Result")

SEED = 8
SHARD_DOCUMENTS = 20_000
# Documents in addition to general text: the basics of mathematics.
LESSONS = {"numbers": number_documents, "terms": term_documents}
DATA = STARTER / "data"
# Sizes of the files that ship with the package.
HOLDOUT_CHARS = {"public": 170_000, "generated": 90_000}
REPLAY_CHARS = {"public": 130_000, "generated": 130_000, "numbers": 40_000, "terms": 20_000}


def write_lines(path: Path, documents: Iterable[str]) -> int:
    """Write one JSON object per line, gzipped for a `.gz` name; returns the number of characters."""
    chars = 0
    with gzip.GzipFile(path, "wb", mtime=0) if path.suffix == ".gz" else path.open("wb") as file:
        for text in documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            chars += len(text)
    return chars


def read_lines(path: Path) -> Iterator[str]:
    """The texts of a JSON-lines file, gzipped or not."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for line in file:
            yield json.loads(line)["text"]


def public_documents(folder: Path, split: str) -> list[str]:
    """Public-domain documents of one split from unpacked packages.

    Some passages occur twice in the Bible (Kings and Chronicles share pages, Daniel has two versions): paragraphs that
    are also in the training split are removed from the held-out chapters.
    """
    chapters = texts.chapters(folder)
    trained = {p for c in chapters if c.split == "train" for p in c.paragraphs}
    if split == "heldout":
        chapters = [c._replace(paragraphs=[p for p in c.paragraphs if p not in trained]) for c in chapters]
    return [d for c in chapters if c.split == split for d in texts.documents(c)]


def _mapped(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[Result]:
    """Map tasks in processes; results keep the order, so that the corpus does not depend on `workers`."""
    if workers <= 1:
        yield from map(function, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(function, tasks)


def _write_shard(task: tuple[str, int]) -> int:
    folder, shard = task
    found = general_documents(SEED, SHARD_DOCUMENTS, start=shard * SHARD_DOCUMENTS)
    return write_lines(Path(folder) / f"stories-{shard:02d}.jsonl", found)


def write_stories(folder: Path, shards: int, workers: int) -> int:
    """Write the generated shards in parallel; about 11 million characters each."""
    tasks = [(str(folder), shard) for shard in range(shards)]
    return sum(_mapped(_write_shard, tasks, workers))


def _lesson(task: tuple[str, int, int]) -> list[str]:
    name, start, count = task
    return list(LESSONS[name](SEED, count, start))


def write_lessons(folder: Path, name: str, count: int, workers: int) -> int:
    """Writes `NAME.jsonl`, a few thousand documents per task."""
    step = 5_000
    tasks = [(name, start, min(step, count - start)) for start in range(0, count, step)]
    found = (text for part in _mapped(_lesson, tasks, workers) for text in part)
    return write_lines(folder / f"{name}.jsonl", found)


def spread(documents: list[str], chars: int) -> list[str]:
    """Evenly spaced documents up to a number of characters, so that every work is included."""
    total = sum(map(len, documents))
    step = max(total / chars, 1.0)
    chosen, size, i = [], 0, 0.0
    while int(i) < len(documents) and size < chars:
        chosen.append(documents[int(i)])
        size += len(chosen[-1])
        i += step
    return chosen


def write_package_data(folder: Path, data: Path = DATA) -> None:
    """`general.jsonl` (held out) and `replay.jsonl` (from the base model's training data)."""
    data.mkdir(parents=True, exist_ok=True)
    heldout = list(dict.fromkeys(general_documents(SEED, 400, "heldout")))
    trained = set(general_documents(SEED, SHARD_DOCUMENTS))
    heldout = [d for d in heldout if d not in trained]
    general = spread(public_documents(folder, "heldout"), HOLDOUT_CHARS["public"])
    general += spread(heldout, HOLDOUT_CHARS["generated"])
    write_lines(data / "general.jsonl", general)
    replay = spread(public_documents(folder, "train"), REPLAY_CHARS["public"])
    replay += spread(list(general_documents(SEED, 400)), REPLAY_CHARS["generated"])
    replay += spread(list(number_documents(SEED, 400)), REPLAY_CHARS["numbers"])
    replay += spread(list(term_documents(SEED, 400)), REPLAY_CHARS["terms"])
    write_lines(data / "replay.jsonl", replay)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m tools.starter.corpora", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("out", type=Path, help="folder for the corpus")
    parser.add_argument("--texts", type=Path, help="folder where the Debian packages were unpacked")
    parser.add_argument(
        "--public", type=Path, help="public-domain text that was extracted before (.jsonl or .jsonl.gz)"
    )
    parser.add_argument("--shards", type=int, default=30, help="files of generated text, about 11 MB each")
    parser.add_argument(
        "--numbers", type=int, default=0, help="documents of number facts, 230 characters each"
    )
    parser.add_argument("--terms", type=int, default=0, help="documents of numbers and terms to copy")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--package-data", action="store_true", help="also write starter/data (needs --texts)")
    options = parser.parse_args(arguments)
    if (options.texts is None) == (options.public is None):
        parser.error("give either --texts or --public")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        public = read_lines(options.public) if options.public else public_documents(options.texts, "train")
        print(f"public.jsonl: {write_lines(options.out / 'public.jsonl', public) / 1e6:.1f} M characters")
        if options.package_data:
            if options.texts is None:
                parser.error("--package-data needs --texts")
            write_package_data(options.texts)
        for name, count in (("numbers", options.numbers), ("terms", options.terms)):
            if count:
                chars = write_lessons(options.out, name, count, options.workers)
                print(f"{name}.jsonl: {chars / 1e6:.1f} M characters")
        chars = write_stories(options.out, options.shards, options.workers)
        print(f"stories: {chars / 1e6:.1f} M characters in {options.shards} files")
    except TrimtabError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
