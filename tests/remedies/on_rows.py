"""Rows, models and callbacks passed from Python to `trimtab.train` and `trimtab.resume`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import World, case, in_turn, listed

import trimtab
from trimtab.adapt import quantize_layout
from trimtab.data.in_memory import RowStream, iterate, lines_of, spool_rows
from trimtab.report import LiveView

ROWS = [{"text": f"the cat sees {i} dogs."} for i in range(20)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def settings(w: World, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(w.model),
        "data": {
            "train": [{"source": "starter:math", "first": 20}],
            "eval_share": 0,
            "cache_dir": str(w.tmp / "cache"),
            "num_proc": 1,
        },
        "max_seq_length": 64,
        "max_steps": 2,
        "num_train_epochs": None,
        "eval_on_start": False,
        "device": "cpu",
        "dtype": "fp32",
        "probe": False,
        "output_dir": str(w.tmp / f"run-{len(list(w.tmp.glob('run-*')))}"),
        **changes,
    }


def train(w: World, data: Any = None, **options: Any) -> Any:
    keys = {key: options.pop(key) for key in ("data_key", "callbacks", "model") if key in options}
    return trimtab.train({**settings(w), **options}, data=data, view=None, **keys)


def row_case(key: str, wrong: Any, *rights: Any) -> None:
    case(
        f"api/rows.py:{key}",
        lambda w: train(w, wrong),
        lambda w, remedy: [train(w, right) for right in rights],
    )


row_case(
    "DataArgument._mapping: give data={'train': rows, 'eval': rows}, or a list of rows",
    {"eval": ROWS},
    {"train": ROWS, "eval": ROWS[:3]},
    ROWS,
)
row_case(
    "_refuse_texts: for texts give rows: [{'text': text} for text in texts]",
    {"train": ["the cat sees a dog", "a dog runs"]},
    {"train": [{"text": one} for one in ("the cat sees a dog", "a dog runs")]},
)


def named_files(w: World) -> list[str]:
    (w.tmp / "a.txt").write_text("the cat sees a dog. " * 300)
    return [str(w.tmp / "a.txt")]


case(
    "api/rows.py:_refuse_files: name files as data={'train': [...]}; to train on these strings as text, give rows like "
    "{'text': …}",
    lambda w: train(w, named_files(w)),
    lambda w, remedy: (
        train(w, {"train": named_files(w)}),
        train(w, [{"text": name} for name in named_files(w)]),
    ),
)
case(
    "api/rows.py:DataArgument.of: pass the rows as data, or omit data_key",
    lambda w: train(w, data_key="chats"),
    lambda w, remedy: (train(w, ROWS, data_key="chats"), train(w)),
)
case(
    "api/rows.py:_checked_key: use up to 64 letters, digits, dots, dashes and underscores, such as 'chats-v3'",
    lambda w: train(w, ROWS, data_key="a b"),
    lambda w, remedy: (
        train(w, ROWS, data_key=re.findall("'(.*?)'", remedy)[0]),
        train(w, ROWS, data_key=("a.B-_9" * 11)[:64]),
    ),
)


# Resuming with rows.
def begun(w: World, **options: Any) -> Path:
    folder = w.tmp / "begun"
    if not folder.exists():
        train(w, ROWS, output_dir=str(folder), lr_scheduler_type="constant", **options)
    return folder


def continue_run(w: World, data: Any = None, **options: Any) -> Any:
    return trimtab.resume(begun(w), data=data, max_steps=3, **options)


def anew(w: World, remedy: str) -> None:
    """The same rows, and, where the remedy says so, a new run."""
    continue_run(w, ROWS)
    if "start a new run" in remedy:
        train(w, ROWS[:9])


case(
    "api/rows.py:DataArgument.store_for_resume: pass the same rows, or start a new run",
    lambda w: continue_run(w, ROWS[:9]),
    anew,
)
case(
    "api/rows.py:DataArgument.store_for_resume.key_of: pass the same data, or start a new run",
    lambda w: continue_run(w, ROWS, data_key="other"),
    anew,
)
case(
    "api/rows.py:DataArgument._check_unchanged: pass only the rows with which the run was started",
    lambda w: continue_run(w, {"train": ROWS, "num_proc": 3}),
    lambda w, remedy: continue_run(w, ROWS),
)


def from_files(w: World) -> Path:
    folder = w.tmp / "files"
    train(w, str(named_files(w)[0]), output_dir=str(folder), lr_scheduler_type="constant")
    return folder


case(
    "api/rows.py:_recorded_name: omit data, or pass it as when the run was started",
    lambda w: trimtab.resume(from_files(w), data=ROWS, max_steps=3),
    lambda w, remedy: trimtab.resume(w.tmp / "files", max_steps=3),
)


# Rows themselves.
FORMS = "pass texts, conversations (lists of {'role': …, 'content': …}) or dicts with column names as keys"
ALL_FORMS: list[list[Any]] = [["a cat", "a dog"], [CHAT, CHAT], [{"text": "a cat"}]]


def spooled(w: World, rows: Any) -> Any:
    return spool_rows(rows, w.tmp / "spooled")


case(
    f"data/in_memory.py:lines_of: {FORMS}",
    lambda w: list(lines_of([5], "data")),
    lambda w, remedy: [list(lines_of(rows, "data")) for rows in ALL_FORMS],
)
case(
    f"data/in_memory.py:spool_rows: {FORMS}",
    lambda w: spooled(w, []),
    lambda w, remedy: [spooled(w, rows) for rows in ALL_FORMS],
)
case(
    f"data/in_memory.py:RowStream._head: {FORMS}",
    lambda w: RowStream([]),
    lambda w, remedy: [RowStream(rows) for rows in ALL_FORMS],
)
case(
    "data/in_memory.py:lines_of: pass rows of one type; a text can be written as {'text': …}",
    lambda w: list(lines_of(["a cat", {"text": "a dog"}], "data")),
    lambda w, remedy: (
        list(lines_of(["a cat", "a dog"], "data")),
        list(lines_of([{"text": "a cat"}, {"text": "a dog"}], "data")),
    ),
)


def nested(depth: int) -> Any:
    value: Any = "a"
    for _ in range(depth):
        value = [value]
    return {"text": "a", "deep": value}


case(
    "data/in_memory.py:lines_of: pass rows with less nesting",
    lambda w: list(lines_of([nested(5000)], "data")),
    lambda w, remedy: list(lines_of([nested(0)], "data")),
)


def as_function() -> Iterator[str]:
    return iter(["a cat"])


case(
    "data/in_memory.py:iterate: pass a list, an iterator, a function that returns one, a datasets.Dataset or a "
    "DataFrame",
    lambda w: iterate(5),
    lambda w, remedy: [list(iterate(rows)) for rows in (["a"], iter(["a"]), as_function)],
)
TEXTS = [f"text {i}" for i in range(30)]


def read_again(rows: Any) -> list[Any]:
    stream = RowStream(rows)
    stream._buffer.clear()  # more was read than is kept
    stream._size = 0
    return list(stream.values(1))


case(
    "data/in_memory.py:RowStream._line: pass a list, a dataset, or a function that returns a new iterator; or "
    "lower max_steps",
    lambda w: read_again(iter(TEXTS)),
    lambda w, remedy: (read_again(TEXTS), read_again(lambda: iter(TEXTS))),
)
SAME = "pass the rows that the run began with, from the first row on, or start a new run"
case(
    f"data/in_memory.py:RowStream.check: {SAME}",
    lambda w: RowStream(TEXTS[1:]).check(5, RowStream(TEXTS).digest_before(5)),
    lambda w, remedy: (
        RowStream(TEXTS).check(5, RowStream(TEXTS).digest_before(5)),
        train(w, ROWS),
    ),
)
case(
    f"data/in_memory.py:RowStream.digest_before: {SAME}",
    lambda w: RowStream(TEXTS).digest_before(99),
    lambda w, remedy: (RowStream(TEXTS).digest_before(9), train(w, ROWS)),
)


# Models and callbacks.
def loaded(w: World, **options: Any) -> Any:
    return trimtab.load(str(w.model), **options)


def passed(w: World, model: Any, **recipe: Any) -> Any:
    return trimtab.train({**settings(w), **recipe}, model=model, data=ROWS)


case(
    "run/starting.py:check_start: leave model.init out, or name the model instead of passing it",
    lambda w: trimtab.train(
        {**settings(w), "model": {"name": str(w.model), "init": "random"}}, model=loaded(w), data=ROWS
    ),
    lambda w, remedy: (
        passed(w, loaded(w)),
        trimtab.train({**settings(w), "model": {"name": str(w.model), "init": "random"}}, data=ROWS),
    ),
)


def follow_merge_or_adapter(w: World, remedy: str) -> None:
    model = loaded(w, adapter=str(w.shared("adapter")), dtype="fp32")
    model.save_adapter(w.tmp / "saved")
    train(w, ROWS, lora={"adapter": str(w.tmp / "saved")})
    model.merge(w.tmp / "merged")
    passed(w, str(w.tmp / "merged"))


case(
    "run/starting.py:check_start: merge them: model.merge(folder), then model=folder; or continue training the "
    "adapter: model.save_adapter(folder), then the base as model with lora={'adapter': folder}",
    lambda w: passed(w, loaded(w, adapter=str(w.shared("adapter")))),
    follow_merge_or_adapter,
)


class Listener:
    """A callback."""

    def on_log(self, record: Any, control: Any) -> None:
        """Does nothing."""


def hooked(w: World, callbacks: Any) -> Any:
    return train(w, ROWS, callbacks=callbacks)


def with_method(name: str) -> Any:
    """A callback with one more method."""
    return type("One", (Listener,), {name: lambda self, *words: None})()


def quoted(remedy: str) -> list[str]:
    return re.findall("'(.*?)'", remedy)


HOOKS = (
    "trainer/callbacks.py:check_callbacks: pass a list of objects with methods such as on_log (see trimtab.Callback): "
    "{}"
)


def follow_hooks(w: World, remedy: str) -> None:
    for name in remedy.partition("Callback): ")[2].split(", "):
        one = type("One", (), {name: lambda self, *words: None})()
        hooked(w, [one])


case(HOOKS, lambda w: hooked(w, Listener()), follow_hooks)
case(HOOKS, lambda w: hooked(w, [5]), lambda w, remedy: hooked(w, [Listener()]))
case(
    "trainer/callbacks.py:check_callbacks: pass an instance: {}()",
    lambda w: hooked(w, [Listener]),
    lambda w, remedy: hooked(w, [eval(remedy.removeprefix("pass an instance: "), {"Listener": Listener})]),
)
case(
    "api/training.py:_checked_model: give run.model()",
    lambda w: passed(w, train(w, ROWS)),
    lambda w, remedy: passed(w, eval(remedy.removeprefix("give "), {"run": train(w, ROWS)})),
)


case(
    "trainer/callbacks.py:_refuse_misspelt: did you mean {}? Name your own methods without the prefix on_",
    lambda w: hooked(w, [with_method("on_logs")]),
    lambda w, remedy: (
        hooked(w, [with_method(remedy.removeprefix("did you mean ").partition("?")[0])]),
        hooked(w, [with_method("logs")]),
    ),
)


def defined(signature: str) -> Any:
    """A callback with one method of that signature."""
    space: dict[str, Any] = {}
    exec(f"class One:\n    def {signature}: pass", space)
    return space["One"]()


case(
    "trainer/callbacks.py:_refuse_uncallable: define it as {}({})",
    lambda w: hooked(w, [defined("on_log(self, record)")]),
    lambda w, remedy: hooked(w, [defined(remedy.removeprefix("define it as "))]),
)
case(
    "trainer/callbacks.py:_refuse_misspelt: use one of {}; name your own methods without the prefix on_",
    lambda w: hooked(w, [with_method("on_epoch_begin")]),
    lambda w, remedy: (
        in_turn(lambda name: hooked(w, [with_method(name)]), listed(remedy.partition(";")[0], "one of")),
        hooked(w, [with_method("epoch_begin")]),
    ),
)
case(
    "api/training.py:_checked_model: give a name or a path, a dict like the recipe's `model`, or the result of "
    "trimtab.load",
    lambda w: passed(w, 5),
    lambda w, remedy: in_turn(
        lambda model: passed(w, model),
        [str(w.model), w.model, {"name": str(w.model)}, loaded(w)],  # type: ignore[list-item]
    ),
)
case(
    "api/training.py:_refuse_objects: pass rows or the name of a source by keyword: trimtab.train(recipe, data=rows)",
    lambda w: trimtab.train({**settings(w), "data": ROWS}),
    lambda w, remedy: trimtab.train(settings(w), data=ROWS),
)
case(
    "api/training.py:_refuse_objects: give a model name or folder, or pass a loaded model by keyword: "
    "trimtab.train(recipe, model=model)",
    lambda w: trimtab.train({**settings(w), "model": loaded(w)}, data=ROWS),
    lambda w, remedy: (
        trimtab.train({**settings(w), "model": str(w.model)}, data=ROWS),
        passed(w, loaded(w)),
    ),
)
case(
    "api/training.py:_refuse_missing: pass model=, such as model='starter'",
    lambda w: trimtab.plan_run(data=ROWS),
    lambda w, remedy: trimtab.plan_run(data=ROWS, model=quoted(remedy)[0]),
)
case(
    "api/training.py:_refuse_missing: pass data=, such as data=['a text', 'another'] or data='texts.jsonl'",
    lambda w: trimtab.train(model="starter"),
    lambda w, remedy: trimtab.plan_run(model="starter", data=quoted(remedy)[:2]),
)
row_case("_refuse_text: give texts to train on as a list: data=[text]", "the cat sat on the mat", TEXTS)
case(
    "api/training.py:_checked_view: give a trimtab.report.LiveView, or None for the terminal",
    lambda w: trimtab.train(settings(w), data=ROWS, view=False),
    lambda w, remedy: (
        trimtab.train(settings(w), data=ROWS, view=LiveView()),
        trimtab.train(settings(w), data=ROWS, view=None),
    ),
)
case(
    "facts/arguments.py:plain_value: give a value that a recipe can contain: text, number, list, dict",
    lambda w: trimtab.train(settings(w), data=ROWS, max_steps=object()),
    lambda w, remedy: trimtab.train(settings(w), data=ROWS, max_steps=1, lora={"target_modules": ["q_proj"]}),
)


# Rows that are not there any more, and rows in addition to files.
def forgotten(w: World) -> object:
    folder = begun(w)
    shutil.rmtree(w.tmp / "cache")
    return trimtab.resume(folder, max_steps=3)


case(
    "run/corpora.py:_SourceOpener._spooled_file: pass them again: trimtab.resume(folder, data=rows) for a run that "
    "began, trimtab.train(recipe, data=rows) for a new one",
    forgotten,
    lambda w, remedy: (continue_run(w, ROWS), train(w, ROWS)),
)


def mixed(w: World, *, rows: bool = True, files: bool = True, streaming: bool = True) -> Any:
    sources = [*([{"source": ROWS}] if rows else []), *(named_files(w) if files else [])]
    data = {
        "train": sources,
        "streaming": streaming,
        "cache_dir": str(w.tmp / "cache"),
        "num_proc": 1,
        "eval_share": 0,
    }
    return train(w, data)


case(
    "run/corpora.py:_SourceOpener.check_streams: set data.streaming: false, or stream only rows or only files",
    mixed,
    lambda w, remedy: (mixed(w, streaming=False), mixed(w, files=False), mixed(w, rows=False)),
)


def quantized(w: World) -> Any:
    model = trimtab.load(str(w.shared("wide")), dtype="fp32")
    quantize_layout(model.opened.decoder, "nf4")
    return model


def follow_quantized(w: World, remedy: str) -> None:
    for key in re.findall(r"load_in_\dbit", remedy):
        train(w, ROWS, model=str(w.shared("wide")), lora={"r": 2}, **{key: True})


case(
    "run/starting.py:check_start: name its source as the model, with load_in_4bit or load_in_8bit and lora",
    lambda w: passed(w, quantized(w)),
    follow_quantized,
)
