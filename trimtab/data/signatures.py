"""Recognizes files that are not text by their first bytes, with advice on what to do."""

from __future__ import annotations

import codecs

UNPACK = "unpack it and name its contents"
NO_TEXT = "leave it out; only text can be trained on"

_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (b"%PDF-", "a PDF", "extract its text first, for instance: pdftotext {name}"),
    (b"{\\rtf", "an RTF document", "save it as plain text, for instance: pandoc {name} -t plain -o text.txt"),
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an old Office document (.doc, .xls, .ppt)",
        "save it as plain text or CSV",
    ),
    (
        b"\x1f\x8b",
        "compressed with gzip",
        "rename it to end in .gz (such as text.txt.gz), or unpack it: gunzip",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "compressed with zstd",
        "rename it to end in .zst (such as text.txt.zst), or unpack it",
    ),
    (b"\xfd7zXZ\x00", "compressed with xz", "unpack it: xz -d {name}"),
    (b"BZh", "compressed with bzip2", "unpack it: bunzip2 {name}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (b"PAR1", "a Parquet file", "rename it to end in .parquet"),
    (b"ARROW1", "an Arrow file", "write it as Parquet: datasets' to_parquet, or pyarrow.parquet.write_table"),
    (
        b"\xff\xff\xff\xff",
        "an Arrow stream (datasets' save_to_disk)",
        "write it as Parquet: datasets' to_parquet",
    ),
    (b"GGUF", "a GGUF model", "set model.name to it, and name a text file here"),
    (b"SQLite format 3\0", "an SQLite database", "write the texts of a table to a CSV or JSON lines file"),
    (b"\x93NUMPY", "a NumPy array", NO_TEXT),
    (b"\x89HDF\r\n", "an HDF5 file", "write its texts to a JSON lines or Parquet file"),
    (b"\x89PNG", "an image (PNG)", NO_TEXT),
    (b"\xff\xd8\xff", "an image (JPEG)", NO_TEXT),
    (b"GIF8", "an image (GIF)", NO_TEXT),
    (b"II*\0", "an image (TIFF)", NO_TEXT),
    (b"MM\0*", "an image (TIFF)", NO_TEXT),
    (b"ID3", "audio (MP3)", NO_TEXT),
    (b"OggS", "audio (Ogg)", NO_TEXT),
    (b"fLaC", "audio (FLAC)", NO_TEXT),
    (b"\x7fELF", "an executable", NO_TEXT),
)

_INSIDE_ZIP: tuple[tuple[bytes, str, str], ...] = (
    (
        b"data.pkl",
        "a PyTorch checkpoint (a pickle)",
        "it contains weights, not text; pickles are never loaded",
    ),
    (
        b"word/",
        "a Word document (.docx)",
        "save it as plain text, for instance: pandoc {name} -t plain -o text.txt",
    ),
    (b"xl/", "an Excel sheet (.xlsx)", "save it as CSV"),
    (b"ppt/", "a PowerPoint file (.pptx)", "save its text as .txt"),
    (b"epub+zip", "an e-book (EPUB)", "convert it, for instance: pandoc {name} -t plain -o text.txt"),
    (b"opendocument", "an OpenDocument file", "save it as plain text or CSV"),
    (b".npy", "NumPy arrays (.npz)", NO_TEXT),
)
_OFFICE = {
    ".docx": b"word/",
    ".xlsx": b"xl/",
    ".pptx": b"ppt/",
    ".epub": b"epub+zip",
    ".odt": b"opendocument",
}


def recognize(head: bytes, name: str) -> tuple[str, str] | None:
    """Returns (type of file, advice) for the first bytes of a file; None if they match no known format.

    Args:
        head: the first few thousand bytes.
        name: the file's name, for the advice.

    Example:
        >>> recognize(b"%PDF-1.7 ...", "paper.txt")
        ('a PDF', 'extract its text first, for instance: pdftotext paper.txt')
    """
    if _is_text(head) and not head.startswith((b"%PDF-", b"{\\rtf")):
        return None  # a text may begin with the letters GIF8
    found = next(((what, advice) for start, what, advice in _STARTS if head.startswith(start)), None)
    if found is None and head.startswith(b"PK\x03\x04"):
        found = _zipped(head, name)
    elif found is None and head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        found = ("an image, audio or video file (RIFF)", NO_TEXT)
    elif found is None and head[4:8] == b"ftyp":
        found = ("a video or audio file (MP4)", NO_TEXT)
    elif found is None and head[257:262] == b"ustar":
        found = ("a tar archive", UNPACK)
    elif found is None and _is_safetensors(head):
        found = ("a safetensors file", "it contains weights, not text; set model.name to its folder")
    elif found is None and len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        found = ("a pickle", "reading it can run code: write its texts to a JSON lines or Parquet file")
    return None if found is None else (found[0], found[1].format(name=name))


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _zipped(head: bytes, name: str) -> tuple[str, str]:
    ending = next((inside for suffix, inside in _OFFICE.items() if name.lower().endswith(suffix)), b"")
    for inside, what, advice in _INSIDE_ZIP:
        if inside in head or inside == ending:
            return what, advice
    return "a zip archive", UNPACK


def _is_safetensors(head: bytes) -> bool:
    return head[8:10] == b'{"' and 0 < int.from_bytes(head[:8], "little") < 1 << 30
