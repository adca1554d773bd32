"""Tokenizers, chat templates and added tokens."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates
from cases import World, case, in_turn
from test_model_gguf import random_decoder, write_gguf
from text_fixtures import byte_level_backend
from tiny_model import tiny_shape

from trimtab import text
from trimtab.data import SourceSpec, open_corpus
from trimtab.text.chat import ChatProcess, Limits, render_chats
from trimtab.text.from_gguf import tokenizer_from_metadata

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"
PLAIN = {"text": "a", "numbers": 1, "lists": [1]}
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sees a dog"}]


def add(w: World, *tokens: str) -> object:
    return w.train(model={"name": str(w.model), "added_tokens": list(tokens)}, max_steps=1)


case(
    "text/added.py:with_tokens: leave it out",
    lambda w: add(w, "<|tool|>", " "),
    lambda w, remedy: add(w, "<|tool|>"),
)
case(
    "text/added.py:with_tokens: leave it out",
    lambda w: add(w, "<|tool|>", "<|end|>"),
    lambda w, remedy: add(w, "<|tool|>"),
)
case(
    "text/added.py:with_tokens: give each once",
    lambda w: add(w, "<|tool|>", "<|tool|>"),
    lambda w, remedy: add(w, "<|tool|>"),
)


def changed(change: Callable[[Path], object]) -> Callable[[World], object]:
    def provoke(w: World) -> object:
        change(w.own())
        return text.load(w.own()).encode_document("the cat")

    return provoke


def again(w: World, remedy: str) -> None:
    text.load(w.again()).encode_document("the cat")


def follow_named_elsewhere(w: World, remedy: str) -> None:
    """The tokenizer downloaded too, or another one named in the recipe."""
    w.train(model={"name": str(w.own()), "tokenizer": str(w.model)}, max_steps=1)
    again(w, remedy)


case(
    "text/from_folder.py:_read_backend: download it too, or name another tokenizer",
    changed(lambda folder: (folder / "tokenizer.json").unlink()),
    follow_named_elsewhere,
)
case(
    "text/from_folder.py:_read_backend: download it again",
    changed(lambda folder: (folder / "tokenizer.json").write_text("{}")),
    again,
)
for broken in ("{", "[]"):
    case(
        "text/from_folder.py:_read_json: download it again",
        changed(lambda folder, broken=broken: (folder / "tokenizer_config.json").write_text(broken)),
        again,
    )
case(
    "text/from_folder.py:_ids: download both files again",
    changed(lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "<|stop|>"}')),
    again,
)


def huge_ids(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 2**40}))


case("text/from_folder.py:_ids: download config.json again", changed(huge_ids), again)


def sentencepiece_only(w: World) -> object:
    import sentencepiece

    folder = w.own()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sees a dog", "a big red house under the tree"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
    )
    return text.load(folder)


def follow_conversion(w: World, remedy: str) -> None:
    command = remedy.removeprefix("convert it once: ").partition(" (needs")[0].replace("FOLDER", str(w.own()))
    program, flag, code = shlex.split(command)
    assert (program, flag) == ("python", "-c")
    exec(code, {})
    text.load(w.own())


case(
    'text/from_folder.py:_read_backend: convert it once: python -c "from transformers import AutoTokenizer as T; '
    "p='FOLDER'; T.from_pretrained(p).save_pretrained(p)\" (needs transformers and sentencepiece)",
    sentencepiece_only,
    follow_conversion,
)


# Tokenizers inside GGUF files.


def metadata(**changes: Any) -> dict[str, Any]:
    backend = byte_level_backend(320)
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in ("<s>", "</s>", "<|end|>") else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def follow_gguf_tokenizer(w: World, remedy: str, *, trained: bool) -> None:
    """The folder with tokenizer.json next to the GGUF file: as `model.tokenizer`, or as the model."""
    assert "model.tokenizer" in remedy
    text.load(w.model)
    if trained:
        write_gguf(random_decoder(tiny_shape()), w.tmp / "m.gguf")
        w.train(model={"name": str(w.tmp / "m.gguf"), "tokenizer": str(w.model)}, max_steps=1)
        w.train(model=str(w.model), max_steps=1)


GGUF = "use the model's Hugging Face folder, or set model.tokenizer to a folder with its tokenizer.json"
for function, wrong in {
    "tokenizer_from_metadata": metadata(tokens=["a", "a"]),
    "tokenizer_from_metadata ": metadata(model="bert"),
    "_split_rule": metadata(pre="unheard-of"),
    "_byte_level": metadata(merges=["abc"]),
    "_sentencepiece": metadata(model="llama", scores=[1.0]),
    "_bpe": metadata(merges=["zzz qqq"]),
    "_types": metadata(token_type=[1]),
    "_strings": metadata(tokens=None),
    "_token_id": metadata(eos_token_id=10**6),
}.items():
    case(
        f"text/from_gguf.py:{function.strip()}: {GGUF}",
        lambda w, wrong=wrong: tokenizer_from_metadata(wrong, "m.gguf"),
        lambda w, remedy, trained=function == "_split_rule": follow_gguf_tokenizer(
            w, remedy, trained=trained
        ),
    )
case(
    "text/source.py:load: name the folder with tokenizer.json in it",
    lambda w: text.load(w.model / "config.json"),
    lambda w, remedy: text.load(w.model),
)
case(
    "text/source.py:load: check the path",
    lambda w: text.load(w.tmp / "absent"),
    lambda w, remedy: text.load(w.model),
)


# Conversations.


def chat_recipe(w: World, template: str | None) -> object:
    rows = [json.dumps({"messages": TALK})] * 8
    (w.tmp / "chats.jsonl").write_text("\n".join(rows))
    model = {"name": str(w.model), **({} if template is None else {"chat_template": template})}
    return w.train(model=model, data_train=[str(w.tmp / "chats.jsonl")], max_steps=1)


def written(w: World, content: str | bytes, name: str = "chat.jinja") -> str:
    path = w.tmp / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def follow_jinja(w: World, remedy: str) -> None:
    assert "Jinja file" in remedy
    chat_recipe(w, written(w, CHAT, "good.jinja"))
    if "template itself" in remedy:
        assert all(sign in CHAT for sign in re.findall(r"\{\{|\{%", remedy))
        chat_recipe(w, CHAT)


SHORT = "text/template.py:read_template: name a Jinja file, which is a text of a few kilobytes"
case(SHORT, lambda w: chat_recipe(w, written(w, "x" * (2 << 20))), follow_jinja)
case(SHORT, lambda w: chat_recipe(w, written(w, b"\xff\xfe\x00")), follow_jinja)
case(
    "text/template.py:read_template: name a Jinja file, or write the template itself, which has {{ … }} or {% … %} in "
    "it",
    lambda w: chat_recipe(w, str(w.tmp / "absent.jinja")),
    follow_jinja,
)
case(
    "text/template.py:read_template: write the template into it, or name another Jinja file",
    lambda w: chat_recipe(w, written(w, " \n")),
    lambda w, remedy: (chat_recipe(w, written(w, CHAT)), follow_jinja(w, remedy)),
)
case(
    "data/rendering.py:no_template_error: set model.chat_template to a Jinja file or to the template itself, or use a "
    "tokenizer that has one",
    lambda w: chat_recipe(w, None),
    lambda w, remedy: (follow_jinja(w, remedy), follow_template_file(w)),
)


def follow_template_file(w: World) -> None:
    (w.own() / "chat_template.jinja").write_text(CHAT)
    rows = str(w.tmp / "chats.jsonl")
    w.train(model={"name": str(w.model), "tokenizer": str(w.own())}, data_train=[rows], max_steps=1)


def talk(w: World, prompt: str = "--chat") -> str:
    words = ("generate", w.own(), "the cat", "--max-new-tokens", 2)
    return w.cli(*words, *([prompt] if prompt else []))


def follow_chat_model(w: World, remedy: str) -> None:
    talk(w, "")
    (w.own() / re.findall(r"put a (\S+) next to", remedy)[0]).write_text(CHAT)
    talk(w)


case(
    "text/tokenizer.py:Tokenizer.render_chats: use plain text or a model tuned for chat, or put a "
    "chat_template.jinja next to it",
    talk,
    follow_chat_model,
)
case(
    "text/chat.py:ChatProcess._request: use text, numbers, lists",
    lambda w: render_chats(CHAT, [[{"role": "user", "content": {1, 2}}]], {}),
    lambda w, remedy: in_turn(
        lambda kind: render_chats(CHAT, [[{"role": "user", "content": PLAIN[kind]}]], {}),
        ["text", "numbers", "lists"],
    ),
)  # fmt: skip


def endless(w: World) -> object:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with ChatProcess(loop, limits=Limits(seconds=0.3, grace_seconds=0.3)) as process:
        return process.render([TALK], {})


case(
    "text/chat.py:_limit_error: a valid template needs milliseconds; use another one, or text without a template",
    endless,
    lambda w, remedy: (render_chats(CHAT, [TALK], {}), w.train(max_steps=1)),
)


# The tokenizer's own conventions.


def endless_documents(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))


def follow_eos(w: World, remedy: str) -> None:
    key, file = re.findall(r"set (\w+) in (\S+)", remedy)[0]
    w.edit_json(w.own() / file, **{key: "<|end|>"})
    text.load(w.own()).encode_document("the cat")


case(
    "text/tokenizer.py:Tokenizer._end: set eos_token in tokenizer_config.json",
    changed(endless_documents),
    follow_eos,
)


def other_tokenizer(w: World) -> object:
    folder = w.tmp / "larger"
    if not folder.exists():
        shutil.copytree(w.model, folder)
        byte_level_backend(400).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return w.train(model={"name": str(w.model), "tokenizer": str(folder)}, max_steps=1)


case(
    "text/tokenizer.py:check_vocabulary: use the tokenizer that belongs to the model",
    other_tokenizer,
    lambda w, remedy: w.train(model={"name": str(w.model), "tokenizer": str(w.model)}, max_steps=1),
)


# What a template says in its own process.
def refused_by(template: str, talk: list[dict[str, Any]] = TALK) -> object:
    return render_chats(template, [talk], {})


FUSSY = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + CHAT
ADDING = "{% for m in messages %}{{ m.content + '!' }}<|end|>{% endfor %}"
case(
    "text/chat_worker.py:describe_error: correct the chat template",
    lambda w: refused_by("{% for m in messages %}{{ m.content }}"),
    lambda w, remedy: refused_by("{% for m in messages %}{{ m.content }}{% endfor %}"),
)
case(
    "text/chat_worker.py:describe_error: see the model's card for the required form of a conversation",
    lambda w: refused_by(FUSSY, TALK[1:]),
    lambda w, remedy: refused_by(FUSSY, TALK),
)
case(
    "text/chat_worker.py:describe_error: check the roles and contents of the messages",
    lambda w: refused_by(ADDING, [{"role": "user", "content": 5}]),
    lambda w, remedy: refused_by(ADDING, TALK),
)


# Answers that cannot be found in what a template writes.
def counting(w: World, template: str, train_on: str = "completions") -> object:
    (w.own("chat") / "chat_template.jinja").write_text(template)
    path = w.tmp / "two.jsonl"
    path.write_text(json.dumps({"messages": TALK * 2}))
    spec = SourceSpec(str(path), train_on=train_on)  # type: ignore[arg-type]
    return open_corpus(spec, text.load(w.own("chat")), cache_dir=w.tmp / "cache", num_proc=1)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def follow_counting(w: World, remedy: str) -> None:
    for choice in re.findall(r"train_on: (\w+)", remedy):
        counting(w, chat_templates.COUNTING, train_on=choice)
    assert all(mark in MARKED for mark in re.findall(r"\{% \w+ %\}", remedy))
    counting(w, MARKED)


case(
    "text/chat_worker.py:describe_error: set train_on: all, or put {% generation %} … {% endgeneration %} around the "
    "answers in the template",
    lambda w: counting(w, chat_templates.COUNTING),
    follow_counting,
)
