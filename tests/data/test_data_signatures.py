"""Binary files, recognized by their first bytes, and preference data: errors with advice."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import save_file

from trimtab.data.detection import detect
from trimtab.data.readers import SegmentReader
from trimtab.data.signatures import recognize
from trimtab.data.sources import SourceSpec, resolve
from trimtab.facts.errors import DataError


def docx(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("[Content_Types].xml", "_rels/.rels", "word/document.xml"):
            archive.writestr(name, f"<xml>{name}</xml>")


def sqlite(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("create table texts (text)")
    database.close()


def arrow(path: Path) -> None:
    table = pa.table({"text": ["a"]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


MAKERS: dict[str, tuple[Any, str, str]] = {
    "pdf": (lambda p: p.write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj"), "a PDF", "pdftotext"),
    "ascii pdf": (lambda p: p.write_bytes(b"%PDF-1.4\n1 0 obj\n"), "a PDF", "pdftotext"),
    "docx": (docx, "a Word document", "pandoc"),
    "zip": (lambda p: zipfile.ZipFile(p, "w").writestr("a.txt", "x"), "a zip archive", "unpack it"),
    "gzip": (
        lambda p: p.write_bytes(gzip.compress(b"text")),
        "compressed with gzip",
        "rename it to end in .gz",
    ),
    "zstd": (
        lambda p: p.write_bytes(pa.compress(b"text" * 9, "zstd").to_pybytes()),
        "zstd",
        "rename it to end in .zst",
    ),
    "xz": (lambda p: p.write_bytes(lzma.compress(b"text")), "compressed with xz", "xz -d"),
    "bzip2": (lambda p: p.write_bytes(bz2.compress(b"text")), "compressed with bzip2", "bunzip2"),
    "png": (
        lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"),
        "an image (PNG)",
        "leave it out",
    ),
    "jpeg": (lambda p: p.write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF"), "an image (JPEG)", "leave it out"),
    "gguf": (lambda p: p.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(20)), "a GGUF model", "model.name"),
    "safetensors": (lambda p: save_file({"a": np.zeros(3)}, p), "a safetensors file", "weights, not text"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "a pickle", "can run code"),
    "torch": (lambda p: torch.save({"a": torch.zeros(2)}, p), "a PyTorch checkpoint", "never loaded"),
    "sqlite": (sqlite, "an SQLite database", "CSV or JSON lines"),
    "parquet": (lambda p: parquet.write_table(pa.table({"text": ["a"]}), p), "a Parquet file", ".parquet"),
    "arrow": (arrow, "an Arrow file", "write it as Parquet"),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".json", ".anything"])
def test_a_binary_file_is_named(tmp_path: Path, kind: str, suffix: str) -> None:
    make, what, advice = MAKERS[kind]
    path = tmp_path / f"a{suffix}"
    make(path)
    with pytest.raises(DataError) as caught:
        list(SegmentReader(resolve(SourceSpec(str(path)))))
    assert what in str(caught.value)
    assert advice in str(caught.value)
    assert "iconv" not in str(caught.value)


def test_another_format_under_parquets_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(gzip.compress(b"text"))
    with pytest.raises(DataError, match="is compressed with gzip, not Parquet"):
        list(SegmentReader(resolve(SourceSpec(str(tmp_path / "a.parquet")))))


@pytest.mark.parametrize(
    "text", ["GIF8 is a format", "BZh", "ID3 tags", "PAR1 for the hole", "GGUF explained", "ö" * 8192]
)
def test_texts_that_begin_like_other_formats_are_texts(text: str) -> None:
    assert recognize(text.encode()[:8191], "a.txt") is None


def test_latin1_still_gets_the_advice_to_convert(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Größe".encode("latin1"))
    with pytest.raises(DataError, match="iconv -f LATIN1"):
        list(SegmentReader(resolve(SourceSpec(str(tmp_path / "a.txt")))))


USER, ANSWER, WORSE = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "assistant", "content": "No."},
)


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"prompt": "Hi", "chosen": " Yes?", "rejected": " No."}, "columns={completion: chosen}"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}, "columns={completion: chosen}"),
        ({"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, "columns={messages: chosen}"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, "columns={messages: chosen}"),
        ({"chosen": "Human: Hi Assistant: Yes?", "rejected": "x"}, "text_column=chosen"),
        ({"prompt": "Hi", "chosen": json.dumps([ANSWER]), "rejected": "[]"}, "columns={completion: chosen}"),
    ],
)
def test_preferences_are_refused_with_a_working_remedy(
    tmp_path: Path, row: dict[str, Any], advice: str
) -> None:
    from trimtab.data.readers import SegmentReader
    from trimtab.recipe import loads

    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="preference training such as DPO is not supported") as caught:
        detect(resolve(SourceSpec(str(path))))
    assert f"'data.train.0.{advice}'" in str(caught.value)
    source = loads(f"model: a\ndata: {{train: ['{path}']}}\n", [f"data.train.0.{advice}"]).data.train[0]
    spec = SourceSpec(str(path), columns=source.columns, text_column=source.text_column)
    found = resolve(spec)
    import dataclasses

    found = dataclasses.replace(found, form=detect(found))
    [segment] = SegmentReader(found, template=True)
    words = segment.text or str(segment.example)
    assert "Yes?" in words
    assert "No." not in words


def test_a_text_column_next_to_preferences_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Hi", "chosen": "x", "rejected": "y"}) + "\n")
    source = resolve(SourceSpec(str(tmp_path / "a.jsonl")))
    assert detect(source) is None
    assert [segment.text for segment in SegmentReader(source)] == ["Hi"]
