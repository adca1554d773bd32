"""The studies, each a package with cells.py, measure.py and report.py. Listing them imports no torch."""

from __future__ import annotations

from importlib import import_module

from trimtab.lab.study import Study

TITLES = {
    "sizes": "Parameters of the study models",
    "step": "Time of a training step",
    "kernels": "Kernels of a training step",
    "memory": "Memory of the study models",
    "attention": "Attention: time and memory by backend and length",
    "compile": "What torch.compile costs and gains",
    "claims": "Claims about training, put to the test",
    "concurrency": "One file of prompts: threads, asyncio, processes and batches",
}
"""Title of each study's report, in the order of the suite."""
IN_PROCESS = frozenset({"sizes"})
"""Studies that count instead of measuring: they need no worker process and no torch."""


def find_study(name: str) -> Study:
    """The study of a name.

    Example:
        >>> find_study("sizes").title
        'Parameters of the study models'
    """
    report = import_module(f"trimtab.lab.studies.{name}.report")
    place = f"trimtab.lab.studies.{name}.measure:measure"
    return Study(name, TITLES[name], report.sections, place, in_process=name in IN_PROCESS)
