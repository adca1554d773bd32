"""Tokenizing: the same ids in one process and in many, for split documents too, within a fixed amount of memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from trimtab.data import readers, tokenizing
from trimtab.data import tokenizer_worker as worker
from trimtab.data.caching import open_cached
from trimtab.data.readers import Segment, split_segments
from trimtab.data.sources import SourceSpec
from trimtab.data.spec import SEGMENT_CHARS
from trimtab.data.tokenizer_pool import WorkerPool
from trimtab.data.tokenizing import TokenizerSpec, tokenize
from trimtab.facts.errors import ModelError, ResourceError


def segments(prose, count: int, words: int) -> list[Segment]:
    return [Segment(0, i + 1, prose(i, words), True, True) for i in range(count)]


def test_documents_get_the_tokenizer_s_beginning_and_end_tokens(tokenizer, prose) -> None:
    given = segments(prose, 30, 50)
    found = list(tokenize(given, TokenizerSpec.of(tokenizer), 1))
    assert [f.ids.tolist() for f in found] == [tokenizer.encode_document(s.text) for s in given]
    assert TokenizerSpec.of(tokenizer).suffix == (0,)


def test_many_processes_give_the_same_in_the_same_order(tokenizer, prose) -> None:
    given = segments(prose, 400, 800)  # a few batches for each process
    spec = TokenizerSpec.of(tokenizer)
    alone, together = (list(tokenize(given, spec, n)) for n in (1, 3))
    assert sum(len(s.text) for s in given) > 4 * tokenizing.BATCH_CHARS
    assert [f.row for f in together] == [s.row for s in given]
    for first, second in zip(alone, together, strict=True):
        assert first.ids.tolist() == second.ids.tolist()
        assert first.hash == second.hash


@pytest.mark.parametrize("which", ["tokenizer", "spaced_tokenizer"])
def test_splitting_a_long_document_changes_no_token(which: str, request, prose, monkeypatch) -> None:
    chosen = request.getfixturevalue(which)
    monkeypatch.setattr(readers, "SEGMENT_CHARS", 500)
    text = prose(1, 3000)
    parts = list(split_segments(iter([(1, text, True)]), 0))
    assert len(parts) > 20
    ids = np.concatenate([t.ids for t in tokenize(parts, TokenizerSpec.of(chosen), 1)])
    assert ids.tolist() == chosen.encode_document(text)


def test_a_tokenizer_with_other_ids_in_a_worker_is_refused(tokenizer) -> None:
    class Strange:
        vocab_size, fingerprint, backend = tokenizer.vocab_size, "f", tokenizer.backend

        def encode(self, text: str) -> list[int]:
            return [1, *tokenizer.encode(text)]

        encode_document = encode

    with pytest.raises(ModelError, match=r"returns different ids in a worker process"):
        TokenizerSpec.of(Strange())  # type: ignore[arg-type]


def test_a_process_that_dies_is_reported_and_none_remains(tokenizer) -> None:
    spec = TokenizerSpec.of(tokenizer)
    pool = WorkerPool((spec.json, spec.continued_json), 2)
    try:
        assert pool.submit([Segment(0, 1, "some text", True, True)]).result(30)[1].sum() > 0
        for child in pool._workers:
            child.process.kill()
            child.process.wait()
        with pytest.raises(ResourceError, match=r"a tokenizer process exited early \(signal 9\)"):
            pool.submit([Segment(0, 1, "some text", True, True)]).result(30)
    finally:
        pool.close()
    assert all(child.process.poll() is not None for child in pool._workers)


def test_a_worker_reports_why_it_exited(tokenizer) -> None:
    spec = TokenizerSpec("{not a tokenizer", "{not a tokenizer", (), (), 5, "f")
    pool = WorkerPool((spec.json, spec.continued_json), 1)
    try:
        with pytest.raises(ResourceError, match=r"exited early .*(expected|key|Error)"):
            pool.submit([Segment(0, 1, "text", True, True)]).result(30)
    finally:
        pool.close()


def test_leaving_early_ends_the_processes(tokenizer, prose) -> None:
    before = set(_children())
    stream = tokenize(iter(segments(prose, 400, 800)), TokenizerSpec.of(tokenizer), 2)
    next(stream)
    assert set(_children()) - before
    stream.close()  # type: ignore[attr-defined]
    assert not set(_children()) - before


def _children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def test_the_worker_does_not_import_trimtab() -> None:
    code = f"import sys, runpy; runpy.run_path({worker.__file__!r}, run_name='x');"
    code += "print([m for m in sys.modules if m.startswith(('trimtab', 'torch'))])"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# Runs in a process of its own without a __main__ guard, which multiprocessing's spawn would not survive.
PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import psutil
from trimtab.data.caching import open_cached
from trimtab.data.sources import SourceSpec
from trimtab.data.tokenizing import TokenizerSpec

source, cache, spec = sys.argv[1:]
peak, me, done = 0, psutil.Process(), threading.Event()
def watch():
    global peak
    while not done.wait(0.02):
        total = 0
        for process in [me, *me.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                pass
        peak = max(peak, total)
thread = threading.Thread(target=watch); thread.start()
reports = []
tokenizer = TokenizerSpec(**json.loads(Path(spec).read_text()))
start = time.time()
corpus = open_cached(
    SourceSpec(source), tokenizer, cache_dir=Path(cache), num_proc=2, progress=reports.append
)
seconds = time.time() - start
done.set()
thread.join()
shares = [r.done_bytes / r.total_bytes for r in reports if r.stage == "tokenize"]
assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10, shares
assert "torch" not in sys.modules
print(json.dumps({"peak": peak, "documents": corpus.num_documents, "tokens": corpus.num_tokens,
                  "first": corpus.tokens(0)[:50].tolist(), "seconds": seconds}))
"""


