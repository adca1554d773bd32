"""Records torch.compile at work: graph breaks with their places, compilations with their reasons and seconds.

All of it comes from the metrics that torch keeps of each compilation (`torch._dynamo.utils`), so that recording does
not change what is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import _dynamo as dynamo

from trimtab.lab.compile_data import Compilation, CompileLog, GraphBreak

MOST_COMPILATIONS = 10_000
"""Limit of torch's compilation metrics, instead of its default of 64."""
LONGEST_REASON = 300

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_NUMBER = re.compile(r"^\d+/\d+: ")


@contextmanager
def record_compilations() -> Iterator[Callable[[], CompileLog]]:
    """Records every compilation inside; resets compiled code from before.

    Yields a function that returns the record so far.

    Example:
        >>> import torch
        >>> with record_compilations() as recorded:
        ...     f = torch.compile(lambda x: x.sin() + 1, backend="eager")
        ...     _ = f(torch.ones(3))
        >>> recorded().graphs, recorded().breaks
        (1, ())
    """
    utils: Any = dynamo.utils
    dynamo.reset()
    utils.counters.clear()
    utils.graph_break_reasons.clear()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(MOST_COMPILATIONS)
    before = _seconds()
    logs: list[CompileLog] = []

    def recorded() -> CompileLog:
        return logs[0] if logs else _read(before)

    try:
        yield recorded
    finally:
        logs.append(_read(before))
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)


def _seconds() -> float:
    return float(dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))


def _read(before: float) -> CompileLog:
    utils: Any = dynamo.utils
    return CompileLog(
        graphs=int(utils.counters["stats"]["unique_graphs"]),
        seconds=_seconds() - before,
        breaks=_breaks(utils.graph_break_reasons),
        compilations=_compilations(utils.get_compilation_metrics()),
        cached=int(utils.counters["inductor"]["fxgraph_cache_hit"]),
    )


def _breaks(reasons: list[Any]) -> tuple[GraphBreak, ...]:
    """Graph breaks by place: one in an inlined function occurs again when that function is compiled alone."""
    reasons_by_place: dict[str, list[str]] = {}
    for entry in reasons:
        if not entry.graph_break:
            continue
        frame = entry.user_stack[-1] if entry.user_stack else None
        place = "unknown" if frame is None else place_of(frame.filename, frame.lineno)
        reasons_by_place.setdefault(place, []).append(break_reason(entry.reason))
    return tuple(GraphBreak(place, texts[0], len(texts)) for place, texts in reasons_by_place.items())


def break_reason(text: str) -> str:
    """A graph break's reason in one line: torch's headline and, where there is one, its explanation.

    Example:
        >>> break_reason("Unsupported context manager\\n  Explanation: Dynamo does not know it.\\n  Hint: avoid it")
        'Unsupported context manager: Dynamo does not know it.'
    """
    headline = text.strip().partition("\n")[0]
    explained = _EXPLANATION.search(text)
    return _cut(f"{headline}: {explained[1]}" if explained else headline)


def _compilations(metrics: list[Any]) -> tuple[Compilation, ...]:
    """Functions in the order of compilation; seconds of a backward pass are added to its forward pass."""
    seconds: dict[str, float] = {}
    for metric in metrics:
        seconds[metric.compile_id] = seconds.get(metric.compile_id, 0.0) + (metric.duration_us or 0) / 1e6
    return tuple(
        Compilation(
            metric.co_name,
            place_of(metric.co_filename or "", metric.co_firstlineno),
            recompile_reason(getattr(metric, "recompile_reason", None)),
            round(seconds[metric.compile_id], 6),
            metric.graph_op_count or 0,
        )
        for metric in metrics
        if metric.co_name is not None and metric.fail_type is None
    )


def recompile_reason(text: str | None) -> str:
    """The reason of a recompilation in one line, without torch's id of the previous program.

    Example:
        >>> recompile_reason("0/0: tensor 'x' size mismatch at index 0. expected 8, actual 16")
        "tensor 'x' size mismatch at index 0. expected 8, actual 16"
    """
    line = (text or "").strip().partition("\n")[0]
    return _cut(_NUMBER.sub("", line))


def place_of(file: str, line: int | None) -> str:
    """file:line, relative to site-packages, the checkout or the current folder.

    Example:
        >>> place_of("/usr/lib/python3/site-packages/torch/nn/functional.py", 12)
        'torch/nn/functional.py:12'
    """
    short = _PACKAGES.sub("", file)
    for root in (Path(__file__).parents[2], Path.cwd()):
        short = short.removeprefix(f"{root}/")
    return f"{short}:{line}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
