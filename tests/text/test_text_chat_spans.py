"""Spans of answers in rendered conversations, for templates of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chat_templates as templates
import pytest
from chat_templates import SPECIALS, VARIABLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smollm2 import smollm2_path

from trimtab.facts.errors import ModelError
from trimtab.text import load
from trimtab.text.chat import ChatProcess, ChatTemplateError, Conversation, RenderedConversation


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Question, answer, question, …"""
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def trained(
    template: str, messages: list[dict[str, Any]], train_on: Any = "completions", **more: Any
) -> list[str]:
    with ChatProcess(template, specials=SPECIALS) as process:
        conversation = Conversation(messages, more.pop("tools", None), more.pop("skipped", ()))
        (made,) = process.examples([conversation], {**VARIABLES, **more}, train_on)
    if isinstance(made, ChatTemplateError):
        raise made
    return [made.text[start:end] for start, end in made.spans]


TWO = chat("Hi", "Hello!", "How are you?", " Fine. \n")
THOUGHTFUL = chat(
    "1+1?", "<think>\none and one\n</think>\n\n2", "2+2?", "<think>\ntwo and two\n</think>\n\n4"
)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("CHATML", TWO, ["Hello!<|im_end|>", " Fine. \n<|im_end|>"]),
        ("CHATML_MARKED", TWO, ["Hello!<|im_end|>", " Fine. \n<|im_end|>"]),
        ("CHATML", chat("Hi", "Ho", system="Be brief."), ["Ho<|im_end|>"]),
        ("LLAMA3", TWO, ["Hello!<|eot_id|>", "Fine.<|eot_id|>"]),
        ("MISTRAL", TWO, [" Hello!</s>", "  Fine. \n</s>"]),
        ("MISTRAL", chat("Hi", "Ho", "He", "Ha", system="Be brief."), [" Ho</s>", " Ha</s>"]),
        ("MISTRAL_LATE_SYSTEM", chat("Hi", "Ho", "He", "Ha", system="Be brief."), ["Ho</s>", "Ha</s>"]),
        ("GEMMA", TWO, ["Hello!<end_of_turn>", "Fine.<end_of_turn>"]),
        ("THINKING", THOUGHTFUL, ["2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]),
        ("THINKING", TWO, ["Hello!<|im_end|>", "<think>\n\n</think>\n\n Fine. \n<|im_end|>"]),
        ("THINKING_PROMPT", chat("1+1?", "hm</think>2", "2+2?", "hm</think>4"), ["2</s>", "4</s>"]),
        (
            "CHANNELS",
            chat("Hi", "Ho", "He", "Ha"),
            ["<|channel|>final<|message|>Ho<|end|>", "<|channel|>final<|message|>Ha<|return|>"],
        ),
        ("PLAIN", chat("Hi", "Ho", "He", "Ha"), [" Ho\n", " Ha\n"]),
        ("PLAIN", chat("Assistant: no", "Assistant: yes"), [" Assistant: yes\n"]),
        ("CHATML", chat("Hello!<|im_end|>", "Hello!<|im_end|>"), ["Hello!<|im_end|><|im_end|>"]),
        ("CHATML", chat("same", "same", "same", "same"), ["same<|im_end|>", "same<|im_end|>"]),
        ("MISTRAL_LATE_SYSTEM", chat("a", "a", "a", "a", system="a"), ["a</s>", "a</s>"]),
        ("CHATML", chat("Hi", ""), ["<|im_end|>"]),
    ],
)
def test_answers_include_their_closing_tokens(
    template: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    assert trained(getattr(templates, template), messages) == expected


def test_a_prompt_with_thinking_switched_off_is_a_prompt() -> None:
    assert trained(templates.THINKING, chat("Hi", "Ho"), enable_thinking=False) == ["Ho<|im_end|>"]


def test_calls_of_tools_are_answers_and_results_are_not() -> None:
    messages = [
        *chat("2+2?"),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    expected = ['<call>{"name": "add"}</call><|im_end|>', "It is 4.<|im_end|>"]
    assert trained(templates.TOOLS, messages, tools=[{"name": "add"}]) == expected


def test_thinking_and_calls_of_tools_in_one_conversation() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [
        *chat("1+1?", "2", "2+2?"),
        call,
        {"role": "tool", "content": "4"},
        {**call, "reasoning_content": "once more"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "sure"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert trained(templates.TOOL_THINKING, messages) == [
        "2<|im_end|>",
        '<call>{"name": "add"}</call><|im_end|>',
        '<think>\nonce more\n</think>\n\n<call>{"name": "add"}</call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "rewritten"), [("CHATML", False), ("MISTRAL_LATE_SYSTEM", True), ("THINKING", True)]
)
def test_templates_that_rewrite_the_prompt_are_reported(template: str, rewritten: bool) -> None:
    conversation = Conversation(chat("Hi", "Ho", "He", "Ha", system="Be brief."))
    with ChatProcess(getattr(templates, template), specials=SPECIALS) as process:
        (made,) = process.examples([conversation], VARIABLES, "completions")
    assert isinstance(made, RenderedConversation)
    assert made.rewritten == rewritten


def test_a_conversation_that_begins_with_an_answer() -> None:
    messages = [{"role": "assistant", "content": "Welcome!"}, *chat("Hi", "Ho")]
    first = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"  # nothing is there at first
    expected = ["Welcome!<|im_end|>", "Ho<|im_end|>"]
    assert trained(first + templates.CHATML, messages) == expected


def test_last_and_all_and_answers_that_are_context() -> None:
    assert trained(templates.CHATML, TWO, "last") == [" Fine. \n<|im_end|>"]
    assert trained(templates.CHATML_MARKED, TWO, "last") == [" Fine. \n<|im_end|>"]
    (whole,) = trained(templates.CHATML, TWO, "all")
    assert whole.startswith("<|im_start|>user\nHi")
    assert whole.endswith(" Fine. \n<|im_end|>\n")
    for template in (templates.CHATML, templates.CHATML_MARKED):
        assert trained(template, TWO, skipped=[3]) == ["Hello!<|im_end|>"]
        assert trained(template, TWO, skipped=[1, 3]) == []


def test_ambiguous_marks_are_an_error() -> None:
    once = templates.CHATML_MARKED.replace("{% if m.role == 'assistant' %}", "{% if loop.index0 == 1 %}")
    with pytest.raises(ChatTemplateError, match=r"marks 1 spans for 2 answers"):
        trained(once, TWO, skipped=[3])
    assert trained(once, TWO, skipped=[1, 3]) == [], "without trained answers no mark has to be assigned"


def test_answers_with_several_marks() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}{% endgeneration %}|"
        "{% generation %}{{ m.content }}]{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert len(trained(template, TWO, "completions")) == 4
    one = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert trained(template, one, "last") == ["[Ho", "Ho]"]
    with pytest.raises(ModelError, match="marks 4 spans for 2 answers"):
        trained(template, TWO, "last")


def test_an_assistant_turn_that_cannot_be_located_raises_with_the_reason() -> None:
    messages = chat("Hi", "Hello!", "Why?", "So.")
    with pytest.raises(ModelError, match=r"cannot be located in the text .* depends on .*train_on: all"):
        trained(templates.COUNTING, messages)


def test_a_conversation_that_is_refused_leaves_the_others() -> None:
    conversations = [Conversation(chat("Hi", "Ho", system=system)) for system in (None, "no", None)]
    with ChatProcess(templates.GEMMA, specials=SPECIALS) as process:
        first, refused, last = process.examples(conversations, VARIABLES, "completions")
    assert first == last
    assert isinstance(refused, ChatTemplateError)
    assert "no system role" in str(refused)


def test_the_template_of_a_real_model() -> None:
    tokenizer = load(smollm2_path())
    assert tokenizer.chat_template is not None
    assert trained(tokenizer.chat_template, TWO) == ["Hello!<|im_end|>", " Fine. \n<|im_end|>"]


def test_a_date_is_the_same_on_every_day() -> None:
    with ChatProcess("{{ strftime_now('%d %b %Y') }}", now="2024-07-26") as process:
        assert process.render([[]], {}) == ["26 Jul 2024"]


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, ChatProcess]]:
    names = ("CHATML", "LLAMA3", "MISTRAL_LATE_SYSTEM", "GEMMA", "THINKING", "CHANNELS")
    opened = {name: ChatProcess(getattr(templates, name), specials=SPECIALS) for name in names}
    yield opened
    for process in opened.values():
        process.close()


words = st.text(st.sampled_from("ab <|>/\nü𝄞"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "MISTRAL_LATE_SYSTEM", "GEMMA", "THINKING", "CHANNELS"])
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_spans_of_random_conversations(
    processes: dict[str, ChatProcess], name: str, turns: list[tuple[str, str]]
) -> None:
    messages = chat(*[text for turn in turns for text in turn])
    (made,) = processes[name].examples([Conversation(messages)], VARIABLES, "completions")
    assert isinstance(made, RenderedConversation)
    found = [made.text[start:end] for start, end in made.spans]
    closing = {"LLAMA3": "<|eot_id|>", "GEMMA": "<end_of_turn>", "MISTRAL_LATE_SYSTEM": "</s>"}
    opening = {"CHANNELS": "<|channel|>final<|message|>"}.get(name, "")
    expected = [opening + answer + closing.get(name, "<|im_end|>") for _, answer in turns]
    if name == "THINKING":
        expected[-1] = "<think>\n\n</think>\n\n" + expected[-1]
    if name == "CHANNELS":
        expected = [text.replace("<|im_end|>", "<|end|>") for text in expected]
        expected[-1] = expected[-1].replace("<|end|>", "<|return|>")
    assert found == expected