def measure(source: Path, tmp_path: Path, tokenizer) -> dict:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "spec.json").write_text(json.dumps(dataclasses.asdict(TokenizerSpec.of(tokenizer))))
    found = subprocess.run(
        [sys.executable, tmp_path / "program.py", source, tmp_path / "cache", tmp_path / "spec.json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_memory_does_not_depend_on_the_corpus_size(tmp_path: Path, tokenizer, prose) -> None:
    peaks = []
    block = [json.dumps({"text": prose(i, 300)}) + "\n" for i in range(100)]
    tokens = sum(len(tokenizer.encode_document(json.loads(line)["text"])) for line in block)
    for times in (40, 400):  # 5 and 54 MB
        path = tmp_path / f"a{times}.jsonl"
        path.write_text("".join(block) * times)
        found = measure(path, tmp_path, tokenizer)
        assert (found["documents"], found["tokens"]) == (100 * times, tokens * times)
        peaks.append(found["peak"])
    assert peaks[1] < 400e6, peaks  # three processes
    assert peaks[1] - peaks[0] < 60e6, peaks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl", "one word"])
def test_one_document_of_50_megabytes(kind: str, tmp_path: Path, tokenizer, prose) -> None:
    text = (prose(0, 10_000) + "\n") * 1000
    text = text[: 50_000_000 if kind == "txt" else 20_000_000] if kind != "one word" else "x1" * 1_500_000
    path = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt")
    path.write_text(json.dumps({"text": text}) if kind == "jsonl" else text)
    found = measure(path, tmp_path, tokenizer)
    assert found["documents"] == 1
    head = tokenizer.encode(text[: SEGMENT_CHARS // 2])[:50] if kind != "one word" else None
    assert head is None or found["first"] == head
    assert found["peak"] < 400e6, found


def test_progress_and_small_corpora_start_no_process(tmp_path: Path, tokenizer, prose, monkeypatch) -> None:
    monkeypatch.setattr(tokenizing, "WorkerPool", None)  # would fail if it were used
    (tmp_path / "a.txt").write_text(prose(0, 200))
    reports = []
    start = time.perf_counter()
    open_cached(
        SourceSpec(str(tmp_path / "a.txt")), tokenizer, cache_dir=tmp_path / "c", progress=reports.append
    )
    assert time.perf_counter() - start < 2
    assert [r.stage for r in reports] == ["hash", "tokenize"]
    assert reports[-1].done_bytes == reports[-1].total_bytes == (tmp_path / "a.txt").stat().st_size
