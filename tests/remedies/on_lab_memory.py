"""The memory study and `trimtab profile`: what each refusal names works."""

from __future__ import annotations

import re
from pathlib import Path

from cases import World, case, settings
from full_memory import SMALL, FullMemory
from tiny_model import write_recipe

from trimtab.lab.memory_summary import MemorySummary
from trimtab.lab.profile_options import ProfileOptions, check_options
from trimtab.lab.profile_target import find_target
from trimtab.lab.profiling import profile_recipe
from trimtab.lab.studies.memory.cells import Options, cells
from trimtab.lab.studies.memory.results import MemoryResult
from trimtab.recipe import load
from trimtab.run.prepare import Prepared

CELLS = "lab/studies/memory/cells.py"
OPTIONS = "lab/profile_options.py:check_options"


def shortest_and_longest(w: World, remedy: str) -> None:
    assert cells(Options(["tiny"], [int(number) for number in re.findall(r"\d+", remedy)]))


case(
    f"{CELLS}:_check_contexts: use 1 to {{}}",
    lambda w: cells(Options(["tiny"], contexts=[0])),
    shortest_and_longest,
)


def measured_again(w: World, remedy: str) -> None:
    from trimtab.lab.studies.memory.measure import measure

    (cell,) = cells(Options(["tiny"], [8], ["fp32"], ["forward"], batch=1))
    assert MemoryResult.from_dict(measure(dict(cell.settings))).memory.peak_bytes > 0


case(
    "lab/memory_summary.py:MemorySummary.from_dict: measure it with --remeasure",
    lambda w: MemorySummary.from_dict({}),
    measured_again,
)
case(
    "lab/studies/memory/results.py:MemoryResult.from_dict: measure it with --remeasure",
    lambda w: MemoryResult.from_dict({}),
    measured_again,
)


def prepared(w: World) -> Prepared:
    write_recipe(w.tmp)
    return find_target(load(w.tmp / "recipe.yaml")).prepared


case(
    f"{OPTIONS}: use at least 1 step, and a warm-up of at least 0",
    lambda w: check_options(ProfileOptions(steps=0), prepared(w)),
    lambda w, remedy: check_options(ProfileOptions(steps=1, warm_up=0), prepared(w)),
)


def documents(w: World, remedy: str) -> None:
    for number in re.findall(r"\d+", remedy):
        check_options(ProfileOptions(document=int(number)), prepared(w))


case(
    f"{OPTIONS}: use 2 to {{}} tokens",
    lambda w: check_options(ProfileOptions(document=1), prepared(w)),
    documents,
)
case(
    f"{OPTIONS}: remove --nvtx, or --trace and --snapshot",
    lambda w: check_options(ProfileOptions(nvtx=True, trace=True), prepared(w)),
    lambda w, remedy: check_options(ProfileOptions(trace=True), prepared(w)),
)
case(
    f"{OPTIONS}: remove {{}}; the report and memory.json are written on a CPU too",
    lambda w: check_options(ProfileOptions(snapshot=Path("x")), prepared(w)),
    lambda w, remedy: check_options(ProfileOptions(), prepared(w)),
)


def without_memory(w: World) -> None:
    write_recipe(w.tmp, recompute="none")
    with FullMemory("trainer/microstep.py", backward=True, message=SMALL):
        profile_recipe(w.tmp / "recipe.yaml", options=ProfileOptions(steps=1, warm_up=0))


def with_less(w: World, remedy: str) -> None:
    """It needs less than the run that had no memory."""
    before = find_target(load(w.tmp / "recipe.yaml")).prepared.plan
    after = find_target(load(w.tmp / "recipe.yaml", settings(remedy)[0])).prepared.plan
    assert after.memory.needed < before.memory.needed


case("lab/profiling.py:_explained: set {}", without_memory, with_less)
