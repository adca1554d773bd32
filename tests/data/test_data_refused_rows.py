"""Rows and columns that are not valid examples: errors with location and remedy, or skipped with `bad_rows: skip`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, MISTRAL, chat_tokenizer
from data_rows import ANSWER, QUESTION, SAME, opened, runs, write
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import Corpus, SourceSpec, make_loader, open_corpus
from trimtab.data.examples import ROLES, example_of
from trimtab.data.formats import PARTS, Format
from trimtab.facts.errors import DataError, ModelError
from trimtab.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TWO_SYSTEMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [SYSTEM, QUESTION, ANSWER]},
    "sharegpt": {
        "conversations": [{"from": "system", "value": "Be brief."}, *SAME["sharegpt"]["conversations"]]
    },
    "lists of messages": {"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]},
}


@pytest.mark.parametrize("form", TWO_SYSTEMS)
def test_a_system_column_that_differs_from_the_system_message_is_refused(
    tmp_path: Path, chatml: Tokenizer, form: str
) -> None:
    row = TWO_SYSTEMS[form]
    same = [{**row, "system": system} for system in ("Be brief.", "Be brief.\n", "", None)]
    path = write(tmp_path / "a.jsonl", same)
    for number in range(len(same)):
        (before, _), *_ = runs(path, chatml, number=number)
        assert before.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    path = write(tmp_path / "b.jsonl", [row, {**row, "system": "Talk."}])
    with pytest.raises(
        DataError, match=r"b.jsonl:2: the column 'system' differs from the system message .*; keep one"
    ):
        opened(path, chatml)
    assert opened(path, chatml, bad_rows="skip").summary.bad == 1


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
def test_a_system_column_with_a_string_prompt_is_refused(tmp_path: Path, template: str | None) -> None:
    row = {"prompt": "What is two plus two?", "completion": " It is four.", "sys": ""}
    tokenizer, columns = chat_tokenizer(template), {"system": "sys"}
    path = write(tmp_path / "a.jsonl", [row, {**row, "sys": None}, {**row, "sys": "Be brief."}])
    with pytest.raises(
        DataError,
        match=r"a.jsonl:3: the column 'sys' needs a chat template, .*; put it into the text, use mess",
    ):
        opened(path, tokenizer, columns=columns)
    assert opened(path, tokenizer, columns=columns, bad_rows="skip").summary.documents == 2
    path = write(tmp_path / "b.jsonl", [{"prompt": "q", "completion": " a", "system": "SYS"}])
    with pytest.raises(DataError, match=r"b.jsonl:1: the column 'system' needs a chat template"):
        opened(path, tokenizer)


def test_tools_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    alpaca = {"instruction": "Add.", "output": "It is four."}
    for row in ({"prompt": "q", "completion": " a"}, alpaca):
        empty = [{**row, "tools": value} for value in (None, [], "", "[]")]
        assert opened(write(tmp_path / "a.jsonl", empty), chat_tokenizer(None)).summary.documents == 4
        for value in (tools, json.dumps(tools)):
            path = write(tmp_path / "b.jsonl", [{**row, "tools": value}])
            with pytest.raises(DataError, match=r"b.jsonl:1: the column 'tools' needs a chat template"):
                opened(path, chat_tokenizer(None))


def first_step(corpus: Corpus) -> None:
    with closing(make_loader([corpus], max_seq_length=64, batch_size=1)) as loader:
        loader.next_step()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_row_of_a_table_with_too_many_fields_is_refused(
    tmp_path: Path, ending: str, streaming: bool
) -> None:
    lines = ["instruction,output", "x,y", 'x,"y', 'z"', "List primes,2, 3, 5 and 7"]
    path, tokenizer = tmp_path / f"a.{ending}", chat_tokenizer(None)
    path.write_text("\n".join(lines).replace(",", "," if ending == "csv" else "\t") + "\n")
    between = {"csv": "commas", "tsv": "tabs"}[ending]
    message = (
        rf"row 3 of .*a\.{ending} \(line 5\) has 4 fields, not 2; put texts that contain {between} in double"
    )
    with pytest.raises(DataError, match=message):
        first_step(
            open_corpus(str(path), tokenizer, streaming=streaming, num_proc=1, cache_dir=tmp_path / "cache")
        )


def test_an_alpaca_row_without_an_output_is_named(tmp_path: Path, chatml: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [SAME["alpaca"], {"instruction": "Add."}])
    with pytest.raises(DataError, match=r"a.jsonl:2: has no column 'output'"):
        opened(path, chatml)


BAD_ROWS = {
    "a number": (3, r"a.jsonl:2: is a number, not an object"),
    "another format": (
        {"text": "x"},
        r"a.jsonl:2: has no column 'messages' \(it has text\); all rows of a source must have one format, here mess",
    ),
    "messages a number": ({"messages": 3}, r"a.jsonl:2: messages is a number, not a list of messages"),
    "messages not JSON": ({"messages": "hello"}, r"a.jsonl:2: messages is a string that is not JSON"),
    "a message a string": ({"messages": ["hello"]}, r"a.jsonl:2: messages\[0\] is a string, not a message"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role; use one of system, developer, user"),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, r"has the role 'narrator'; use one of"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    "no value": ({"messages": [{"from": "human"}]}, r"messages\[0\] has no value"),
    "content a number": ({"messages": [{"role": "user", "content": 4}]}, r"content of messages\[0\] is a number"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"parts that are not text \(im"),
    "weight": ({"messages": [{**ANSWER, "weight": 0.5}]}, r"has the weight 0.5; set 1 to train on"),
    "tools": ({"messages": [QUESTION, ANSWER], "tools": {}, "system": 3}, r"system is a number, not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_reported_with_their_location(tmp_path: Path, chatml: Tokenizer, case: str) -> None:
    row, message = BAD_ROWS[case]
    path = write(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}, row])
    with pytest.raises(DataError, match=message):
        opened(path, chatml)


def test_unknown_columns_are_refused_with_the_known_formats(tmp_path: Path, chatml: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [{"better": "x", "worse": "y"}])
    with pytest.raises(
        DataError, match=r"its columns: better, worse; set text_column, or format .*sharegpt: conv"
    ):
        opened(path, chatml)
    with pytest.raises(
        DataError, match=r"has the columns better, worse, but not messages; map them with columns"
    ):
        opened(path, chatml, format="messages")
    with pytest.raises(DataError, match=r"has the columns better, worse, but not prompt, best"):
        opened(path, chatml, columns={"completion": "best"})
    with pytest.raises(
        DataError,
        match=r"columns of .* maps answers, which no single format has; map parts of one format: messages: mess",
    ):
        opened(path, chatml, columns={"answers": "better"})
    with pytest.raises(
        DataError, match=r"format: 'chatml' is not supported .*; use one of auto, text, messages"
    ):
        SourceSpec(str(path), format="chatml")  # type: ignore[arg-type]
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"is plain text, and format: alpaca needs rows with columns"):
        opened(tmp_path / "a.txt", chatml, format="alpaca")


def test_a_second_file_of_another_format_is_refused(tmp_path: Path, chatml: Tokenizer) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", [{"messages": [QUESTION, ANSWER]}])
    (folder / "b.txt").write_text("Some text.")
    with pytest.raises(DataError, match=r"contains both examples \(a.jsonl\) and plain text \(b.txt\)"):
        open_corpus(SourceSpec(str(folder)), chatml, cache_dir=tmp_path / "cache", num_proc=1)


def test_a_second_table_without_the_columns_is_refused(tmp_path: Path, chatml: Tokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "data"
    folder.mkdir()
    for name, row in (("a", {"messages": [QUESTION, ANSWER]}), ("b", {"text": "x"})):
        parquet.write_table(pyarrow.Table.from_pylist([row]), folder / f"{name}.parquet")
    with pytest.raises(DataError, match=r"b.parquet:1: has no column 'messages'"):
        open_corpus(SourceSpec(str(folder)), chatml, cache_dir=tmp_path / "cache", num_proc=1)


def test_a_text_column_with_columns_of_examples_is_refused() -> None:
    for more in ({"format": "messages"}, {"columns": {"messages": "dialog"}}):
        with pytest.raises(DataError, match="keep one of the two"):
            SourceSpec("a.jsonl", text_column="text", **more)  # type: ignore[arg-type]


def test_missing_and_failing_templates_are_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, QUESTION, ANSWER]}]
    )
    with pytest.raises(
        ModelError, match=r"a.jsonl contains conversations.*no chat template; set model.chat_template"
    ):
        opened(path, chat_tokenizer(None))
    lists = write(tmp_path / "b.jsonl", [{"prompt": [QUESTION], "completion": [ANSWER]}])
    with pytest.raises(ModelError, match=r"b.jsonl:1 contains conversations.*set model.chat_template"):
        opened(lists, chat_tokenizer(None))
    with pytest.raises(DataError, match=r"a.jsonl:2: the chat template failed: roles must alternate"):
        opened(path, chat_tokenizer(MISTRAL))
    with pytest.raises(
        ModelError, match=r"^the chat template failed: .* \(line 1\); correct the chat template"
    ):
        opened(path, chat_tokenizer("{% for %}"))
    assert not list((tmp_path / "cache" / "entries").iterdir())  # no partial entry remains


@pytest.mark.parametrize("num_proc", [1, 2])
def test_bad_rows_are_skipped_counted_and_reported_on_request(tmp_path: Path, num_proc: int) -> None:
    good = {"messages": [QUESTION, ANSWER]}
    refused = {"messages": [QUESTION, QUESTION, ANSWER]}
    rows = [good, {"messages": 3}, refused, good, {"text": "x"}] + [good] * 3000
    path, tokenizer, reports = write(tmp_path / "a.jsonl", rows), chat_tokenizer(MISTRAL), []
    spec = SourceSpec(str(path), bad_rows="skip")
    corpus = open_corpus(spec, tokenizer, cache_dir=tmp_path / "cache", num_proc=num_proc)
    assert (corpus.summary.documents, corpus.summary.bad) == (3002, 3)
    assert corpus.summary.first_error == f"{path}:2: messages is a number, not a list of messages"
    assert [corpus.origin(i) for i in range(3)] == ["a.jsonl:1", "a.jsonl:4", "a.jsonl:6"]
    stream = open_corpus(spec, tokenizer, streaming=True, num_proc=num_proc, progress=reports.append)
    loader = make_loader([stream], max_seq_length=64, batch_size=4096)
    found = [o for batch in loader.next_step() for sequence in batch.origins for o in sequence]
    loader.close()
    assert len(found) == 3002
    messages = [note.message for note in reports if note.message]
    assert (
        f"{path}:2: messages is a number, not a list of messages; this row is left out, and so are later unusable rows"
        in messages
    )
    with pytest.raises(
        DataError,
        match=r"no usable rows: 1 unusable as examples.*; repair the rows; the first: .*b.jsonl:1: mess",
    ):
        opened(write(tmp_path / "b.jsonl", [{"messages": 3}]), tokenizer, bad_rows="skip")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.sampled_from(
        ["", "x", "[]", "[", "user", "assistant", "\ud800", '[{"role": "user", "content": "a"}]']
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "from", "value", "text", "weight", "tool_calls", "messages", "conversations",
             "prompt", "completion", "instruction", "input", "output", "system", "tools"]
        ),
        inner,
        max_size=6,
    ),
    max_leaves=12,
)  # fmt: skip


@given(json_values, st.sampled_from(list(PARTS)), st.booleans(), st.booleans())
def test_any_row_becomes_an_example_or_an_error_with_its_location(
    value: Any, name: str, template: bool, keep_end: bool
) -> None:
    refused: DataError | None = None
    try:
        made = example_of("a.jsonl:7", value, Format(name, {}), template=template, keep_end=keep_end)
    except DataError as error:
        refused = error
    if refused is not None:
        assert str(refused).startswith("a.jsonl:7: ")
        assert refused.remedy
        return
    if made is None or made.conversation is None:
        return
    messages = made.conversation.messages
    assert messages
    json.dumps([dict(message) for message in messages]).encode()
    assert all(message["role"] in ROLES.values() and "weight" not in message for message in messages)
    if not keep_end and any(message["role"] == "assistant" for message in messages):
        assert messages[-1]["role"] == "assistant"
