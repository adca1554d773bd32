"""Cases of remedies: how to provoke an error, and how to follow its remedy.

    case("adapt/lora.py:attach_adapters: use letters, digits, - and _", provoke, follow)

The first text is the site's name in `inventory`. `provoke(w)` must raise that site's error; `follow(w, remedy)` does
what the remedy says, reading names and values out of its text wherever it has some, and must not be refused.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from inventory import PACKAGE, ROW_ERROR, Site
from loopback_hub import LoopbackHub
from tiny_model import write_recipe, write_texts

from trimtab.facts.errors import TrimtabError


@dataclass(frozen=True)
class Case:
    """The test case of a remedy."""

    key: str
    provoke: Callable[[World], object]
    follow: Callable[[World, str], object]


CASES: list[Case] = []


def case(key: str, provoke: Callable[[World], object], follow: Callable[[World, str], object]) -> None:
    """Add a case to the table."""
    CASES.append(Case(key, provoke, follow))


@dataclass
class World:
    """Fixtures of a case: a temporary folder, a tiny model, a trained run, recipes."""

    tmp: Path
    model: Path
    """A tiny Hugging Face folder that cases must not change; `own_model` is a copy for changes."""
    shared: Callable[[str], Path]
    """Folders that all cases share, by name; cases must not change them."""
    patch: pytest.MonkeyPatch
    """Changes of environment and settings, undone after the case."""
    closing: contextlib.ExitStack
    kept: dict[str, Any] = field(default_factory=dict)
    """Values that `provoke` passes to `follow`."""

    @functools.cached_property
    def hub(self) -> LoopbackHub:
        """A hub on loopback, empty at first."""
        return self.closing.enter_context(LoopbackHub())

    def own(self, name: str = "model") -> Path:
        """A case's copy of a shared folder, which may be changed."""
        target = self.tmp / f"own-{name}"
        if not target.exists():
            shutil.copytree(self.model if name == "model" else self.shared(name), target)
        return target

    def again(self, name: str = "model") -> Path:
        """Restore the copy, like a second download."""
        shutil.rmtree(self.tmp / f"own-{name}")
        return self.own(name)

    def cli(self, *words: object) -> str:
        """A command's output; its error as an exception."""
        from trimtab.cli.commands import _run

        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            code = _run([str(word) for word in words])
        assert code == 0, shown.getvalue()
        return shown.getvalue()

    def recipe(self, **changes: Any) -> Path:
        """A recipe of two steps over the tiny model, without evaluation; `data_…` are keys of `data`."""
        write_texts(self.tmp / "texts.jsonl", 5, 30)
        if not (self.tmp / "model").exists():
            (self.tmp / "model").symlink_to(self.model)
        data: dict[str, Any] = {
            "train": [str(self.tmp / "texts.jsonl")],
            "eval_share": 0,
            "cache_dir": str(self.tmp / "cache"),
            "num_proc": 1,
        }
        for key in [key for key in changes if key.startswith("data_")]:
            data[key.removeprefix("data_")] = changes.pop(key)
        small: dict[str, Any] = {
            "model": str(self.model),
            "data": data,
            "num_train_epochs": None,
            "max_steps": 2,
            "eval_steps": None,
            "save_steps": None,
            "logging_steps": 1,
            "eval_on_start": False,
            "gradient_accumulation_steps": 1,
        }
        return write_recipe(self.tmp, **{**small, **changes})

    def plan(self, *overrides: str, **changes: Any) -> str:
        """`trimtab plan` of the recipe."""
        return self.cli("plan", self.recipe(**changes), *overrides)

    def train(self, *overrides: str, **changes: Any) -> str:
        """`trimtab train` of the recipe, in a new run folder."""
        folder = self.tmp / f"run-{len(list(self.tmp.glob('run-*')))}"
        return self.cli("train", self.recipe(**{"output_dir": str(folder), **changes}), *overrides)

    def edit_json(self, path: Path, **changes: Any) -> None:
        """Change keys of a JSON file; `...` removes a key."""
        content = json.loads(path.read_text()) if path.exists() else {}
        content = {key: value for key, value in {**content, **changes}.items() if value is not ...}
        path.write_text(json.dumps(content))


def listed(remedy: str, after: str) -> list[str]:
    """The names that a remedy offers in a list: `use one of a, b or c`.

    Example:
        >>> listed("use auto or one of a, b (c)", "one of")
        ['a', 'b']
    """
    text = remedy.partition(after)[2].partition(";")[0].partition(" (")[0].partition(":")[0]
    assert text.strip(), (remedy, after)
    return [word.strip().strip("`'") for word in re.split(r", | or | and ", text) if word.strip()]


def settings(remedy: str) -> list[list[str]]:
    """The alternatives `key: value` of a remedy as overrides: `set a: 1 with b: 2, or c: x` → [[a=1, b=2], [c=x]].

    Example:
        >>> settings("set dtype: bf16, or weights_dtype: fp32")
        [['dtype=bf16'], ['weights_dtype=fp32']]
        >>> settings("set a_b: {r: 16} (saves 3 MiB), or x.y: [a, b] with z: 1: together")
        [['a_b={r: 16}'], ['x.y=[a, b]', 'z=1']]
        >>> settings("leave them out (a=null b.c=null), or set d=x")
        [['a=null', 'b.c=null'], ['d=x']]
    """
    text = re.sub(r"\((saves|with) [^)]*\)", "", remedy.replace("keep one of them: ", ""))
    value = r"(\{[^}]*\}|\[[^\]]*\]|[^\s,;:{\[)]+)"
    found: list[list[str]] = []
    end = None
    for match in re.finditer(rf"([a-z][a-z_0-9.]*)(?:: |=){value}", text):
        between = "" if end is None else text[end : match.start()]
        override = f"{match[1]}={match[2]}"
        if end is None or re.search(r"\bor\b", between):
            found.append([override])
        else:
            found[-1].append(override)
        end = match.end()
    assert found, remedy
    return found


def in_turn(attempt: Callable[[str], object], names: list[str]) -> None:
    """Try every alternative of a remedy."""
    assert names
    for name in names:
        attempt(name)


@contextlib.contextmanager
def recorded_sites() -> Iterator[None]:
    """Context manager in which errors record the line that created them."""
    plain = TrimtabError.__init__

    def remember(self: TrimtabError, *words: Any, **more: Any) -> None:
        plain(self, *words, **more)
        frame: Any = sys._getframe(1)
        while frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self:
            frame = frame.f_back  # a kind of error with more to say
        self.built_at = (frame.f_code.co_filename, frame.f_lineno)  # type: ignore[attr-defined]

    TrimtabError.__init__ = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrimtabError.__init__ = plain  # type: ignore[method-assign]


def came_from(error: BaseException | None, site: Site) -> bool:
    """Whether an error, or its cause, was created at a site."""
    while error is not None:
        if type(error).__name__ == ROW_ERROR and error.__traceback__ is not None:
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            place: tuple[str, int] | None = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        else:
            place = getattr(error, "built_at", None)
        here = place is not None and Path(place[0]) == PACKAGE / site.module
        if here and site.lines[0] <= place[1] <= site.lines[1]:  # type: ignore[index]
            return True
        error = error.__cause__ or error.__context__
    return False
