"""Running out of memory: the command that the error names resumes the run."""

from __future__ import annotations

import re
import shlex

from cases import World, case
from full_memory import FullMemory

import trimtab
from trimtab import launch
from trimtab.recipe import load
from trimtab.report import LiveView


def trained_without_memory(w: World) -> None:
    recipe = w.recipe(per_device_train_batch_size=4, max_steps=2)
    with FullMemory("trainer/microstep.py", backward=True):
        launch.train(load(recipe), LiveView())


def by_its_command(w: World, remedy: str) -> None:
    command = re.search(r"`trimtab (train --resume [^`]+)`", remedy)
    assert command is not None
    w.cli(*shlex.split(command[1]))


case("run/memory_record.py:with_remedy: {}", trained_without_memory, by_its_command)


def measured_without_memory(w: World) -> None:
    model = trimtab.load(str(w.model))
    with FullMemory("evaluate/likelihood.py"):
        model.loss(["the cat"] * 8, batch_size=8)


def with_a_smaller_batch(w: World, remedy: str) -> None:
    assert "--batch-size" in remedy
    trimtab.load(str(w.model)).loss(["the cat"] * 8, batch_size=1)


case("run/out_of_memory.py:explaining_memory: {}", measured_without_memory, with_a_smaller_batch)
