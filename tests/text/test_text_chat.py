"""Chat templates: Hugging Face's environment and resource limits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from text_fixtures import write_folder

from trimtab import text
from trimtab.facts.errors import ModelError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2? <&> 'quotes' \"é\""},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'system' %}\n{% set ns = namespace(text=m.content) %}{% continue %}{% endif %}\n"
    "    {% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]\n"
    "    {% else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}\n"
    "{% endfor %}"
)
TOOLS = (
    "{{ tools | tojson(indent=2) if tools else 'no' }}|{{ messages | tojson }}|{{ messages[-1].role[::-1] }}"
)
SMALL = text.Limits(seconds=1, memory_bytes=256 << 20, output_chars=1 << 20)


def render(template: str) -> str:
    return text.render_chats(template, [CHAT], {}, limits=SMALL)[0]


@pytest.mark.oracle
@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_same_text_as_transformers(tmp_path: Path, template: str, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = text.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(CHAT, prompt, tools=tools) == expected
    assert len(expected) > 20


def test_many_conversations_in_one_call(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenizer = text.load(folder)
    many = [[{"role": "user", "content": str(i)}] for i in range(50)]
    assert tokenizer.render_chats(many) == [f"<|im_start|>user\n{i}<|im_end|>\n" for i in range(50)]


def test_template_in_the_config_and_variables(tmp_path: Path) -> None:
    config = {
        "eos_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ eos_token }}{{ enable_thinking }}{{ undefined_name }}"},
        ],
    }
    tokenizer = text.load(write_folder(tmp_path, tokenizer_config=config))
    assert tokenizer.render_chat(CHAT, variables={"enable_thinking": False}) == "</s>False"


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}").startswith("20")


def test_no_template_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja"):
        text.load(write_folder(tmp_path)).render_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "not allowed"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[77].role }}", "no element 77"),
    ],
)
def test_template_errors_are_reported(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{{ 'a' * 10**9 }}", "not allowed"),
        ("{{ 9 ** 9 ** 9 }}", "not allowed"),
        ("{% for i in range(99999) %}{{ 'abcdefgh' * 100 }}{% endfor %}", "more than 1048576 characters"),
    ],
    ids=["endless", "product", "power", "output"],
)
def test_limits_hold(template: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=message):
        render(template)
    assert time.monotonic() - start < 8


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is limited on Linux only")
@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' | center(10**10) }}",
        "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
    ids=["doubling", "filter", "lists"],
)
def test_memory_bombs_are_stopped(template: str) -> None:
    with pytest.raises(ModelError, match=r"memory|stopped"):
        render(template)


def test_conversations_must_be_plain_data() -> None:
    with pytest.raises(ModelError, match="plain data"):
        text.render_chats("x", [[{"role": "user", "content": object()}]], {})
