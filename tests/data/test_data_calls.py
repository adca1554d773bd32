"""Tool calls and null contents: trained on if the template renders them, otherwise left out or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, CHATML_MARKED, THINKING, TOOLS, chat_tokenizer
from data_rows import ANSWERED, ASKED, epoch_of, opened, write

from trimtab.data import CachedCorpus, highlight_example, make_loader, open_corpus, spec
from trimtab.data.interface import Progress
from trimtab.facts.errors import DataError
from trimtab.text.chat import ChatProcess
from trimtab.text.tokenizer import Tokenizer

CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "content": "4"}
CALLED = '<call>{"name": "add", "arguments": {"a": 2}}</call><|im_end|>'
PRINTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRINTS_CALLS = PRINTS.replace(
    "<|im_end|>",
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>",
)
# As DeepSeek's: renders calls if the content is null.
NULL_CALLS = PRINTS_CALLS.replace(
    "{{ m['content'] }}", "{% if m.content is not none %}{{ m.content }}{% else %}"
).replace("{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>")
# Renders nothing of an answer without content.
GUARDED = PRINTS.replace("<|im_start|>{{", "{% if m.content %}<|im_start|>{{").replace(
    "<|im_end|>\n", "<|im_end|>\n{% endif %}"
)


def trained_texts(corpus: CachedCorpus, tokenizer: Tokenizer, number: int = 0) -> list[str]:
    shown = highlight_example(corpus, tokenizer, number=number)["runs"]
    assert not any("None" in text for text, _ in shown)
    return [text for text, trained in shown if trained]


def write_table(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".jsonl":
        return write(path, rows)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("template", "content"),
    [(PRINTS_CALLS, None), (PRINTS_CALLS, ""), (NULL_CALLS, None), (TOOLS, None), (TOOLS, "")],
    ids=["prints null", "prints empty", "null", "or null", "or empty"],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_call_without_content_is_never_rendered_as_none(
    tmp_path: Path, template: str, content: str | None, ending: str
) -> None:
    call = {**CALL, "content": content}
    rows = [
        {"messages": [ASKED, call, RESULT, ANSWERED]},
        {"messages": [ASKED, call]},
        {"messages": [ASKED, call, RESULT, call, RESULT, ANSWERED]},
    ]
    path, tokenizer = write_table(tmp_path / f"a.{ending}", rows), chat_tokenizer(template)
    corpus = opened(path, tokenizer)
    assert trained_texts(corpus, tokenizer) == [CALLED, "4<|im_end|>"]
    assert trained_texts(corpus, tokenizer, 1) == [CALLED]
    assert trained_texts(corpus, tokenizer, 2) == [CALLED, CALLED, "4<|im_end|>"]
    last = opened(path, tokenizer, train_on="last")
    assert [trained_texts(last, tokenizer, i) for i in range(3)] == [
        ["4<|im_end|>"],
        [CALLED],
        ["4<|im_end|>"],
    ]
    everything = opened(path, tokenizer, train_on="all")
    assert "".join(trained_texts(everything, tokenizer, 2)).count(CALLED) == 2


@pytest.mark.parametrize("train_on", ["completions", "last", "all"])
@pytest.mark.parametrize("content", [None, "", "So."], ids=["null", "empty", "words"])
def test_a_template_that_refuses_calls_is_reported(
    tmp_path: Path, train_on: Any, content: str | None
) -> None:
    refuses = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    tokenizer, call = chat_tokenizer(refuses + TOOLS), {**CALL, "content": content}
    ended, within = [ASKED, ANSWERED, ASKED, call], [ASKED, call, RESULT, ANSWERED]
    for name, messages in {"alone": [ASKED, call], "ended": ended, "within": within}.items():
        rows = [{"messages": [ASKED, ANSWERED]}, {"messages": messages}]
        path = write(tmp_path / f"{name}.jsonl", rows)
        with pytest.raises(DataError, match=rf"{name}\.jsonl:2: .*no tools"):
            opened(path, tokenizer, train_on=train_on)
        assert opened(path, tokenizer, train_on=train_on, bad_rows="skip").summary.bad == 1


def test_a_template_that_fails_for_null_gets_an_empty_string(tmp_path: Path) -> None:
    """As ChatML's, which concatenates strings; it does not render calls either."""
    tokenizer = chat_tokenizer(CHATML)
    path = write(tmp_path / "a.jsonl", [{"messages": [ASKED, CALL, RESULT, ANSWERED]}])
    corpus = opened(path, tokenizer)
    (trained,) = trained_texts(corpus, tokenizer)
    assert trained.startswith("4")


