"""Writing text: options, prompts, files of prompts and of what was written for them, conversations, losses of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import World, case
from shared import decoder_of

import trimtab
from trimtab import text
from trimtab.api.prompt_files import read_prompts
from trimtab.evaluate import log_likelihoods
from trimtab.generate import SamplingOptions, generate, generate_many


def loaded(w: World, **options: Any) -> Any:
    return trimtab.load(str(w.shared("chat")), **options)


def writing(w: World) -> tuple[Any, Any]:
    return decoder_of(w.model), text.load(w.model)


def number(remedy: str) -> float:
    return float(re.findall(r"\d+(?:\.\d+)?", remedy)[0])


def option_case(key: str, wrong: dict[str, Any], *rights: dict[str, Any]) -> None:
    """Options of `Model.generate`; without any right ones, the number in the remedy."""
    name = next(iter(wrong))
    case(
        key,
        lambda w: loaded(w).generate("the cat", **{"max_new_tokens": 2, **wrong}),
        lambda w, remedy: [
            loaded(w).generate("the cat", **{"max_new_tokens": 2, **right})
            for right in (rights or ({name: int(number(remedy))},))
        ],
    )


NUMBER = "facts/arguments.py:check_int: give"
RANGE = "generate/options.py:_in_range: {}"
option_case(RANGE, {"temperature": -1}, {"temperature": 0}, {"temperature": 0.8})
option_case(RANGE, {"top_p": 0}, {"top_p": 0.1}, {"top_p": 1})
option_case("facts/arguments.py:check_float: {}", {"top_p": "0.5"}, {"top_p": 0.5}, {"top_p": 1})
option_case(f"{NUMBER} at least {{}}", {"max_new_tokens": 0})
option_case(f"{NUMBER} a whole number of at least {{}}", {"max_new_tokens": 3.5})
option_case(f"{NUMBER} a whole number", {"seed": "x"}, {"seed": 3}, {"seed": -3})
option_case(
    "generate/options.py:_stop_strings: give a text or a list of texts, none of them empty",
    {"stop": [""]},
    {"stop": "x"},
    {"stop": ["x"]},
)
option_case(
    "api/prompts.py:check_stream: give a function that takes each piece of text: stream=print",
    {"stream": True},
    {"stream": print},
)


def quoted(remedy: str) -> str:
    return re.findall("'(.*?)'", remedy)[0]


case(
    "facts/arguments.py:refuse_unknown: did you mean {}?",
    lambda w: loaded(w).generate("the cat", max_tokens=2),
    lambda w, remedy: loaded(w).generate("the cat", **{quoted(remedy): 2}),
)
case(
    "facts/arguments.py:refuse_unknown: choose one of {}",
    lambda w: loaded(w).generate("the cat", do_sample=True),
    lambda w, remedy: [
        loaded(w).generate("the cat", **{"max_new_tokens": 2, name: "x" if name == "stop" else 1})
        for name in remedy.partition("one of ")[2].split(", ")
    ],
)
case(
    "facts/arguments.py:check_optional_str: give a text, or None",
    lambda w: loaded(w).chat(system=5),
    lambda w, remedy: (loaded(w).chat(system="be kind"), loaded(w).chat(system=None)),
)
COLD = {"temperature": 0, "top_p": 0.5}
WARMER = "generate/options.py:SamplingOptions.__post_init__: give {} 0.7, or leave {} out"
case(
    WARMER,
    lambda w: loaded(w).generate("the cat", max_new_tokens=2, **COLD),
    lambda w, remedy: (
        loaded(w).generate("the cat", max_new_tokens=2, top_p=0.5, temperature=number(remedy)),
        loaded(w).generate("the cat", max_new_tokens=2, temperature=0),
    ),
)


def command(w: World, *words: object, said: str = "the cat") -> str:
    return w.cli("generate", w.shared("chat"), *([said] if said else []), "--max-new-tokens", 2, *words)


case(
    WARMER,
    lambda w: command(w, "--temperature", 0, "--top-p", 0.5),
    lambda w, remedy: (
        command(w, "--top-p", 0.5, *re.findall(r"(--temperature) ([\d.]+)", remedy)[0]),
        command(w, "--temperature", 0),
    ),
)
case(
    "generate/loop.py:generate_many: pass a list of strings, or call generate",
    lambda w: generate_many(*writing(w), "the cat", SamplingOptions(max_new_tokens=2)),
    lambda w, remedy: (
        generate_many(*writing(w), ["the cat"], SamplingOptions(max_new_tokens=2)),
        generate(*writing(w), "the cat", SamplingOptions(max_new_tokens=2)),
    ),
)
case(
    "generate/loop.py:check_prompt: use the tokenizer that belongs to the model",
    lambda w: generate(*writing(w), [5000], SamplingOptions(max_new_tokens=2)),
    lambda w, remedy: generate(
        *writing(w), text.load(w.model).encode("the cat"), SamplingOptions(max_new_tokens=2)
    ),
)
case(
    "generate/loop.py:check_prompt: shorten the prompt or lower max_new_tokens",
    lambda w: generate(*writing(w), "the cat " * 40, SamplingOptions(max_new_tokens=60)),
    lambda w, remedy: (
        generate(*writing(w), "the cat", SamplingOptions(max_new_tokens=60)),
        generate(*writing(w), "the cat " * 40, SamplingOptions(max_new_tokens=2)),
    ),
)
case(
    "generate/loop.py:prompt_ids: give a prompt of at least one word",
    lambda w: generate(*writing(w), "", SamplingOptions(max_new_tokens=2)),
    lambda w, remedy: generate(*writing(w), "cat", SamplingOptions(max_new_tokens=2)),
)


# Prompts in Python.
def message_in(remedy: str) -> Any:
    """The message or list of messages that a remedy shows, with words in place of the dots."""
    shown = re.findall(r"\[?\{.*\}\]?", remedy)[0]
    return json.loads(re.sub(r'"…"|…', '"the cat"', shown))


def asked(w: World, prompt: Any, **options: Any) -> Any:
    return loaded(w).complete(prompt, max_new_tokens=2, **options)


case(
    'api/prompts.py:as_batch: put it into a list: [{"role": "user", "content": …}]',
    lambda w: asked(w, {"role": "user", "content": "the cat"}),
    lambda w, remedy: asked(w, message_in(remedy)),
)
case(
    'api/prompts.py:as_batch: give a text, a conversation such as [{"role": "user", "content": "…"}], or a list of '
    "them",
    lambda w: asked(w, None),
    lambda w, remedy: (asked(w, "the cat"), asked(w, message_in(remedy)), asked(w, ["the cat"])),
)
case(
    'api/prompts.py:as_batch: give texts, or conversations such as [{"role": "user", "content": "…"}]',
    lambda w: asked(w, ["the cat", 5]),
    lambda w, remedy: (asked(w, ["the cat", "a dog"]), asked(w, [message_in(remedy), "a dog"])),
)
case(
    'api/prompts.py:_checked: write {"role": "user", "content": "…"}',
    lambda w: asked(w, [{"content": "the cat"}]),
    lambda w, remedy: asked(w, [message_in(remedy)]),
)
case(
    "api/model.py:Model.complete: give one prompt, or omit stream",
    lambda w: asked(w, ["the cat", "a dog"], stream=print),
    lambda w, remedy: (asked(w, "the cat", stream=lambda piece: None), asked(w, ["the cat", "a dog"])),
)


# Files of prompts.
def written(w: World, name: str, content: str | bytes) -> Path:
    path = w.tmp / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def file_case(
    key: str, name: str, wrong: str | bytes, right: str | Callable[[str], str], new: str = ""
) -> None:
    def follow(w: World, remedy: str) -> None:
        read_prompts(written(w, new or name, right(remedy) if callable(right) else right))

    case(f"api/prompt_files.py:{key}", lambda w: read_prompts(written(w, name, wrong)), follow)


file_case(
    "read_prompts: rename or convert the file of prompts", "p.md", "the cat\n", "the cat\n", new="p.txt"
)
case(
    "api/prompt_files.py:read_prompts: name a file of prompts",
    lambda w: read_prompts(w.tmp / "absent.txt"),
    lambda w, remedy: read_prompts(written(w, "p.txt", "the cat\n")),
)
file_case("read_prompts: write one prompt per line", "p.txt", "\n", "the cat\na dog\n")
file_case("_lines: convert the file", "p.txt", "déjà".encode("latin-1"), "déjà\n")


def forms(remedy: str) -> str:
    """Both rows that the remedy shows."""
    return "".join(
        part.replace("…", "the cat") + "\n" for part in remedy.removeprefix("write ").split(" or ")
    )


FORMS = '_json_fields: write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'
for wrong in ("{", "[]", "{}", '{"prompt": 5}', '{"messages": []}'):
    file_case(FORMS, "p.jsonl", wrong, forms)
file_case(
    "_csv_rows: name the column with the prompts `prompt`",
    "p.csv",
    "question\nthe cat\n",
    lambda remedy: f"{re.findall('`(.*?)`', remedy)[0]}\nthe cat\n",
)
file_case(
    "_csv_rows: quote fields that contain quotes", "p.csv", 'prompt\n"a "b" c\n', 'prompt\n"a ""b"" c"\n'
)
file_case(
    "_csv_rows: give the row as many fields as the header has",
    "p.csv",
    "prompt,n\nthe cat\n",
    "prompt,n\nthe cat,1\n",
)


def answer(w: World, *words: object, prompts: str = "the cat\na dog\n", output: str = "answers.jsonl") -> str:
    path = written(w, "prompts.txt", prompts)
    return command(w, "--prompts", path, "--output", w.tmp / output, *words, said="")


def follow_output(w: World, remedy: str) -> None:
    answer(w, output="another.jsonl")
    if "--overwrite" in remedy:
        answer(w, "--overwrite")


case(
    "api/prompt_files.py:OutputFile.__init__: name another {}",
    lambda w: answer(w, output="absent/answers.jsonl"),
    follow_output,
)
case(
    "api/batches.py:_read_rows: name another {}",
    lambda w: answer(w, output="prompts.txt"),
    follow_output,
)


def answered(w: World, output: str = "o.jsonl", **options: Any) -> int:
    path = written(w, "p.txt", "the cat\n")
    return loaded(w).generate_file(path, w.tmp / output, max_new_tokens=2, **options)


case(
    "api/batches.py:generate_file: give a function of (done, total), or None",
    lambda w: answered(w, on_progress=True),
    lambda w, remedy: (
        answered(w, on_progress=lambda done, total: None),
        answered(w, "n.jsonl", on_progress=None),
    ),
)
case(
    "api/prompt_files.py:OutputFile._check: name another {}, or replace the file with {}",
    lambda w: (answered(w), answered(w, seed=5)),
    lambda w, remedy: (
        answered(w, "another.jsonl", seed=5),
        answered(w, seed=5, **{re.findall(r"(\w+)=True", remedy)[0]: True}),
    ),
)
CHECK = "api/prompt_files.py:OutputFile._check: name another {}, or replace the file with {}"
case(CHECK, lambda w: (written(w, "answers.jsonl", "{}\n"), answer(w)), follow_output)
case(CHECK, lambda w: (answer(w), answer(w, "--seed", 5)), follow_output)
case(CHECK, lambda w: (answer(w), answer(w, prompts="the cat\n")), follow_output)
case(CHECK, lambda w: (answer(w), answer(w, prompts="a tree\na dog\n")), follow_output)
case(
    "cli/generate.py:_check_files: add --prompts FILE, or omit {}",
    lambda w: command(w, "--output", w.tmp / "o.jsonl"),
    lambda w, remedy: (answer(w), command(w)),
)
case(
    "cli/generate.py:_check_files: leave one of them out",
    lambda w: command(w, "--prompts", written(w, "p.txt", "a dog\n"), "--output", w.tmp / "o.jsonl"),
    lambda w, remedy: (answer(w), command(w)),
)
case(
    "cli/generate.py:_check_files: add --output answers.jsonl",
    lambda w: command(w, "--prompts", written(w, "p.txt", "a dog\n"), said=""),
    lambda w, remedy: command(
        w, "--prompts", written(w, "p.txt", "a dog\n"), *remedy.removeprefix("add ").split(), said=""
    ),
)


# Conversations.
def follow_no_chat(w: World, remedy: str) -> None:
    words = re.findall("`trimtab (.*?)`", remedy)[0].replace('"…"', "cat").split()
    w.cli(*words, "--max-new-tokens", 2)
    loaded(w).chat()


case(
    'api/chat.py:Chat.__init__: continue text with `trimtab generate {} "…"`, or use a model tuned for chat',
    lambda w: trimtab.load(str(w.model)).chat(),
    follow_no_chat,
)
case(
    "api/chat.py:Chat.send: give a text",
    lambda w: loaded(w).chat(max_new_tokens=2).send(None),
    lambda w, remedy: loaded(w).chat(max_new_tokens=2).send("cat"),
)
case(
    "api/chat.py:Chat._fitted: shorten it, or lower max_new_tokens",
    lambda w: loaded(w).chat(max_new_tokens=100).send("the cat " * 20),
    lambda w, remedy: (
        loaded(w).chat(max_new_tokens=100).send("cat"),
        loaded(w).chat(max_new_tokens=2).send("the cat " * 20),
    ),
)


# Losses of texts.
case(
    "evaluate/likelihood.py:log_likelihoods: shorten it",
    lambda w: log_likelihoods(*writing(w), ["the cat " * 200]),
    lambda w, remedy: log_likelihoods(*writing(w), ["the cat "]),
)


def follow_long(w: World, remedy: str) -> None:
    loaded(w).loss("the cat")
    verb = re.findall("`trimtab (.*?)`", remedy)[0]
    w.cli(verb, w.model, written(w, "long.txt", "the cat " * 200), "--no-probe")


case(
    "evaluate/likelihood.py:mean_losses: shorten it, or measure a file with `trimtab eval`, which splits text into "
    "sequences",
    lambda w: loaded(w).loss("the cat " * 200),
    follow_long,
)
case(
    "evaluate/likelihood.py:mean_losses: give at least two tokens",
    lambda w: loaded(w).loss(""),
    lambda w, remedy: loaded(w).loss("the cat"),
)
ASK = {"role": "user", "content": "hi"}
case(
    'data/tokenizing.py:encode_conversations: end it with {"role": "assistant", "content": "…"}',
    lambda w: loaded(w).loss([ASK]),
    lambda w, remedy: loaded(w).loss([ASK, message_in(remedy)]),
)


# The base that an exported adapter names.
def exported(w: World, base: object, folder: str = "adapter") -> str:
    return w.cli("export", "peft", w.shared("lora run") / "run", w.tmp / folder, "--base", base)


case(
    "run/base_weights.py:check_base_name: write the base there first: `trimtab export hf BASE FOLDER`",
    lambda w: exported(w, w.tmp / "absent"),
    lambda w, remedy: (
        w.cli("export", "hf", w.model, w.tmp / "absent"),
        exported(w, w.tmp / "absent"),
    ),
)
case(
    "run/base_weights.py:check_base_name: name the model that the adapter was trained on",
    lambda w: exported(w, w.shared("wide")),
    lambda w, remedy: exported(w, w.model),
)


def follow_made(w: World, remedy: str) -> None:
    words = re.findall("`trimtab (.*?)`", remedy)[0].replace("FOLDER", str(w.tmp / "made")).split()
    w.cli(*words)
    exported(w, w.tmp / "made")


case(
    "run/base_weights.py:check_base_name: make one: `trimtab export hf {} FOLDER`, then `--base FOLDER`",
    lambda w: exported(w, w.shared("run") / "run"),
    follow_made,
)
case(
    "api/batches.py:_read_rows: add {}, or put it into the prompt",
    lambda w: answer(w, "--system", "be kind"),
    lambda w, remedy: (
        answer(w, "--system", "be kind", "--chat", output="chat.jsonl"),
        answer(w, prompts="be kind. the cat\n", output="plain.jsonl"),
    ),
)
