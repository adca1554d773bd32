"""The token cache: correct keys, no bad entry after a kill, damage detected, one builder at a time."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.data import fingerprints, spec
from trimtab.data.cached_corpus import CachedCorpus
from trimtab.data.caching import open_cached
from trimtab.data.resume_checks import CorpusManifest
from trimtab.data.sources import SourceSpec
from trimtab.data.tokenizing import TokenizerSpec
from trimtab.facts.errors import DataError, ResourceError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path, prose) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(4):
        (folder / f"f{i}.txt").write_text(prose(i, 200))
    return folder


def opened(source: Path, tokenizer, messages: list[str] | None = None, **settings) -> CachedCorpus:
    def listen(report) -> None:
        if report.message and messages is not None:
            messages.append(report.message)

    cache = source.parent / "cache"
    return open_cached(SourceSpec(str(source), **settings), tokenizer, cache_dir=cache, progress=listen)


def entries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "entries").iterdir())


def content(corpus: CachedCorpus) -> list[list[int]]:
    return [corpus.tokens(i).tolist() for i in range(corpus.num_documents)]


def test_a_cached_source_is_not_tokenized_again(source: Path, tokenizer, monkeypatch) -> None:
    first = opened(source, tokenizer)
    monkeypatch.setattr("trimtab.data.caching.tokenize", None)  # would fail if it were called
    second = opened(source, tokenizer)
    assert content(first) == content(second)
    assert first.summary == second.summary
    assert first.tokens(0).dtype == "uint16"
    assert content(first)[2] == tokenizer.encode_document((source / "f2.txt").read_text())
    sizes = sum((entries(source)[0] / name).stat().st_size for name in ("tokens.bin", "documents.bin"))
    assert sizes == spec.cache_bytes(first.num_tokens, first.num_documents, tokenizer.vocab_size)


def test_content_tokenizer_and_settings_make_the_key(source: Path, tokenizer, spaced_tokenizer) -> None:
    first = opened(source, tokenizer)
    opened(source, tokenizer, documents="lines")
    opened(source, tokenizer, first=2)
    opened(source, spaced_tokenizer)
    large = dataclasses.replace(TokenizerSpec.of(tokenizer), vocab_size=151_936)
    assert opened(source, large).tokens(0).dtype == "uint32"
    assert len(entries(source)) == 5
    os.rename(source / "f3.txt", source / "g.txt")  # the same content under another name
    renamed = opened(source, tokenizer)
    assert len(entries(source)) == 5
    assert renamed.origin(3) == "g.txt:1"
    text = (source / "f1.txt").read_text()
    (source / "f1.txt").write_text(text.replace("e", "o", 1))  # the same size
    changed = opened(source, tokenizer)
    assert len(entries(source)) == 6
    assert changed.fingerprint != first.fingerprint == renamed.fingerprint


def test_digests_are_cached_only_for_files_that_are_not_being_written(
    source: Path, tmp_path: Path, monkeypatch
) -> None:
    read = []
    real = fingerprints.hash_file
    monkeypatch.setattr(fingerprints, "hash_file", lambda path: read.append(path) or real(path))
    file, memory = source / "f0.txt", tmp_path / "memory"
    memory.mkdir()

    def digest() -> str:
        return fingerprints.cached_digest(file, fingerprints.stat_of(file), memory, fingerprints.hash_file)

    digest(), digest()
    assert len(read) == 2, "a file written a moment ago may still be written to within the clock's grain"
    monkeypatch.setattr(fingerprints, "MIN_AGE_NS", -1)
    first = digest()
    assert digest() == first
    assert len(read) == 3
    stat = file.stat()
    file.write_text(file.read_text()[::-1])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and mtime as before: ctime tells
    assert digest() != first
    (memory / next(memory.iterdir()).name).write_text("{broken")
    assert digest() == real(file)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone", "empty"])
def test_a_damaged_entry_is_built_again(name: str, how: str, source: Path, tokenizer) -> None:
    good = content(opened(source, tokenizer))
    (entry,) = entries(source)
    data = bytearray((entry / name).read_bytes())
    if how == "gone":
        (entry / name).unlink()
    else:
        data[len(data) // 2] ^= 4
        (entry / name).write_bytes({"flip": data, "cut": data[:-3], "empty": b""}[how])
    messages: list[str] = []
    assert content(opened(source, tokenizer, messages)) == good
    assert any("is damaged" in m and "it is rebuilt" in m for m in messages), messages
    quiet: list[str] = []
    opened(source, tokenizer, quiet)
    assert quiet == []


def test_a_copied_cache_is_checked_once_and_used(source: Path, tokenizer, monkeypatch) -> None:
    good = content(opened(source, tokenizer))
    cache = source.parent / "cache"
    shutil.copytree(cache, cache.with_name("copy"))
    shutil.rmtree(cache)
    os.rename(cache.with_name("copy"), cache)
    monkeypatch.setattr("trimtab.data.caching.tokenize", None)
    assert content(opened(source, tokenizer)) == good


BUILD = """
import json, os, sys, time
from pathlib import Path
from trimtab.data import cache
from trimtab.data.caching import open_cached
from trimtab.data.sources import SourceSpec
from trimtab.data.tokenizing import TokenizerSpec