@pytest.mark.parametrize("template", [PRINTS, PRINTS_CALLS], ids=["unwritten", "written"])
@pytest.mark.parametrize("train_on", ["completions", "last", "all"])
def test_a_template_is_probed_once_for_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_on: Any, template: str
) -> None:
    requests: list[int] = []
    examples = ChatProcess.examples

    def counted(self: ChatProcess, conversations: Any, variables: Any, which: Any) -> Any:
        requests.append(len(conversations))
        return examples(self, conversations, variables, which)

    monkeypatch.setattr(ChatProcess, "examples", counted)

    def asked(name: str, row: dict[str, Any], number: int) -> int:
        requests.clear()
        opened(write(tmp_path / f"{name}.jsonl", [row] * number), chat_tokenizer(template), train_on=train_on)
        return len(requests)

    words, called = (
        {"messages": [ASKED, ANSWERED]},
        {"messages": [ASKED, CALL, RESULT, CALL, RESULT, ANSWERED]},
    )
    without = asked("words", words, spec.BATCH_EXAMPLES)
    assert requests == [spec.BATCH_EXAMPLES]
    assert asked("one", called, 1) == asked("many", called, spec.BATCH_EXAMPLES) == without + 1
    assert asked("more", called, 3 * spec.BATCH_EXAMPLES) == asked("mere", words, 3 * spec.BATCH_EXAMPLES) + 1


def test_nulls_that_parquet_adds_are_not_contents(tmp_path: Path) -> None:
    """Parquet gives all rows the same keys; only a message's own content may be null."""
    filled = [
        {"role": "add", "content": "a"},
        {"role": "add", "content": None, "value": None, "from": "b"},
    ]
    calls = [{**CALL, "tool_calls": [{"function": {"name": "add", "arguments": one}}]} for one in filled]
    schemas = [
        {"name": "add", "role": "x", "content": content, "parameters": filled} for content in ("y", None)
    ]
    rows = [
        {"messages": [ASKED, call], "tools": [schema]} for call, schema in zip(calls, schemas, strict=True)
    ]
    tokenizer = chat_tokenizer(TOOLS)
    corpus = opened(write_table(tmp_path / "a.parquet", rows), tokenizer)
    shown = "".join(text for text, _ in highlight_example(corpus, tokenizer, number=1)["runs"])
    assert "null" not in shown
    assert '"arguments": {"from": "b", "role": "add"}' in shown or '{"role": "add", "from": "b"}' in shown
    assert trained_texts(corpus, tokenizer)[0].count("add") == 2


def test_calls_that_are_context_are_rendered_too(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(NULL_CALLS)
    rows = [
        {"prompt": [ASKED, CALL, RESULT], "completion": [ANSWERED]},
        {"messages": [ASKED, {**CALL, "weight": 0}, RESULT, ANSWERED]},
    ]
    for number, row in enumerate(rows):
        corpus = opened(write(tmp_path / f"{number}.jsonl", [row]), tokenizer)
        assert trained_texts(corpus, tokenizer) == ["4<|im_end|>"]
        assert CALLED in highlight_example(corpus, tokenizer)["runs"][0][0]


SILENT_CALLS = {
    "prints null": (PRINTS, None),
    "prints": (PRINTS, ""),
    "adds": (CHATML, ""),
    "marked": (CHATML_MARKED, ""),
    "thinks": (THINKING, ""),
    "guarded null": (GUARDED, None),
    "guarded": (GUARDED, ""),
    "null alone": (NULL_CALLS, ""),
}


@pytest.mark.parametrize("train_on", ["completions", "last"])
@pytest.mark.parametrize("case", SILENT_CALLS)
def test_a_call_that_the_template_omits_is_not_an_answer(tmp_path: Path, case: str, train_on: Any) -> None:
    """Trained on its end alone, a model would learn to say nothing where a call is due."""
    template, content = SILENT_CALLS[case]
    tokenizer, call = chat_tokenizer(template), {**CALL, "content": content}
    alone, ended = {"messages": [ASKED, call]}, {"messages": [ASKED, ANSWERED, ASKED, call]}
    within = {"messages": [ASKED, call, RESULT, call, RESULT, ANSWERED]}
    path = write(tmp_path / "a.jsonl", [alone, ended, within, {"messages": [ASKED, ANSWERED]}])
    corpus = opened(path, tokenizer, train_on=train_on)
    assert (corpus.summary.documents, corpus.summary.untrained, corpus.summary.unanswered) == (3, 1, 1)
    answer = trained_texts(corpus, tokenizer, 2)
    assert answer[0].endswith("4<|im_end|>")
    assert trained_texts(corpus, tokenizer) == trained_texts(corpus, tokenizer, 1) == answer
    assert opened(path, tokenizer, train_on="all").summary.documents == 4
    with pytest.raises(
        DataError, match=r"nothing to train on: 2 without a token to train on \(no answer, or one that"
    ):
        opened(write(tmp_path / "b.jsonl", [alone] * 2), tokenizer)


def test_a_streamed_call_that_the_template_omits_is_reported(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(PRINTS)
    reports: list[Progress] = []
    rows = [{"messages": [ASKED, CALL]}, {"messages": [ASKED, ANSWERED]}]
    path = write(tmp_path / "a.jsonl", rows)
    stream = open_corpus(str(path), tokenizer, streaming=True, num_proc=1, progress=reports.append)
    loader = make_loader([stream], max_seq_length=48, batch_size=4)
    assert {origin for origin, _, _ in epoch_of(loader)} == {"a.jsonl:2"}
    loader.close()
    assert any("1 document is without a token to train on" in (note.message or "") for note in reports)
