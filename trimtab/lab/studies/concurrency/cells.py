"""Validates the options of the concurrency study and returns its cells."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.api.prompt_files import read_prompts
from trimtab.facts.errors import DataError, RecipeError
from trimtab.lab.studies.concurrency.ways import Way
from trimtab.lab.study import Cell
from trimtab.run.locate import STARTER
from trimtab.starter import math_problems

PROMPTS = 32
PROMPTS_SEED = 26
NEW_TOKENS = 48
MOST_WORKERS = 64


@dataclass(frozen=True)
class ConcurrencySettings:
    """The settings that identify a measurement."""

    way: str
    model: str
    file: str | None
    """The file of prompts; None for held-out problems of the starter's mathematics."""
    digest: str
    """Digest of the prompts: a changed file is another measurement."""
    max_new_tokens: int
    workers: int
    cores: int
    device: str

    def settings(self) -> dict[str, Any]:
        """The settings of a cell."""
        return asdict(self)


def cells(
    ways: Sequence[str] = (),
    *,
    file: Path | None = None,
    model: str = STARTER,
    max_new_tokens: int = NEW_TOKENS,
    workers: int | None = None,
    device: str = "cpu",
) -> list[Cell]:
    """One cell per way.

    Args:
        ways: names of ways; all by default.
        file: prompts, one per line (.txt), or .jsonl or .csv with `prompt`; by default 32 problems of mathematics.
        model: `starter`, a folder, a GGUF file, a run folder or a hub id.
        max_new_tokens: the maximum for each prompt.
        workers: concurrent threads or processes; by default one per core, from 2 to 4.
        device: cpu, cuda or cuda:N.

    Raises:
        RecipeError: an unknown way, or a number out of range.
        DataError: the file of prompts cannot be read, or has conversations.

    Example:
        >>> [cell.settings["way"] for cell in cells(["batch", "threads"])]
        ['batch', 'threads']
    """
    cores = available_cores()
    workers = max(2, min(4, cores)) if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise RecipeError(f"--workers {workers} is out of range", f"use 1 to {MOST_WORKERS}")
    if max_new_tokens < 1:
        raise RecipeError(f"--max-new-tokens {max_new_tokens} is too small", "use at least 1")
    names = [validate_way(way) for way in ways] or [way.value for way in Way]
    digest = hashlib.sha256(json.dumps(prompts(file)).encode()).hexdigest()[:12]
    place = None if file is None else str(file)
    return [
        Cell(
            "concurrency",
            ConcurrencySettings(
                name, model, place, digest, max_new_tokens, workers, cores, device
            ).settings(),
        )
        for name in dict.fromkeys(names)
    ]


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def validate_way(name: str) -> str:
    """Checks the name of a way; raises RecipeError with the nearest name if it is unknown.

    Example:
        >>> validate_way("batch")
        'batch'
    """
    known = [way.value for way in Way]
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise RecipeError(f"there is no way {name!r} to generate", f"{hint}the ways are {', '.join(known)}")


def prompts(file: Path | None) -> list[str]:
    """The prompts of a file, or the built-in ones.

    Example:
        >>> len(prompts(None)), prompts(None)[0].startswith("Question: ")
        (32, True)
    """
    if file is None:
        return [problem.prompt for problem in math_problems(PROMPTS_SEED, PROMPTS)]
    prompts = []
    for row in read_prompts(file):
        prompt = row.prompt()
        if not isinstance(prompt, str):
            raise DataError(f"{row.place} is a conversation", "use prompts that are plain text")
        prompts.append(prompt)
    return prompts