source, folder, spec, pause = sys.argv[1:]
append = cache.Writer.append_tokens
def slowly(self, ids, trained=None):
    append(self, ids)
    time.sleep(float(pause))
cache.Writer.append_tokens = slowly
tokenizer = TokenizerSpec(**json.loads(Path(spec).read_text()))
reports = []
print("begins", flush=True)
while not Path(folder).parent.joinpath("go").exists():
    time.sleep(0.005)
corpus = open_cached(SourceSpec(source, documents="lines"), tokenizer, cache_dir=Path(folder),
                     num_proc=1, progress=lambda r: reports.append([r.stage, r.message]))
print(json.dumps({"tokens": corpus.num_tokens, "reports": reports,
                  "built": any(stage == "tokenize" for stage, _ in reports)}))
"""


def builder(source: Path, tokenizer, pause: float) -> subprocess.Popen:
    note = source.parent / "spec.json"
    note.write_text(json.dumps(dataclasses.asdict(TokenizerSpec.of(tokenizer))))
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source), str(source.parent / "cache"), str(note), str(pause)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_killed_in_the_middle_it_leaves_no_bad_entry(source: Path, tokenizer) -> None:
    folder = source.parent / "cache" / "entries"
    (source.parent / "go").touch()
    for attempt in range(3):
        process = builder(source, tokenizer, 0.02)
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        deadline = time.time() + 20
        while not list(folder.glob(".building-*/tokens.bin")) and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(0.1 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert list(folder.glob(".building-*")), "it should have died while writing"
        assert [e for e in entries(source) if not e.name.startswith(".")] == []
    corpus = opened(source, tokenizer, documents="lines")
    lines = [
        line for i in range(4) for line in (source / f"f{i}.txt").read_text().split("\n") if line.strip()
    ]
    assert content(corpus) == [tokenizer.encode_document(line) for line in lines]
    assert [e.name.startswith(".") for e in entries(source)] == [False], "what was left over is gone"


def test_one_of_several_builders_builds_and_the_others_wait(source: Path, tokenizer) -> None:
    processes = [builder(source, tokenizer, 0.03) for _ in range(3)]
    assert all(process.stdout is not None and process.stdout.readline() for process in processes)
    (source.parent / "go").touch()  # all have started and imported what they need
    found = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        found.append(json.loads(out))
    assert len({f["tokens"] for f in found}) == 1
    assert sum(f["built"] for f in found) == 1
    waited = [f for f in found if any(m and "waiting" in m for _, m in f["reports"])]
    assert len(waited) == 2, found


def test_a_full_disk_is_reported_before_and_while_writing(source: Path, tokenizer, monkeypatch) -> None:
    real = shutil.disk_usage(source)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: real._replace(free=10))
        with pytest.raises(
            ResourceError, match=r"the token cache needs about .* and 10 B are free; free some"
        ):
            opened(source, tokenizer)

    def fails(self, ids, trained=None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("trimtab.data.cache.Writer.append_tokens", fails)
        with pytest.raises(
            ResourceError, match=r"cannot be written .No space left on device.; free some space"
        ):
            opened(source, tokenizer)
    assert entries(source) == []
    assert opened(source, tokenizer).num_documents == 4


def test_a_cache_folder_that_cannot_be_created_is_an_error(source: Path, tokenizer) -> None:
    (source.parent / "cache").write_text("a file is in the way")
    with pytest.raises(ResourceError, match=r"cannot be created .*; use another folder: data\.cache_dir"):
        opened(source, tokenizer)


def test_changed_data_is_named(source: Path, tokenizer, prose) -> None:
    before = opened(source, tokenizer)
    kept = json.loads(json.dumps(before.manifest()))
    before.check(kept)
    (source / "f1.txt").write_text(prose(99, 50))
    (source / "f2.txt").unlink()
    (source / "new.txt").write_text("new text")
    with pytest.raises(
        DataError, match=r"missing: f2\.txt; changed: f1\.txt; new: new\.txt\); restore the files"
    ):
        opened(source, tokenizer).check(kept)
    with pytest.raises(DataError, match=r"read with different settings"):
        CorpusManifest.from_dict(kept).check(CorpusManifest.from_dict({**kept, "fingerprint": "x"}))


def test_a_file_that_grows_while_it_is_read_is_refused(source: Path, tokenizer, monkeypatch) -> None:
    from trimtab.data import caching as module

    real = module.tokenize

    def tokenize_then_append(*arguments):
        yield from real(*arguments)
        with open(source / "f3.txt", "a") as file:
            file.write("more")

    monkeypatch.setattr(module, "tokenize", tokenize_then_append)
    with pytest.raises(DataError, match=r"f3\.txt changed while it was being read; run again"):
        opened(source, tokenizer)
    assert entries(source) == []
