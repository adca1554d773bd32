"""Snapshots of torch's CUDA allocator, in the form that pytorch.org/memory_viz draws.

The file is torch's own pickle: trimtab writes it only where the user requests it by name, and never reads one.
`AttributedTimeline.write` writes trimtab's own record as JSON, on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

MOST_EVENTS = 1_000_000


def write_torch_snapshot(run: Callable[[], object], path: Path) -> None:
    """Runs once and writes every allocation with its Python stack.

    Example:
        >>> write_torch_snapshot(step, Path("snapshot.pickle"))                      # doctest: +SKIP
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    try:
        run()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
