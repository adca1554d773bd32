"""Training examples in every common format, and which of their tokens are trained on."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from chat_templates import CHATML, CHATML_MARKED, GEMMA, LLAMA3, MISTRAL, VARIABLES, chat_tokenizer
from data_rows import ANSWER, QUESTION, SAME, opened, runs, write
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import SourceSpec, TokenizerSpec, highlight_example, open_corpus
from trimtab.data import tokenizer_worker as worker
from trimtab.data.stream_sequences import Cursor, PieceReader
from trimtab.facts.errors import DataError
from trimtab.text.tokenizer import Tokenizer

RENDERED = [
    ("<|im_start|>user\nWhat is two plus two?<|im_end|>\n<|im_start|>assistant\n", False),
    ("It is four.<|im_end|>", True),
    ("\n", False),
]


COLUMNS = {
    "other names": {"messages": "dialog"},
    "question and answer": {"instruction": "question", "output": "answer"},
}


@pytest.mark.parametrize("form", SAME)
def test_every_format_becomes_the_same_example(tmp_path: Path, chatml: Tokenizer, form: str) -> None:
    path = write(tmp_path / "a.jsonl", [SAME[form]])
    assert runs(path, chatml, columns=COLUMNS.get(form, {})) == RENDERED


@pytest.mark.parametrize("text", ["[INST] Add.", "[1, 2]", "[]", '[{"a": 1}]', '[{"role": "user"'])
def test_a_text_may_begin_with_a_bracket(tmp_path: Path, chatml: Tokenizer, text: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": text, "completion": "4"}])
    assert runs(path, chatml)[0] == (text, False)


@pytest.mark.parametrize("form", ["auto", "prompt-completion"])
def test_files_without_rows_do_not_affect_the_others(tmp_path: Path, chatml: Tokenizer, form: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_text("text,completion\n")
    with pytest.raises(DataError, match=r"contains no (rows|documents); use a source"):
        opened(tmp_path / "in", chatml, format=form)
    write(tmp_path / "in/b.jsonl", [{"text": "x", "prompt": [QUESTION], "completion": [ANSWER]}])
    assert runs(tmp_path / "in", chatml, format=form) == RENDERED


@pytest.mark.parametrize("ending", ["json", "csv", "parquet"])
def test_every_table_becomes_the_same_example(tmp_path: Path, chatml: Tokenizer, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    more = [QUESTION, {**ANSWER, "tool_calls": [{"name": "x", "arguments": {"a": 1}}]}]
    if ending == "json":
        path.write_text(json.dumps([{"messages": [QUESTION, ANSWER]}]))
    elif ending == "csv":
        text = json.dumps([QUESTION, ANSWER]).replace('"', '""')
        path.write_text(f'id,messages\n1,"{text}"\n')
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        # Parquet fills the keys that other rows have: here a call of a tool, which the first row has not.
        rows = [{"messages": [QUESTION, ANSWER]}, {"messages": more}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert runs(path, chatml) == RENDERED


def test_system_prompts_and_tools_come_from_columns_too(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools }}" + CHATML
    row = {"system": "Be brief.", "tools": json.dumps([{"name": "add"}]), "messages": [QUESTION, ANSWER]}
    path = write(tmp_path / "a.jsonl", [row, {"messages": [QUESTION, ANSWER]}])
    (before, _), *_ = runs(path, chat_tokenizer(template))
    assert before.startswith('[{"name": "add"}]<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n')
    assert runs(path, chat_tokenizer(template), number=1) == RENDERED


def test_empty_fields_after_an_example_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('instruction,output\nList primes,"2, 3, 5 and 7",,\nHi,Ho,\n')
    tokenizer = chat_tokenizer(None)
    assert runs(path, tokenizer)[1] == ("2, 3, 5 and 7</s>", True)
    assert runs(path, tokenizer, number=1)[1] == ("Ho</s>", True)


@pytest.mark.parametrize("spaced", [False, True])
def test_plain_prompts_and_completions_are_framed_once(tmp_path: Path, spaced: bool) -> None:
    """No template is needed; the end token is trained on, and one in the text is not doubled."""
    tokenizer = chat_tokenizer(None, spaced=spaced)
    rows = [
        {"prompt": "What is two plus two?", "completion": " It is four."},
        {"prompt": "What is two plus two?", "completion": " It is four.</s>"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    corpus = opened(path, tokenizer)
    for document in range(2):
        ids = corpus.tokens(document).tolist()
        assert ids.count(2) == 1
        assert ids[-1] == 2
        shown = highlight_example(corpus, tokenizer, number=document)["runs"]
        assert [flag for _, flag in shown] == [False, True]
        assert shown[0][0].strip() == "What is two plus two?"
        assert shown[1][0].endswith("It is four.</s>")


def test_alpaca_without_a_template_has_plain_headings(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."}
    path = write(tmp_path / "a.jsonl", [row, {"instruction": "Hi", "output": "Ho"}])
    tokenizer = chat_tokenizer(None)
    assert runs(path, tokenizer) == [
        ("Be brief.\n\n### Instruction:\nAdd.\n\n### Input:\n2, 2\n\n### Response:\n", False),
        ("4</s>", True),
    ]
    assert runs(path, tokenizer, number=1) == [
        ("### Instruction:\nHi\n\n### Response:\n", False),
        ("Ho</s>", True),
    ]


def test_train_on_selects_the_trained_tokens(tmp_path: Path, chatml: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}])
    assert [flag for _, flag in runs(path, chatml)] == [False, True, False, True, False]
    assert [flag for _, flag in runs(path, chatml, train_on="last")] == [False, True, False]
    everything = runs(path, chatml, train_on="all")
    assert everything[0] == ("<|im_start|>", False)  # nothing predicts a first token
    assert [flag for _, flag in everything] == [False, True]


def test_answers_of_weight_0_and_in_prompts_are_context(tmp_path: Path, chatml: Tokenizer) -> None:
    rows = [
        {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**ANSWER, "weight": 1}]},
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
    ]
    for number, row in enumerate(rows):
        path = write(tmp_path / f"{number}.jsonl", [row])
        shown = runs(path, chatml)
        assert [flag for _, flag in shown] == [False, True, False]
        assert shown[1][0] == "It is four.<|im_end|>"
        assert "It is four." in shown[0][0]


def test_examples_without_an_answer_are_counted_and_left_out(tmp_path: Path, chatml: Tokenizer) -> None:
    rows = [
        {"messages": [QUESTION]},
        {"messages": []},
        {"messages": [QUESTION, ANSWER, QUESTION]},
        {"messages": [QUESTION, {**ANSWER, "weight": 0}]},
        {"messages": [QUESTION, ANSWER]},
    ]
    corpus = opened(write(tmp_path / "a.jsonl", rows), chatml)
    summary = corpus.summary
    assert (summary.documents, summary.empty, summary.untrained, summary.unanswered) == (2, 1, 2, 1)
    assert summary.trained == 2 * len(chatml.encode("It is four.<|im_end|>"))
    assert (
        corpus.tokens(0).tolist() == corpus.tokens(1).tolist()
    )  # the question without an answer is not there
    again = opened(tmp_path / "a.jsonl", chatml)
    assert again.summary == summary
    assert again.entry.path == corpus.entry.path
    with pytest.raises(DataError, match=r"nothing to train on: 2 without a token to train on.*train_on: all"):
        opened(write(tmp_path / "b.jsonl", [rows[0], rows[3]]), chatml)


def test_broken_characters_are_repaired_and_counted(tmp_path: Path, chatml: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a\\ud800b"},'
        ' {"role": "assistant", "content": "c\\ufdd0d\\ufdd1"}]}\n'
    )
    corpus = opened(tmp_path / "a.jsonl", chatml)
    assert corpus.summary.repaired == 1
    assert "c\ufffdd\ufffd" in highlight_example(corpus, chatml)["runs"][1][0]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
def test_broken_characters_in_lists_written_as_json_are_repaired_too(tmp_path: Path, template: str) -> None:
    answer = {"role": "assistant", "content": "It \ud800is\ufdd1 four. \U0001f642"}
    path = write(tmp_path / "a.jsonl", [{"messages": json.dumps([QUESTION, answer])}])
    tokenizer = chat_tokenizer(template)
    corpus = opened(path, tokenizer)
    assert corpus.summary.repaired == 1
    assert highlight_example(corpus, tokenizer)["runs"][1] == (
        "It \ufffdis\ufffd four. \U0001f642<|im_end|>",
        True,
    )


def test_broken_characters_in_names_and_tools_are_repaired_too(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("{{ tools | tojson if tools }}" + CHATML)
    rows = [
        {"messages": [QUESTION, ANSWER], "tools": tools}
        for tools in ([{"\ud800": 1}], json.dumps([{"\ud800": 1}]), [{"\U0001f642": 1}])
    ]
    corpus = opened(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert corpus.summary.repaired == 2
    shown = [highlight_example(corpus, tokenizer, number=number)["runs"][0][0] for number in range(3)]
    assert [text.partition("<")[0] for text in shown] == [
        '[{"\ufffd": 1}]',
        '[{"\ufffd": 1}]',
        '[{"\U0001f642": 1}]',
    ]


@pytest.mark.oracle
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("template", [CHATML_MARKED], ids=["chatml"])
def test_masks_match_transformers(tmp_path: Path, template: str, spaced: bool) -> None:
    transformers = pytest.importorskip("transformers")
    # With trimmed offsets transformers finds no token at a space, and skips the rest of the conversation.
    tokenizer = chat_tokenizer(template, spaced=spaced, trimmed=False)
    tokenizer.save(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    draw = np.random.default_rng(0)
    texts = [
        "What is two plus two?",
        " It is four. ",
        "fine, thank you.\n\n",
        "Grüße, 你好 🙂",
        "a",
        "",
        "x\ty",
    ]
    rows = []
    for _ in range(40):
        contents = [str(draw.choice(texts)) for _ in range(2 * draw.integers(1, 4))]
        contents[-1] = contents[-1] or "a"  # a last answer that is empty is left out
        roles = ("user", "assistant")
        rows.append([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)])
    corpus = opened(write(tmp_path / "a.jsonl", [{"messages": row} for row in rows]), tokenizer)
    assert corpus.num_documents == len(rows)
    for document, row in enumerate(rows):
        expected = theirs.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        assert corpus.tokens(document).tolist() == expected["input_ids"]
        mask = corpus.trained(document)
        assert mask is not None
        assert mask.tolist() == list(expected["assistant_masks"])
        assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("spaced", [False, True])
def test_a_template_with_marks_and_one_without_give_the_same_masks(tmp_path: Path, spaced: bool) -> None:
    rows = [
        {"messages": [QUESTION, ANSWER, {**QUESTION, "content": "  é?\n"}, {**ANSWER, "content": " 🙂 \n"}]}
    ]
    path = write(tmp_path / "a.jsonl", rows)
    made = [chat_tokenizer(CHATML, spaced=spaced), chat_tokenizer(CHATML_MARKED, spaced=spaced)]
    made += [chat_tokenizer(CHATML, spaced=spaced, trimmed=False)]
    first, *others = (opened(path, tokenizer) for tokenizer in made)
    for other in others:
        assert first.tokens(0).tolist() == other.tokens(0).tolist()
        assert first.trained(0).tolist() == other.trained(0).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, MISTRAL], ids=["llama3", "gemma", "mistral"])
@pytest.mark.parametrize("spaced", [False, True])
def test_the_beginning_token_occurs_once(tmp_path: Path, template: str, spaced: bool) -> None:
    tokenizer = chat_tokenizer(template, spaced=spaced)
    corpus = opened(write(tmp_path / "a.jsonl", [{"messages": [QUESTION, ANSWER]}]), tokenizer)
    ids = corpus.tokens(0).tolist()
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids == tokenizer.encode(tokenizer.render_chat([QUESTION, ANSWER]))
    trained = [i for i, flag in zip(ids, corpus.trained(0), strict=True) if flag]  # type: ignore[arg-type]
    assert tokenizer.decode(trained).strip() == "It is four."
    assert trained[-1] == ids[-1] or template == GEMMA  # the closing token; Gemma's is followed by a line end


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=4),
)
@settings(deadline=None)
def test_a_token_is_trained_on_if_one_of_its_characters_is(
    sizes: list[int], spans: list[tuple[int, int]]
) -> None:
    ends = np.cumsum(sizes).tolist()
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    chosen = {place for start, size in spans for place in range(start, start + size)}
    mask = worker.mask_of(offsets, [(start, start + size) for start, size in spans])
    assert mask.tolist() == [int(bool(chosen & set(range(*offset)))) for offset in offsets]


def test_several_processes_give_the_same_tokens_and_masks(tmp_path: Path, chatml: Tokenizer) -> None:
    rows = [
        {
            "messages": [
                {**QUESTION, "content": f"What is {i}? " * (i % 40)},
                {**ANSWER, "content": f"It is {i}."},
            ]
        }
        for i in range(3000)
    ]
    path = write(tmp_path / "a.jsonl", rows)
    alone = opened(path, chatml)
    spec = TokenizerSpec.of(chatml)
    assert spec.chat is not None
    assert set(VARIABLES) <= set(spec.chat.variables)
    together = open_corpus(SourceSpec(str(path)), chatml, cache_dir=tmp_path / "other", num_proc=3)
    assert alone.entry.meta.checksums == together.entry.meta.checksums
    assert set(alone.entry.meta.checksums) == {"tokens.bin", "documents.bin", "trained.bin"}


def test_leaving_early_leaves_no_process_behind(tmp_path: Path, chatml: Tokenizer) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    rows = [{"messages": [{**QUESTION, "content": "What is two? " * 400}, ANSWER]} for _ in range(300)]
    stream = open_corpus(str(write(tmp_path / "a.jsonl", rows)), chatml, streaming=True, num_proc=2)
    with closing(iter(PieceReader(stream, 1 << 14, True, Cursor()))) as pieces:
        assert len(list(itertools.islice(pieces, 1))) == 1
        during = {child.pid for child in psutil.Process().children(recursive=True)} - before
        assert len(during) >= 2, "tokenizers and templates run in processes of their own"
    assert not during & {child.pid for child in psutil.Process().children(recursive=True)}
