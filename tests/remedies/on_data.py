"""Sources, rows, columns and formats: files as they are met, then as the remedy wants them."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from cases import World, case, in_turn, listed

from trimtab import text
from trimtab.data import SourceSpec, open_corpus

GOOD = [{"text": "the cat sees a dog."}, {"text": "a dog runs under the tree."}]
CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}
] * 3
SHAREGPT = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(w: World, name: str, content: Any) -> Path:
    """A file: bytes or text as they are, rows as JSON lines."""
    path = w.tmp / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes | str) else lines(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def opened(w: World, source: Path | str, *, streaming: bool = False, **spec: Any) -> Any:
    tokenizer = text.load(w.own("chat"))
    cache = w.tmp / "cache"
    return open_corpus(
        SourceSpec(str(source), **spec), tokenizer, cache_dir=cache, num_proc=1, streaming=streaming
    )


def read(w: World, name: str, content: Any, **spec: Any) -> Any:
    return opened(w, written(w, name, content), **spec)


def file_case(key: str, name: str, wrong: Any, right: Any, **spec: Any) -> None:
    """A file that is refused, and the same as the remedy wants it."""
    case(key, lambda w: read(w, name, wrong, **spec), lambda w, remedy: read(w, name, right, **spec))


def parquet(rows: list[dict[str, Any]]) -> bytes:
    import io

    import pyarrow
    from pyarrow import parquet as format

    out = io.BytesIO()
    format.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def strings(values: list[bytes]) -> bytes:
    """A Parquet file with a column of strings whose bytes need not be UTF-8, as careless writers make them."""
    import io

    import pyarrow
    from pyarrow import parquet as format

    raw = pyarrow.array(values, pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(len(values), *raw.buffers()[1:])
    out = io.BytesIO()
    format.write_table(pyarrow.table({"words": column}), out)
    return out.getvalue()


# Which column is the text.
TWO = [{"alpha": "a cat runs", "beta": "the dog sees"}] * 2


def follow_columns(w: World, remedy: str) -> None:
    read(w, "two.jsonl", TWO, text_column="alpha")
    formats = dict(part.split(": ") for part in remedy.partition("(")[2].rstrip(")").split("; "))
    columns = formats["prompt-completion"].split(", ")
    read(
        w,
        "two.jsonl",
        TWO,
        format="prompt-completion",
        columns=dict(zip(columns, ("alpha", "beta"), strict=True)),
    )


case(
    "data/formats.py:choose_text_column: set text_column, or format and columns for examples ({})",
    lambda w: read(w, "two.jsonl", TWO),
    follow_columns,
)
case(
    'data/formats.py:detect_text_column: write one {"text": …} object per row',
    lambda w: read(w, "list.jsonl", [[1, 2]]),
    lambda w, remedy: read(
        w, "list.jsonl", remedy.partition("one ")[2].partition(" object")[0].replace("…", '"a cat"')
    ),
)
case(
    "data/formats.py:text_of: set text_column to a column that every row has, or complete the row",
    lambda w: read(w, "a.jsonl", [{"text": "a cat", "x": "b"}, {"x": "the dog"}]),
    lambda w, remedy: (
        read(w, "a.jsonl", [{"text": "a cat", "x": "b"}, {"x": "the dog"}], text_column="x"),
        read(w, "a.jsonl", [{"text": "a cat"}, {"text": "the dog"}]),
    ),
)
case(
    "data/formats.py:text_of: set text_column to a column of strings, or write each row as one string",
    lambda w: read(w, "a.jsonl", [{"text": 5, "x": "a cat"}], text_column="text"),
    lambda w, remedy: (
        read(w, "a.jsonl", [{"text": 5, "x": "a cat"}], text_column="x"),
        read(w, "a.jsonl", [{"text": "5", "x": "a cat"}], text_column="text"),
    ),
)
WORDS = parquet([{"words": f"a cat sees {i} dogs"} for i in range(50)])
LATIN_1 = strings([b"a cat sees two dogs", "the caf\u00e9".encode("latin-1")])
file_case("data/readers_parquet.py:parquet_values: repair or remove the row", "latin.parquet", LATIN_1, WORDS)
TABLE = parquet([{"n": 1, "words": "a cat runs", "more": "the dog"}])
case(
    "data/readers_parquet.py:parquet_text_column: set text_column to one of {}",
    lambda w: read(w, "a.parquet", TABLE, text_column="n"),
    lambda w, remedy: in_turn(
        lambda name: read(w, "a.parquet", TABLE, text_column=name), listed(remedy, "one of")
    ),
)
file_case(
    "data/readers_parquet.py:parquet_text_column: write a column of strings",
    "a.parquet",
    parquet([{"words": 1}]),
    parquet([{"words": "a cat runs"}]),
    text_column="words",
)
CSV = "words,more\na cat,the dog\n"
case(
    "data/readers_csv.py:text_column: set text_column to one of {}",
    lambda w: read(w, "a.csv", CSV, text_column="text"),
    lambda w, remedy: in_turn(lambda name: read(w, "a.csv", CSV, text_column=name), listed(remedy, "one of")),
)


# Files that cannot be read as they are.
for function, name, wrong, right in (
    (
        "readers_text.py:_broken: fetch the file again",
        "a.txt.gz",
        gzip.compress(b"a cat runs" * 50)[:30],
        gzip.compress(b"a cat"),
    ),
    (
        "readers_text.py:_refuse_binary: remove it from the source or convert it to text",
        "a.txt",
        bytes(range(256)),
        "a cat runs",
    ),
    (
        "readers_text.py:jsonl_values: write one JSON object per line",
        "a.jsonl",
        '{"text": "a"}\n{"text": \n',
        GOOD,
    ),
    (
        "readers_text.py:_elements: put all elements into one array",
        "a.json",
        '[{"text": "a cat"}][{"text": "dog"}]',
        json.dumps(GOOD),
    ),
    (
        "readers_text.py:_elements: repair the element, or fetch the file again",
        "a.json",
        '[{"text": a cat}]',
        json.dumps(GOOD),
    ),
    (
        "readers_text.py:_elements: repair or remove the element",
        "a.json",
        "[" + "9" * 5000 + "]",
        json.dumps(GOOD),
    ),
    ("readers_text.py:_elements: fetch the file again", "a.json", '[{"text": "a cat"},', json.dumps(GOOD)),
    (
        "readers_csv.py:csv_values: put texts that contain quotes in double quotes and double the inner quotes",
        "a.csv",
        'text\n"a "b" c\n',
        'text\n"a ""b"" c"\n',
    ),
    (
        "readers_csv.py:_refuse_duplicates: give each a different name",
        "a.csv",
        "text,text\na cat,dog\n",
        "text,more\na cat,dog\n",
    ),
    (
        "readers_csv.py:_too_many_fields: put texts that contain {} in double quotes",
        "a.csv",
        "text\na cat, a dog\n",
        'text\n"a cat, a dog"\n',
    ),
    (
        "readers_csv.py:checked_field: give the row a field for each column",
        "a.csv",
        "n,text\n1,a cat\n2\n",
        "n,text\n1,a cat\n2,a dog\n",
    ),
):
    file_case(f"data/{function}", name, wrong, right)


def follow_iconv(w: World, remedy: str) -> None:
    command = re.findall(r"iconv .* > \S+(?=,)", remedy)[0]
    subprocess.run(command, shell=True, check=True)
    copy = command.rpartition("> ")[2]
    opened(w, copy)


case(
    "data/readers_text.py:_refuse_binary: convert it: {}",
    lambda w: read(w, "wide.txt", "the cat sees".encode("utf-16")),
    follow_iconv,
)
case(
    "data/readers_text.py:not_utf8: convert it, for instance: {}",
    lambda w: read(w, "latin.txt", "déjà vu, the cat".encode("latin-1")),
    follow_iconv,
)
file_case(
    "data/readers_parquet.py:_not_parquet: fetch the file again",
    "a.parquet",
    WORDS[:4] + bytes(60) + WORDS[64:],
    WORDS,
    text_column="words",
)
file_case(
    "data/readers_parquet.py:_not_parquet: fetch the file again",
    "a.parquet",
    b"PAR1" + bytes(32),
    TABLE,
    text_column="words",
)


# Sources.
case(
    "data/sources.py:SourceSpec.__post_init__: use one of {}",
    lambda w: SourceSpec("a.txt", train_on="questions"),  # type: ignore[arg-type]
    lambda w, remedy: in_turn(lambda name: SourceSpec("a.txt", train_on=name), listed(remedy, "one of")),  # type: ignore[arg-type]
)
case(
    "data/sources.py:SourceSpec.__post_init__: use one of {}",
    lambda w: SourceSpec("a.txt", documents="page"),  # type: ignore[arg-type]
    lambda w, remedy: in_turn(lambda name: SourceSpec("a.txt", documents=name), listed(remedy, "one of")),  # type: ignore[arg-type]
)
case(
    "data/sources.py:SourceSpec.__post_init__: keep one of the two",
    lambda w: SourceSpec("a.jsonl", text_column="x", format="messages"),
    lambda w, remedy: (SourceSpec("a.jsonl", text_column="x"), SourceSpec("a.jsonl", format="messages")),
)
case(
    "data/sources.py:SourceSpec.__post_init__: give 1 or more",
    lambda w: SourceSpec("a.txt", first=0),
    lambda w, remedy: SourceSpec("a.txt", first=int(re.findall(r"\d", remedy)[0])),
)
case(
    "data/sources.py:SourceSpec.__post_init__: set a number above 0",
    lambda w: SourceSpec("a.txt", weight=0),
    lambda w, remedy: SourceSpec("a.txt", weight=0.1),
)
file_case("data/sources.py:resolve: give a file with text in it", "a.txt", b"", "a cat runs")


def follow_pattern(w: World, remedy: str) -> None:
    written(w, "texts/deep/a.txt", "a cat runs")
    opened(w, w.tmp / "texts" / "**" / "*.txt")
    if "a file, a folder" in remedy:
        opened(w, w.tmp / "texts" / "deep" / "a.txt")
        opened(w, w.tmp / "texts")
        w.patch.chdir(w.tmp)
        opened(w, re.findall("'(.*?)'", remedy)[0])


def linked(w: World, target: str, *, folder: bool) -> object:
    (w.tmp / "linked").mkdir(exist_ok=True)
    link = w.tmp / "linked" / "link.txt"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return opened(w, link.parent if folder else link)


for key, folder in (
    ("resolve: point the link to a file or a folder that exists", False),
    ("_from_folder: point the link to a file that exists", True),
):
    case(
        f"data/sources.py:{key}",
        lambda w, folder=folder: linked(w, "absent.txt", folder=folder),
        lambda w, remedy, folder=folder: linked(w, str(written(w, "a.txt", "a cat runs")), folder=folder),
    )
case(
    "data/sources.py:resolve: write its content to a file and name that file",
    lambda w: opened(w, "/dev/null"),
    lambda w, remedy: read(w, "content.txt", "a cat runs"),
)
case(
    "data/sources.py:resolve: check the pattern; ** matches subfolders",
    lambda w: opened(w, w.tmp / "texts" / "*.md"),
    follow_pattern,
)
case(
    "data/sources.py:resolve: give a file, a folder or a glob such as 'texts/**/*.txt'",
    lambda w: opened(w, w.tmp / "absent.txt"),
    follow_pattern,
)
case(
    "data/sources.py:classify: decompress it; Parquet has its own compression",
    lambda w: read(w, "a.parquet.gz", gzip.compress(TABLE), text_column="words"),
    lambda w, remedy: read(w, "a.parquet", TABLE, text_column="words"),
)
case(
    "data/sources.py:_from_list: restore it, or download the dataset again",
    lambda w: opened(w, "listed", files=(w.tmp / "gone.txt",)),
    lambda w, remedy: opened(w, "listed", files=(written(w, "gone.txt", "a cat runs"),)),
)


def hollow(w: World) -> object:
    (w.tmp / "hollow").mkdir(exist_ok=True)
    return opened(w, w.tmp / "hollow")


def follow_endings(w: World, remedy: str) -> None:
    contents = {".jsonl": GOOD, ".ndjson": GOOD, ".json": json.dumps(GOOD), ".csv": CSV.replace("words", "text"),
                ".tsv": "text\na cat\n", ".parquet": parquet([{"text": "a cat runs"}])}  # fmt: skip
    for ending in listed(remedy, "end in"):
        folder = f"with{ending}"
        written(w, f"{folder}/a{ending}", contents.get(ending, "a cat runs"))
        opened(w, w.tmp / folder)


case("data/sources.py:_from_folder: add files that end in {}", hollow, follow_endings)
case(
    "data/fingerprints.py:stamp_files: check that it exists and is readable",
    lambda w: gone(w),
    lambda w, remedy: read(w, "gone.txt", "a cat runs"),
)


def gone(w: World) -> object:
    """A file that goes between being found and being read."""
    from trimtab.data import fingerprints, sources

    source = sources.resolve(SourceSpec(str(written(w, "gone.txt", "a cat runs"))))
    (w.tmp / "gone.txt").unlink()
    return fingerprints.stamp_files(source, None)


# Formats.
case(
    "data/detection.py:detect: use JSON Lines, CSV or Parquet, or remove format",
    lambda w: read(w, "a.txt", "a cat runs", format="messages"),
    lambda w, remedy: (read(w, "a.jsonl", CHATS, format="messages"), read(w, "a.txt", "a cat runs")),
)


def both(w: World) -> object:
    written(w, "both/a.jsonl", CHATS)
    written(w, "both/b.txt", "a cat runs")
    return opened(w, w.tmp / "both")


case(
    "data/detection.py:detect: list them as two separate sources",
    both,
    lambda w, remedy: (opened(w, w.tmp / "both" / "a.jsonl"), opened(w, w.tmp / "both" / "b.txt")),
)
case(
    "data/detection.py:_refuse_columns: set format, or text_column instead of columns",
    lambda w: read(
        w,
        "a.jsonl",
        [{"dialog": CHATS[0]["messages"], "x": "a cat"}],
        format="text",
        columns={"messages": "dialog"},
    ),
    lambda w, remedy: (
        read(
            w,
            "a.jsonl",
            [{"dialog": CHATS[0]["messages"]}],
            format="messages",
            columns={"messages": "dialog"},
        ),
        read(w, "a.jsonl", [{"dialog": CHATS[0]["messages"], "x": "a cat"}], text_column="x"),
    ),
)
file_case(
    "data/detection.py:_by_first_row: use a source with rows",
    "a.jsonl",
    "\n",
    CHATS,
    format="messages",
)
case(
    "data/detection.py:_by_first_row: map parts of one format: {}",
    lambda w: read(w, "a.jsonl", CHATS, columns={"answers": "x"}),
    lambda w, remedy: in_turn(
        lambda part: read(w, "a.jsonl", [{"dialog": CHATS[0]["messages"]}], columns={part: "dialog"}),
        [remedy.partition("format: ")[2].split(": ")[1].split(", ")[0]],
    ),
)
case(
    "data/detection.py:_by_first_row: write objects with {}, or remove format",
    lambda w: read(w, "a.jsonl", ["a cat runs"], format="messages"),
    lambda w, remedy: (
        read(w, "a.jsonl", [{listed(remedy, "with")[0]: CHATS[0]["messages"]}], format="messages"),
        read(w, "a.jsonl", ["a cat runs"]),
    ),
)
case(
    "data/detection.py:_by_first_row: map them with columns, such as columns: {messages: dialog}, or set another "
    "format",
    lambda w: read(w, "a.jsonl", [{"dialog": CHATS[0]["messages"]}], format="messages"),
    lambda w, remedy: (
        read(w, "a.jsonl", [{"dialog": CHATS[0]["messages"]}], format="messages", columns={"messages": "dialog"}),
        read(w, "a.jsonl", SHAREGPT, format="sharegpt"),
    ),
)  # fmt: skip


# Rows of examples.
def row_case(function: str, wrong: Any, right: Any, **spec: Any) -> None:
    """A row that is refused after a good one, and what the remedy makes of it."""
    first = spec.pop("first_row", CHATS[0])
    rows = right if isinstance(right, list) else [right]
    case(
        f"data/examples.py:{function}",
        lambda w: read(w, "rows.jsonl", [first, wrong], **spec),
        lambda w, remedy: [read(w, f"rows{i}.jsonl", [first, row], **spec) for i, row in enumerate(rows)],
    )


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


ASK, SAY = CHATS[0]["messages"]
PLAIN = {"prompt": "a cat", "completion": " runs"}
row_case("example_of: write one object per row", "a cat", CHATS[0])
case(
    "data/examples.py:example_of: all rows of a source must have one format, here {}; list other rows as a "
    "separate source",
    lambda w: read(w, "rows.jsonl", [CHATS[0], PLAIN]),
    lambda w, remedy: (read(w, "chats.jsonl", [CHATS[0]]), read(w, "plain.jsonl", [PLAIN])),
)
row_case(
    "_refuse: put it into the text, use messages, or rename the column if it is not a {}",
    {**PLAIN, "system": "be kind"},
    [
        {"prompt": "be kind. a cat", "completion": " runs"},
        {"prompt": [ASK], "completion": [SAY], "system": "be kind"},
        {**PLAIN, "mood": "be kind"},
    ],
    first_row=PLAIN,
)
SYSTEM = {"role": "system", "content": "be kind"}
row_case(
    "_conversation: keep one of the two, or rename the column if it is not a system prompt",
    chat(SYSTEM, ASK, SAY, system="be brief"),
    [chat(SYSTEM, ASK, SAY), chat(ASK, SAY, system="be brief"), chat(SYSTEM, ASK, SAY, mood="be brief")],
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
row_case(
    "_conversation: give a list of JSON schemas, or none",
    chat(ASK, SAY, tools={"name": "f"}),
    [chat(ASK, SAY, tools=[TOOL]), chat(ASK, SAY)],
)
row_case('_messages: write [{"role": "user", "content": …}, …]', {"messages": 5}, chat(ASK, SAY))
row_case('_message: write {"role": "user", "content": …}', chat("hi", SAY), chat(ASK, SAY))
case(
    "data/examples.py:_message: use one of {}",
    lambda w: read(w, "rows.jsonl", [chat({"role": "narrator", "content": "x"}, SAY)]),
    lambda w, remedy: read(
        w, "rows.jsonl", [chat({"role": role, "content": "x"}, SAY) for role in listed(remedy, "one of")]
    ),
)
row_case(
    "_message: every message needs a text, which may be empty",
    chat({"role": "user"}, SAY),
    [chat({"role": "user", "content": ""}, SAY), chat(ASK, SAY)],
)
row_case(
    "_content: give the content as one string",
    chat({"role": "user", "content": [{"type": "image"}]}, SAY),
    chat({"role": "user", "content": "an image"}, SAY),
)
row_case(
    "_content: write it as a string",
    chat({"role": "user", "content": 5}, SAY),
    chat({"role": "user", "content": "5"}, SAY),
)
row_case(
    "_weight: set 1 to train on the message, or 0 to use it as context only",
    chat(ASK, {**SAY, "weight": 0.5}),
    [chat(ASK, {**SAY, "weight": 1}), chat(ASK, {**SAY, "weight": 0}, SAY)],
)
ALPACA = {"instruction": "say hi", "output": "hi"}
row_case(
    "_text: write it as a string",
    {"instruction": 5, "output": "hi"},
    {"instruction": "5", "output": "hi"},
    first_row=ALPACA,
)
row_case(
    "_json: write a list, or a list as JSON",
    {"messages": "[oops"},
    [chat(ASK, SAY), {"messages": json.dumps([ASK, SAY])}],
)
