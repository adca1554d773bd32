"""The embedded data by name, and reports of run folders."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from cases import World, case, in_turn, listed

from trimtab.starter.files import data_file, recipe_file
from trimtab.starter.math import math_problems, worked


def offers(key: str, attempt: Callable[[str], object]) -> None:
    case(key, lambda w: attempt("poetry"), lambda w, remedy: in_turn(attempt, listed(remedy, "one of")))


offers("starter/files.py:data_file: use one of {}", data_file)
offers("starter/files.py:recipe_file: use one of {}", recipe_file)
offers("starter/math.py:worked: use one of {}", lambda split: worked("addition", random.Random(0), split))
case(
    "starter/math.py:math_problems: request at most 1000",
    lambda w: math_problems(0, 10**6),
    lambda w, remedy: math_problems(0, int(remedy.split()[-1])),
)


def from_starter(w: World, *names: str) -> str:
    sources = [{"source": name, "first": 20} for name in names]
    return w.train(model=str(w.shared("chat")), data_train=sources, max_steps=1)


case(
    "run/corpora.py:_SourceOpener._starter_file: use one of {}",
    lambda w: from_starter(w, "starter:poetry"),
    lambda w, remedy: from_starter(w, *remedy.partition("one of ")[2].split(", ")),
)


# Reports.


def run(w: World) -> Path:
    target = w.tmp / "run"
    if not target.exists():
        shutil.copytree(w.shared("run") / "run", target)
    return target


case(
    "report/html.py:write_html: give another path with {}",
    lambda w: w.cli("report", run(w), "--out", w.tmp / "absent" / "report.html"),
    lambda w, remedy: w.cli("report", run(w), re.findall(r"--\w+", remedy)[0], w.tmp / "report.html"),
)
case(
    "report/rundata.py:read_run: give a run folder, such as runs/demo",
    lambda w: w.cli("report", w.tmp),
    lambda w, remedy: w.cli("report", run(w)),
)


def damaged(name: str, content: str) -> Callable[[World], object]:
    def provoke(w: World) -> object:
        (run(w) / name).write_text(content)
        return w.cli("report", run(w))

    return provoke


def follow_restored(name: str) -> Callable[[World, str], object]:
    def follow(w: World, remedy: str) -> None:
        assert remedy == "restore it from a copy, or remove it"
        (run(w) / name).unlink()
        w.cli("report", run(w))
        shutil.copy(w.shared("run") / "run" / name, run(w) / name)
        w.cli("report", run(w))

    return follow


RESTORE = "restore it from a copy, or remove it"
case(f"report/rundata.py:_json: {RESTORE}", damaged("plan.json", "{"), follow_restored("plan.json"))
case(f"report/rundata.py:_json: {RESTORE}", damaged("choices.json", "[]"), follow_restored("choices.json"))
case(
    f"report/rundata.py:_plan: {RESTORE}",
    damaged("plan.json", '{"memory": {"peak": {"weights": "many"}}}'),
    follow_restored("plan.json"),
)
