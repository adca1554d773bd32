"""trimtab: train large language models on the hardware you have, and know before the run what it will take.

    import trimtab

    model = trimtab.load("Qwen/Qwen3-0.6B-Base")      # a hub id, a folder, a GGUF file or a run folder
    print(model.generate("The derivative of x^2 is"))

    run = trimtab.train("recipe.yaml", max_steps=100)  # the same job as `trimtab train recipe.yaml max_steps=100`
    run = trimtab.train(model="starter", data=rows)    # or keys by name, and rows that are in memory
    run.model().save("my-model")                       # a folder that transformers loads

Nothing heavy is imported until it is used. Import trimtab before torch: it limits how long idle OpenMP threads spin,
which OpenMP reads when torch is imported (`trimtab.facts.openmp`).
"""

from __future__ import annotations

from trimtab.facts.openmp import limit_spinning

TYPE_CHECKING = False  # without the import of typing: the command line handles Ctrl-C only after this module
if TYPE_CHECKING:
    from typing import Any

    from trimtab.api import Model, RunResult, load, plan_run, plan_table, resume, solve, train, what_if
    from trimtab.facts.errors import TrimtabError
    from trimtab.lab.profiling import profile_recipe
    from trimtab.run.listing import runs
    from trimtab.trainer.callbacks import Callback

__version__ = "0.1.0"

limit_spinning()  # before anything imports torch, whose OpenMP runtime reads its settings once

_HOMES = {
    "Callback": "trimtab.trainer.callbacks",
    "load": "trimtab.api",
    "train": "trimtab.api",
    "plan_run": "trimtab.api",
    "plan_table": "trimtab.api",
    "profile_recipe": "trimtab.lab.profiling",
    "solve": "trimtab.api",
    "what_if": "trimtab.api",
    "resume": "trimtab.api",
    "runs": "trimtab.run.listing",
    "Model": "trimtab.api",
    "RunResult": "trimtab.api",
    "TrimtabError": "trimtab.facts.errors",
}

__all__ = [
    "Callback",
    "Model",
    "RunResult",
    "TrimtabError",
    "__version__",
    "load",
    "plan_run",
    "plan_table",
    "profile_recipe",
    "resume",
    "runs",
    "solve",
    "train",
    "what_if",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
