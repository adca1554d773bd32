"""Sizes and steps: what each refusal of an option or a record names works."""

from __future__ import annotations

import re
from typing import Any

from cases import World, case, in_turn, listed

from trimtab.lab.choices import parse_counts
from trimtab.lab.step_times import StepTimes
from trimtab.lab.studies.sizes.cells import cells as size_cells
from trimtab.lab.studies.step.cells import cells
from trimtab.lab.studies.step.measure import measure
from trimtab.lab.studies.step.result import StepResult
from trimtab.lab.study_models import named_shape, study_model

MODELS, CHOICES, CELLS = "lab/study_models.py", "lab/choices.py", "lab/studies/step/cells.py"
TINY: dict[str, Any] = {"device": "cpu", "sizes": ["tiny"], "contexts": [8]}


def ask(**options: Any) -> list[dict[str, Any]]:
    found = [dict(cell.settings) for cell in cells(**{**TINY, **options})]
    assert found
    return found


def number(remedy: str) -> int:
    found = re.search(r"\d+", remedy)
    assert found is not None, remedy
    return int(found[0])


case(
    f"{MODELS}:study_model: {{}}the sizes are {{}}",
    lambda w: study_model("smal"),
    lambda w, remedy: in_turn(study_model, listed(remedy, "the sizes are")),
)


def any_named_model(w: World, remedy: str) -> None:
    in_turn(named_shape, listed(remedy, "the sizes are"))
    for name in (str(w.recipe()), "Qwen/Qwen3-0.6B", str(w.model), str(w.model / "config.json")):
        assert size_cells([name])


case(
    f"{MODELS}:named_shape: {{}}the sizes are {{}}; or name a recipe, a hub id of the catalogue, a folder, a "
    "config.json or a GGUF file",
    lambda w: named_shape("smal"),
    any_named_model,
)
case(
    f"{CHOICES}:choose_names: {{}}choose from {{}}",
    lambda w: ask(precisions=["bf61"]),
    lambda w, remedy: in_turn(lambda name: ask(precisions=[name]), listed(remedy, "choose from")),
)
case(
    f"{CHOICES}:check_counts: use at least {{}}",
    lambda w: ask(steps=0),
    lambda w, remedy: ask(steps=number(remedy)),
)
case(
    f"{CHOICES}:parse_counts: write it like 128,256",
    lambda w: parse_counts("128 256", "--contexts"),
    lambda w, remedy: parse_counts(remedy.split()[-1], "--contexts"),
)
case(
    f"{CHOICES}:check_seconds: give a number of seconds above 0",
    lambda w: ask(budget_s=-1.0),
    lambda w, remedy: ask(budget_s=0.5),
)
case(
    f"{CELLS}:check_model: use at most {{}}",
    lambda w: ask(contexts=[100_000]),
    lambda w, remedy: ask(contexts=[number(remedy)]),
)


def counted_or_of_another_family(w: World, remedy: str) -> None:
    assert "qwen3" in listed(remedy, "time a model of")
    assert ask(sizes=["Qwen/Qwen3-0.6B"])
    w.cli("bench", "sizes", "Qwen/Qwen3-30B-A3B", "--out", w.tmp / "sizes")


case(
    f"{CELLS}:check_model: time a model of {{}}; `trimtab bench sizes` counts any",
    lambda w: ask(sizes=["Qwen/Qwen3-30B-A3B"]),
    counted_or_of_another_family,
)


def measured_once_more(w: World, remedy: str) -> None:
    wanted = ask(parts=["forward"], losses=["logits_sum"], steps=1, warm_up=[1])[0]
    assert StepResult.from_dict(measure(wanted)).times.host.repetitions == 1


case(
    "lab/samples.py:damaged_record: measure once more: the same command with --remeasure",
    lambda w: StepTimes.from_dict({"host": {}, "device": None, "warm_up_ms": []}),
    measured_once_more,
)
